"""Vectors of prompts with pictures are those of transformers, whatever a step cuts or finds."""

import numpy as np
import pytest
import torch

from quire import LLM
from quire.errors import InvalidParameter, RequestError
from tests.models.vision.spoken import IMAGE_ID, picture, write_spoken
from tests.models.vision.spoken_models import IMAGE
from tests.models.vision.test_pictures import as_prompt, inputs_of

ACCURACY = 2e-5  # of numbers of vectors with the length 1
ONE, OTHER = picture(1), picture(2, 25, 50)
PROMPTS = [
    (f"w1 {IMAGE} w2 w3", [ONE]),
    (f"w1 {IMAGE} w2 w3", [OTHER]),
    (f"{IMAGE} w5 w6 {IMAGE}", [ONE, OTHER]),
    ("w7 w8 w9", []),
]


def engine(folder, **options):
    given = {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    return LLM(model=str(folder), runner="pooling", convert="embed", **{**given, **options})


def of_transformers(model, name, folder, ids, pictures, whole=False):
    """The last token's state after the final norm, normalised unless it is wanted `whole`."""
    ids = torch.tensor([ids])
    inputs = inputs_of(name, folder, pictures)
    if pictures and "image_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = (ids == IMAGE_ID).int()
    if name == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE_ID).int()
    with torch.inference_mode():
        states = model.model(input_ids=ids, use_cache=False, **inputs).last_hidden_state
    if whole:
        return states[0, -1]
    return torch.nn.functional.normalize(states[0, -1], dim=-1).numpy()


@pytest.mark.parametrize("name", ["qwen2_vl", pytest.param("llava", marks=pytest.mark.full)])
def test_vectors_are_those_of_transformers(name, tmp_path):
    model = write_spoken(name, tmp_path)
    given = [as_prompt(*each) for each in PROMPTS]
    for options in ({}, {"max_num_batched_tokens": 7}):
        llm = engine(tmp_path, **options)
        for _ in range(2):
            found = llm.embed(given)
            for output, (_, pictures) in zip(found, PROMPTS, strict=True):
                right = of_transformers(model, name, tmp_path, output.prompt_token_ids, pictures)
                np.testing.assert_allclose(output.outputs.embedding, right, atol=ACCURACY)
        assert all(output.num_cached_tokens for output in found[:3])
        del llm


def image_pil(given):
    return {"type": "image_pil", "image_pil": given}


def test_texts_with_pictures_are_scored(tmp_path):
    write_spoken("qwen2_vl", tmp_path)
    llm = engine(tmp_path)
    words = {"type": "text", "text": "w2 w3"}
    contents = [{"content": [image_pil(each), words]} for each in (ONE, OTHER)]
    placed = "<|vision_start|><image><|vision_end|>\nw2 w3"
    prompts = [as_prompt(placed, [each]) for each in (ONE, OTHER)]
    query, *vectors = [
        np.array(output.outputs.embedding) for output in llm.embed(["w1 w4", *prompts])
    ]
    scores = [output.outputs.score for output in llm.score("w1 w4", contents)]
    assert scores == pytest.approx([query @ vector for vector in vectors], abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3
    [turned] = llm.score(contents[0], "w1 w4")
    assert turned.outputs.score == pytest.approx(scores[0], abs=1e-5)
    [plain] = llm.score("w1 w4", {"content": [words]})
    [same] = llm.score("w1 w4", "w2 w3")
    assert plain.outputs.score == same.outputs.score


def test_contents_that_cannot_be_are_refused(tmp_path):
    write_spoken("qwen2_vl", tmp_path)
    llm = engine(tmp_path, limit_mm_per_prompt={"image": 1})
    for parts, named in (
        ([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}], "video_url"),
        ([image_pil(ONE)] * 2, "At most 1 image"),
        ([], "content"),
        ([{"type": "text", "text": 1}], "text"),
    ):
        with pytest.raises(RequestError, match=named):
            llm.score("w1", {"content": parts})
    with pytest.raises(InvalidParameter, match="not cut"):
        from quire import PoolingParams

        read = PoolingParams(extra_kwargs={"max_tokens_per_doc": 3})
        llm.score("w1", {"content": [image_pil(ONE)]}, pooling_params=read)
    with pytest.raises(InvalidParameter, match="not cut"):
        prompt = as_prompt(f"{IMAGE} w2", [ONE])
        llm.embed([prompt], tokenization_kwargs={"truncate_prompt_tokens": 3})
