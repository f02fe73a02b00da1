"""Experts of DeepSeek-V4 in codes of four bits, as its files have them next to plain ones."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.families import read_storage
from tests.models.hostile.models import HOSTILE, write
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full

NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
NVFP4 = {"moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16}
DRAW = torch.Generator().manual_seed(3)


def codes_of(shape):
    """Two numbers of four bits in a byte, the first in the lower half; and the numbers."""
    rows, inputs = shape
    codes = torch.randint(0, 16, (rows, inputs), generator=DRAW, dtype=torch.uint8)
    numbers = torch.tensor([*NUMBERS, *(-n for n in NUMBERS)])[codes.long()]
    return codes[:, ::2] | codes[:, 1::2] << 4, numbers


def in_fp4(name, shape):
    codes, numbers = codes_of(shape)
    exponents = torch.randint(120, 124, (shape[0], shape[1] // 32), generator=DRAW)
    scales = (2.0 ** (exponents - 127)).repeat_interleave(32, 1)
    stored = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
    return {name + ".weight": codes.view(torch.int8), name + ".scale": stored}, numbers * scales


def in_nvfp4(name, shape):
    codes, numbers = codes_of(shape)
    scales = torch.rand(shape[0], shape[1] // 16, generator=DRAW).to(torch.float8_e4m3fn)
    parts = {".weight": codes, ".weight_scale": scales, ".weight_scale_2": torch.tensor(0.11)}
    numbers = numbers * scales.float().repeat_interleave(16, 1) * 0.11
    return {name + end: part for end, part in parts.items()}, numbers


@pytest.mark.parametrize(
    ("quantization", "keys", "encode"),
    [
        (FP8, {"expert_dtype": "fp4"}, in_fp4),
        (FP8 | {"expert_dtype": "fp4"}, {}, in_fp4),
        (FP8 | NVFP4, {"expert_dtype": "fp4"}, in_nvfp4),
    ],
)
def test_experts_in_codes_are_the_numbers_that_they_stand_for(tmp_path, quantization, keys, encode):
    plain, coded = tmp_path / "plain", tmp_path / "coded"
    hostile = HOSTILE["deepseek_v4"]
    hostile = replace(hostile, keys={**hostile.keys, "moe_intermediate_size": 64})
    write(hostile, plain)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    names = [name.removesuffix(".weight") for name in tensors if ".experts." in name]
    for name in names:
        parts, tensors[name + ".weight"] = encode(name, stored.pop(name + ".weight").shape)
        stored |= parts
    assert len(names) == 4 * 8 * 3
    save_file(tensors, plain / "model.safetensors")
    coded.mkdir()
    save_file(stored, coded / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": quantization, **keys}
    (coded / "config.json").write_text(json.dumps(config))
    prompts = [torch.arange(3, 20)]
    logits = []
    for folder in (plain, coded):
        config = read_config(folder)
        model = load(folder, read_spec(config), max_model_len=64, storage=read_storage(config))
        logits.append(run_full(model, prompts))
    assert relative_error(*logits) < TOLERANCE
