"""Models that have a vector for each token of a text and of a picture: ColQwen2 and ColPali."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM
from tests.models.vision.spoken import IMAGE_ID, picture, write_side_files, write_spoken
from tests.models.vision.spoken_models import IMAGE, SPOKEN
from tests.models.vision.test_pictures import as_prompt, inputs_of
from tests.models.vision.wholes import config_of, write_drawn

ONE, OTHER = picture(1), picture(2, 25, 50)
WIDTH = 12
FULL = pytest.mark.full
MODELS = {"qwen2_vl": "ColQwen2", "paligemma": "ColPali"}


def write(name, folder):
    """The files of a retriever around a model."""
    kind = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(
        vlm_config=config_of(SPOKEN[name].whole).to_dict(), embedding_dim=WIDTH
    )
    model = write_drawn(getattr(transformers, f"{kind}ForRetrieval"), config, folder)
    write_side_files(name, folder)
    path = folder / "processor_config.json"
    files = json.loads(path.read_text())
    path.write_text(json.dumps({**files, "processor_class": f"{kind}Processor"}))
    return model


def engine(folder, **options):
    given = {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    return LLM(model=str(folder), **{**given, **options})


def of_transformers(model, name, folder, ids, pictures):
    ids = torch.tensor([ids])
    inputs = inputs_of(name, folder, pictures)
    kinds = (ids == IMAGE_ID).int()
    if "image_grid_thw" in inputs:
        # 5.24 counts positions on one axis here, other than its Qwen2-VL and what was trained
        grid = inputs["image_grid_thw"]
        inputs["position_ids"] = model.vlm.get_rope_index(ids, kinds, image_grid_thw=grid)[0]
        inputs["pixel_values"] = inputs["pixel_values"][None]
    elif name == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(ids)  # which it means for unpadded texts
    with torch.inference_mode():
        found = model(input_ids=ids, **inputs)
    return found.embeddings[0].numpy()


@pytest.mark.parametrize("name", MODELS)
def test_vectors_are_those_of_transformers(name, tmp_path):
    model = write(name, tmp_path)
    asked = [(f"{IMAGE} w2 w3", [ONE]), (f"{IMAGE} w2 w3", [OTHER]), ("w7 w8 w9", [])]
    given = [as_prompt(*each) for each in asked]
    llm = engine(tmp_path)
    outputs = llm.encode(given, pooling_task="token_embed")
    found = [output.outputs.data.numpy() for output in outputs]
    for output, vectors, (_, pictures) in zip(outputs, found, asked, strict=True):
        right = of_transformers(model, name, tmp_path, output.prompt_token_ids, pictures)
        assert vectors.shape == right.shape and right.shape[1] == WIDTH
        np.testing.assert_allclose(vectors, right, atol=2e-5)
    *pages, query = found
    right = [(query @ page.T).max(axis=1).sum() for page in pages]
    parts = [[{"type": "image_pil", "image_pil": page}] for page in (ONE, OTHER)]
    if name == "paligemma":  # whose template is the placeholder
        pages = [part + [{"type": "text", "text": "w2 w3"}] for part in parts]
        scores = llm.score("w7 w8 w9", [{"content": page} for page in pages])
        assert [score.outputs.score for score in scores] == pytest.approx(right, abs=1e-4)


def test_merged_checkpoints_of_colpali_engine(tmp_path):
    """They are a Qwen2-VL with one more module."""
    write("qwen2_vl", tmp_path)
    given = as_prompt(f"{IMAGE} w2 w3", [ONE])
    [right] = engine(tmp_path).encode(given, pooling_task="token_embed")
    config = json.loads((tmp_path / "config.json").read_text())
    merged = {**config["vlm_config"], "architectures": ["ColQwen2"], "dim": WIDTH}
    (tmp_path / "config.json").write_text(json.dumps(merged))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({_renamed(key): value for key, value in tensors.items()},
              tmp_path / "model.safetensors")  # fmt: skip
    [found] = engine(tmp_path).encode(given, pooling_task="token_embed")
    np.testing.assert_array_equal(found.outputs.data, right.outputs.data)


def _renamed(key):
    key = key.replace("embedding_proj_layer.", "custom_text_proj.")
    return key.removeprefix("vlm.").replace("language_model.", "model.")


def as_published(name, folder):
    """Make the files of a Qwen3-VL those of a published retriever; its projection."""
    is_ops = name.startswith("Ops")
    config = json.loads((folder / "config.json").read_text())
    width = config["text_config"]["hidden_size"]
    own = {"architectures": [name], "model_type": "ops_colqwen3" if is_ops else "colqwen3"}
    own["dims" if is_ops else "embed_dim"] = WIDTH
    (folder / "config.json").write_text(json.dumps(config | own))
    path = folder / "processor_config.json"
    own = {"processor_class": name.removesuffix("Model") + "Processor"}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    tensors = load_file(folder / "model.safetensors")
    named = {(k.removeprefix("model.") if is_ops else f"vlm.{k}"): v for k, v in tensors.items()}
    torch.manual_seed(0)
    weight, bias = torch.randn(WIDTH, width), torch.randn(WIDTH)
    module = "custom_text_proj" if is_ops else "embedding_proj_layer"
    named |= {f"{module}.weight": weight, f"{module}.bias": bias}
    save_file(named, folder / "model.safetensors")
    return weight, bias


@pytest.mark.parametrize("name", ["ColQwen3", pytest.param("OpsColQwen3Model", marks=FULL)])
def test_published_retrievers_around_qwen3_vl(name, tmp_path):
    model = write_spoken("qwen3_vl", tmp_path)
    weight, bias = as_published(name, tmp_path)
    llm = engine(tmp_path)
    for text, pictures in ((f"{IMAGE} w2 w3", [ONE]), ("w7 w8 w9", [])):
        [found] = llm.encode([as_prompt(text, pictures)], pooling_task="token_embed")
        ids = torch.tensor([found.prompt_token_ids])
        inputs = inputs_of("qwen3_vl", tmp_path, pictures)
        if pictures:
            inputs["mm_token_type_ids"] = (ids == IMAGE_ID).int()
        with torch.inference_mode():
            states = model.model(input_ids=ids, use_cache=False, **inputs).last_hidden_state[0]
        right = torch.nn.functional.normalize(states @ weight.T + bias, dim=-1)
        np.testing.assert_allclose(found.outputs.data.numpy(), right.numpy(), atol=2e-5)
