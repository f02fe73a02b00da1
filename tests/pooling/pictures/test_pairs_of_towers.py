"""Models that compare texts and pictures: vectors of both are those of transformers."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import normalize

from quire import LLM
from quire.errors import RequestError
from quire.media.picture_files import read_picture_settings
from quire.models.config_reader import read_whole_config
from tests.models.vision.spoken import picture
from tests.pooling import test_text_towers
from tests.pooling.test_text_towers import PROMPTS, TEXT

ACCURACY = 1e-5
ONE, OTHER = picture(1), picture(2, 25, 50)
PLAIN = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
FILES = {
    "CLIPModel": {
        "feature_extractor_type": "CLIPFeatureExtractor",
        "do_center_crop": True,
        "size": 32,
        "crop_size": 32,
        **PLAIN,
    },
    "SiglipModel": {
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "SiglipProcessor",
        "size": {"height": 32, "width": 32},
        **PLAIN,
    },
    "Siglip2Model": {
        "image_processor_type": "Siglip2ImageProcessor",
        "processor_class": "Siglip2Processor",
        "patch_size": 16,
        "max_num_patches": 9,
        **PLAIN,
    },
}


def make(folder, name):
    model = test_text_towers.make(folder, name)
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES[name]))
    vocab = {f"w{i}": i for i in range(TEXT["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "w0"}))
    return model


def of_transformers(model, folder, given):
    processor = read_picture_settings(folder, read_whole_config(folder)).read()
    arrays = processor.arrays(given, processor.layout(given.height, given.width))
    inputs = {name: torch.tensor(array) for name, array in arrays.items()}
    if "spatial_shapes" in inputs:
        shapes = inputs["spatial_shapes"].reshape(-1, 2)
        pixels = inputs["pixel_values"].reshape(1, -1, inputs["pixel_values"].shape[-1])
        pixels = pixels[:, : int(shapes[0].prod())]
        mask = torch.ones(pixels.shape[:2], dtype=torch.int64)
        inputs = {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}
    else:
        inputs = {"pixel_values": inputs["pixel_values"].reshape(1, 3, 32, 32)}
    with torch.inference_mode():
        found = model.get_image_features(**inputs)
    found = found if isinstance(found, torch.Tensor) else found.pooler_output
    return normalize(found[0], dim=-1).numpy()


def as_prompt(given):
    return {"prompt": "", "multi_modal_data": {"image": given}}


def embedded(llm, prompts):
    return [np.array(output.outputs.embedding) for output in llm.embed(prompts)]


@pytest.mark.parametrize(
    "name",
    ["CLIPModel", "SiglipModel", pytest.param("Siglip2Model", marks=pytest.mark.full)],
)
def test_vectors_are_those_of_transformers(name, tmp_path):
    model = make(tmp_path, name)
    llm = LLM(model=str(tmp_path), dtype="float32", max_model_len=40)
    text = PROMPTS[1]
    mixed = [as_prompt(ONE), text, as_prompt(OTHER), as_prompt(ONE)]
    first, spoken, second, again = embedded(llm, mixed)
    assert first.shape == spoken.shape
    np.testing.assert_allclose(first, of_transformers(model, tmp_path, ONE), atol=ACCURACY)
    np.testing.assert_allclose(second, of_transformers(model, tmp_path, OTHER), atol=ACCURACY)
    np.testing.assert_array_equal(again, first)
    right = test_text_towers.vector(model, text)
    np.testing.assert_allclose(spoken, normalize(right, dim=-1).numpy(), atol=ACCURACY)
    llm.reset_encoder_cache()
    [alone] = embedded(llm, as_prompt(OTHER))
    np.testing.assert_array_equal(alone, second)
    parts = [{"content": [{"type": "image_pil", "image_pil": each}]} for each in (ONE, OTHER)]
    scores = [output.outputs.score for output in llm.score("w5 w6", parts)]
    [query] = embedded(llm, ["w5 w6"])
    assert scores == pytest.approx([query @ first, query @ second], abs=1e-5)


def test_a_text_with_a_picture_is_refused(tmp_path):
    make(tmp_path, "CLIPModel")
    llm = LLM(model=str(tmp_path), dtype="float32", max_model_len=40)
    for prompt in (
        {"prompt": "w5 w6", "multi_modal_data": {"image": ONE}},
        {"prompt": "", "multi_modal_data": {"image": [ONE, OTHER]}},
        {"prompt_token_ids": [3, 4], "multi_modal_data": {"image": ONE}},
    ):
        with pytest.raises(RequestError, match="either a text or one picture"):
            llm.embed(prompt)
    assert embedded(llm, "w5 w6")


def test_the_width_of_pictures_is_that_of_the_whole(tmp_path):
    """Published files may state another one in text_config, which transformers does not read."""
    model = make(tmp_path, "CLIPModel")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["projection_dim"] = 512
    path.write_text(json.dumps(config))
    llm = LLM(model=str(tmp_path), dtype="float32", max_model_len=40)
    [found] = embedded(llm, as_prompt(ONE))
    np.testing.assert_allclose(found, of_transformers(model, tmp_path, ONE), atol=ACCURACY)


def test_texts_are_padded_as_siglip_was_trained(tmp_path):
    make(tmp_path, "SiglipModel")
    llm = LLM(model=str(tmp_path), dtype="float32", max_model_len=40)
    [right] = embedded(llm, [[5, 6] + [0] * 38])
    [found] = llm.embed("w5 w6", tokenization_kwargs={"padding": "max_length"})
    np.testing.assert_array_equal(found.outputs.embedding, right)
    [short] = llm.embed("w5 w6", tokenization_kwargs={"padding": "max_length", "max_length": 4})
    assert short.prompt_token_ids == [5, 6, 0, 0]
    with pytest.raises(RequestError, match="max_length"):
        llm.embed("w5", tokenization_kwargs={"padding": True})
