"""Jina embeddings v2 against BERT of transformers with gated units, and ALiBi as its mask."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from quire.errors import LoadError, WeightMismatch
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.weights import load_model
from quire.ops import select
from tests.models.encoders.prompt_driver import hidden_states
from tests.models.paged_driver import TOLERANCE, relative_error

KEYS = {
    "vocab_size": 96,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 300,
    "layer_norm_eps": 0.05,
    "type_vocab_size": 2,
}
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
"""Those of four heads, and every other one of eight."""
OWN = {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "emb_pooler": "mean",
    "attn_implementation": None,
    "model_max_length": 300,
}
LENGTHS = (23, 1, 9, 300, 14)


class Gated(nn.Module):
    """The feed-forward part with its sum and norm."""

    def __init__(self, act):
        super().__init__()
        self.act = act
        self.gated_layers = nn.Linear(96, 160, bias=False)
        self.wo = nn.Linear(80, 96)
        self.layernorm = nn.LayerNorm(96, eps=0.05)

    def forward(self, x, residual):
        gates, inputs = self.gated_layers(x).chunk(2, -1)
        return self.layernorm(self.wo(self.act(gates) * inputs) + residual)


def make(folder, form="geglu"):
    """Store a checkpoint under the published names; returns its prompts and their hidden states."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**KEYS, attn_implementation="eager")
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    for layer in model.encoder.layer:
        layer.intermediate = nn.Identity()
        layer.output = Gated(nn.GELU() if form == "geglu" else nn.ReLU())
    with torch.no_grad():
        for name, value in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            value.copy_(torch.randn_like(value) * 0.15 + is_norm)
        model.embeddings.position_embeddings.weight.zero_()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["embeddings.position_embeddings.weight"]
    for name in [n for n in tensors if ".output." in n and ".attention." not in n]:
        tensors[name.replace(".output.", ".mlp.")] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**KEYS, **OWN, "feed_forward_type": form}))
    prompts = [torch.randint(4, 96, (n,)).tolist() for n in LENGTHS]
    return prompts, [ask(model, prompt) for prompt in prompts]


@torch.no_grad()
def ask(model, prompt):
    places = torch.arange(len(prompt))
    distances = (places[:, None] - places).abs()
    biases = -torch.tensor(SLOPES)[:, None, None] * distances
    found = model(torch.tensor([prompt]), attention_mask=biases[None])
    return found.last_hidden_state[0]


def load(folder, provider=None, dtype=torch.float32):
    ops = select(device="cpu", dtype=dtype, providers=[provider] if provider else [])
    return load_model(folder, read_spec(read_config(folder)), ops, dtype=dtype), ops


@pytest.mark.parametrize("form", ["geglu", "reglu"])
@pytest.mark.parametrize("provider", [None, "torch"])
def test_hidden_states_equal_the_reference(tmp_path, form, provider):
    prompts, expected = make(tmp_path, form)
    model, ops = load(tmp_path, provider)
    assert relative_error(hidden_states(model, ops, prompts), expected) < TOLERANCE


def test_a_prompt_has_the_same_bits_alone(tmp_path):
    prompts, _ = make(tmp_path)
    model, ops = load(tmp_path, "cpu", torch.bfloat16)
    for prompt, found in zip(prompts, hidden_states(model, ops, prompts), strict=True):
        assert torch.equal(hidden_states(model, ops, [prompt])[0], found)


@pytest.mark.parametrize(
    ("key", "value"),
    [("feed_forward_type", "original"), ("position_embedding_type", "absolute")],
)
def test_other_forms_are_refused_by_name(tmp_path, key, value):
    make(tmp_path)
    with pytest.raises(LoadError, match=key):
        read_spec(read_config(tmp_path) | {key: value})


def test_a_form_with_norms_of_queries_is_refused(tmp_path):
    """Some bilingual models, whose config does not tell, have other layers."""
    make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.layer.0.attention.self.layer_norm_q.weight"] = torch.ones(96)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match="layer_norm_q"):
        load(tmp_path)
