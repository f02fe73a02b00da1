"""Text towers of models that compare texts with pictures, alone and in the checkpoint of both."""

import json

import pytest
import torch
import transformers
from torch.nn.functional import normalize

from quire import LLM

TEXT = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "layer_norm_eps": 0.05,
    "bos_token_id": 1,
    "eos_token_id": 95,
    "pad_token_id": 0,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}
CLIP = {"text_config": {**TEXT, "projection_dim": 24}, "vision_config": VISION}
SIGLIP = {"text_config": {**TEXT, "projection_size": 32}, "vision_config": VISION}
SIGLIP2 = {**SIGLIP, "vision_config": {**VISION, "num_patches": 4}}
MODELS = {
    "CLIPModel": ("CLIPConfig", {**CLIP, "projection_dim": 24}),
    "CLIPTextModel": ("CLIPTextConfig", TEXT),
    "CLIPTextModelWithProjection": ("CLIPTextConfig", {**TEXT, "projection_dim": 24}),
    "SiglipModel": ("SiglipConfig", SIGLIP),
    "SiglipTextModel": ("SiglipTextConfig", {**TEXT, "projection_size": 32}),
    "Siglip2Model": ("Siglip2Config", SIGLIP2),
}
PROMPTS = [[1, *range(3, 3 + n), 95] for n in (0, 5, 20, 38)]


def make(folder, name, **keys):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, kind)(**config, **keys)
    model = getattr(transformers, name)(made).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def vector(model, ids):
    """What transformers makes of a text."""
    asked = torch.tensor([ids])
    if hasattr(model, "get_text_features"):
        found = model.get_text_features(input_ids=asked)
        return getattr(found, "pooler_output", found)[0]
    found = model(input_ids=asked)
    return (found.text_embeds if "text_embeds" in found else found.pooler_output)[0]


def embed(folder, prompts, **options):
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **options) as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
    return [torch.tensor(output.outputs.embedding) for output in outputs]


@pytest.mark.parametrize("name", MODELS)
def test_vectors_equal_those_of_transformers(tmp_path, name):
    model = make(tmp_path, name)
    for ids, found in zip(PROMPTS, embed(tmp_path, PROMPTS), strict=True):
        torch.testing.assert_close(found, normalize(vector(model, ids), dim=0), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["CLIPTextModel", "SiglipTextModel"])
def test_a_text_has_the_same_bits_alone(tmp_path, name):
    make(tmp_path, name)
    together = embed(tmp_path, PROMPTS)
    for ids, found in zip(PROMPTS, together, strict=True):
        assert torch.equal(embed(tmp_path, [ids])[0], found)


def test_files_of_older_releases_name_the_tower(tmp_path):
    """Alone, towers were stored under the name that they have in the whole model."""
    model = make(tmp_path, "CLIPTextModel")
    renamed = {f"text_model.{name}": value for name, value in model.state_dict().items()}
    from safetensors.torch import save_file

    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (found,) = embed(tmp_path, PROMPTS[2:3])
    torch.testing.assert_close(
        found, normalize(vector(model, PROMPTS[2]), dim=0), atol=2e-5, rtol=0
    )


def test_another_activation_is_its_own(tmp_path):
    """Published towers have quick_gelu or gelu."""
    model = make(tmp_path, "CLIPTextModel", hidden_act="gelu")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["hidden_act"] == "gelu"
    (found,) = embed(tmp_path, PROMPTS[2:3])
    torch.testing.assert_close(
        found, normalize(vector(model, PROMPTS[2]), dim=0), atol=2e-5, rtol=0
    )
