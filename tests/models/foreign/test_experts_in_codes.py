"""Quantised experts that transformers stacks: products of codes, logits of plain numbers."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LagunaForCausalLM

from quire.errors import LoadError
from quire.models.config_reader import read_config
from quire.models.foreign.load import load_foreign_model
from quire.models.foreign.packing import are_stacked
from quire.ops import select
from quire.runner.devices.device import CpuDevice
from tests.models.causal_mapping.comparing import prompts
from tests.models.foreign.tiny_models import write
from tests.models.paged_driver import TOLERANCE, relative_error, run_chunked
from tests.quantization import coded_checkpoints
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS

LAYOUTS = FORMATS | BYTE_FORMATS
OTHERS = ("awq", "gptq-v1-symmetric-act_order", "gptq-v1", "fp8-blocks", "compressed-int")
WITHOUT_GATE = re.compile(f"(?!.*g_proj)(?:{coded_checkpoints.LAYERS.pattern})")
"""For AWQ, whose words have eight outputs: the gate has one for each of four heads."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write("LagunaForCausalLM", tmp_path_factory.mktemp("source"))


def load(folder):
    ops = select(device="cpu", dtype=torch.float32, providers=["torch"])
    config = read_config(folder)
    return load_foreign_model(folder, config, ops, dtype=torch.float32, device=CpuDevice())


def texts():
    """Short ones: a number that is rounded to the other side of a tie changes all tokens after."""
    return [part for text in prompts() for part in text.split(4)]


def experts_of(module, rounded):
    """The sum of a layer's experts, token by token."""

    def forward(hidden, chosen, weights):
        total = torch.zeros_like(hidden)
        for token, x in enumerate(rounded(hidden)):
            for e, weight in zip(chosen[token].tolist(), weights[token], strict=True):
                gate, up = (module.gate_up_proj[e] @ x).chunk(2)
                inner = rounded((module.act_fn(gate) * up)[None])[0]
                total[token] += weight * (module.down_proj[e] @ inner)
        return total

    return forward


def oracle(plain, rounded):
    """transformers' logits, with the inputs of all products in layers `rounded`."""
    model = LagunaForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )

    for name, module in model.named_modules():
        if are_stacked(module):
            module.forward = experts_of(module, rounded)
        elif name.endswith("_proj") and ".layers." in name:
            module.register_forward_pre_hook(lambda _, given: rounded(given[0]))
    with torch.no_grad():
        return [model(input_ids=ids[None], use_cache=False).logits[0] for ids in texts()]


@pytest.mark.parametrize(
    "layout", ["compressed-w4a16", *(pytest.param(n, marks=pytest.mark.full) for n in OTHERS)]
)
def test_logits_are_those_of_the_plain_numbers(source, tmp_path, layout):
    how = LAYOUTS[layout]
    names = WITHOUT_GATE if layout == "awq" else coded_checkpoints.LAYERS
    plain = coded_checkpoints.write(source, tmp_path, how, names)
    model = load(tmp_path)
    found = run_chunked(model, texts())
    is_exact = getattr(how, "is_exact", True)
    expected = oracle(plain, (lambda x: x) if is_exact else how.rounded)
    if is_exact:
        assert relative_error(found, expected) < TOLERANCE
    else:  # what differs in the last bit may be rounded to the other side of a tie
        size = max(e.abs().max() for e in expected)
        errors = [(f - e).abs().amax(-1) / size for f, e in zip(found, expected, strict=True)]
        assert torch.cat(errors).median() < TOLERANCE
    assert model.weight_bytes < 0.5 * load(plain).weight_bytes


def test_experts_of_which_some_are_plain_are_refused(source, tmp_path):
    coded_checkpoints.write(source, tmp_path, LAYOUTS["compressed-w4a16"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    whole = load_file(source / "model.safetensors")
    at = "model.layers.1.mlp.experts.0.up_proj"
    tensors = {name: t for name, t in tensors.items() if not name.startswith(at)}
    tensors[at + ".weight"] = whole[at + ".weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"mlp\.experts: experts of a model .* in codes in part"):
        load(tmp_path)


def test_experts_that_are_stacked_in_codes_are_refused_by_name(source, tmp_path):
    tensors = load_file(source / "model.safetensors")
    at = "model.layers.1.mlp.experts."
    tensors = {n: t for n, t in tensors.items() if not (n.startswith(at) and "_proj" in n)}
    tensors[at + "gate_up_proj"] = torch.zeros(4, 64, 64, dtype=torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    codes = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": codes}))
    with pytest.raises(LoadError, match=r"experts\.gate_up_proj: experts in codes .* of its own"):
        load(tmp_path)
