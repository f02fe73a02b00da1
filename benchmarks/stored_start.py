"""How long a quantised checkpoint takes to start beside the same model in bfloat16: processes that
start an engine, in turns, and the ratio of the medians.

Weights are random bytes in the tensors of each format, written once into the cache folder; what a
start does depends on no value.

    python -m benchmarks.stored_start --formats awq fp8
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire import EngineArgs
from quire.bench.report import add_output_flag, at_least, finish
from quire.bench.startup import one_start
from quire.bench.workload import random_model
from quire.models import find_family, read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.formats.storage import FLATTENED, CodeLayout, StoredPart, quant_state
from quire.models.rules import StoredTensor, tensor_map

_WEIGHTS = {"targets": ["Linear"], "output_activations": None}


def _compressed(
    kind: str, weights: dict[str, Any], rows: dict[str, Any] | None = None
) -> dict[str, Any]:
    scheme = _WEIGHTS | {"weights": weights | {"dynamic": False}, "input_activations": rows}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }


_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "w4a16": _compressed(
        "pack-quantized",
        {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128},
    ),
    "gptq": _GPTQ | {"desc_act": False},
    "gptq-desc_act": _GPTQ | {"desc_act": True},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    },
    "w8a8": _compressed(
        "int-quantized",
        _INT8 | {"strategy": "channel"},
        _INT8 | {"strategy": "token", "dynamic": True},
    ),
    "nf4": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"},
}


def main() -> int:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stored_start", description=__doc__)
    parser.add_argument("--random-model", default="0.6b", help="a shape of quire.testing")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--num-trials", type=at_least(1), default=5, help="processes of each")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints on the disk")
    add_output_flag(parser)
    args = parser.parse_args()
    plain = random_model(args.random_model)
    figures = {}
    for name in args.formats:
        folder = plain.with_name(f"{args.random_model}-{name}")
        if not (folder / "config.json").exists():
            write(plain, folder, FORMATS[name])
        figures[name] = compared(plain, folder, args.num_trials)
        print(name, *(f"{part} {value:.3f}" for part, value in figures[name].items()), flush=True)
        if not args.keep:
            shutil.rmtree(folder)
    finish(figures, args.output_json)
    return 0


def compared(plain: Path, coded: Path, num_trials: int) -> dict[str, float]:
    """Median seconds until an engine is ready, and those of them that its weights take."""
    trials: dict[str, list[dict[str, float]]] = {"bfloat16": [], "codes": []}
    for _ in range(num_trials + 1):
        for kind, folder in zip(trials, (plain, coded), strict=True):
            args = EngineArgs(model=str(folder), skip_tokenizer_init=True, max_model_len=1024)
            trials[kind].append(one_start(args))
    found = {
        f"{kind} {part}": statistics.median(trial[part] for trial in own[1:])
        for kind, own in trials.items()
        for part in ("ready", "weights")
    }
    return found | {"ratio": found["codes ready"] / found["bfloat16 ready"]}


def write(plain: Path, target: Path, quantization: Mapping[str, Any]) -> None:
    """A copy whose layers are stored in codes, which are random."""
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    whole = {**read_config(plain), "quantization_config": quantization}
    storage = read_storage(whole)
    assert storage is not None, "every format here is known"
    stored = tensor_map(find_family(whole), read_spec(whole))
    coded = [tensor.in_codes(storage) for tensor in stored if _is_of_layer(tensor)]
    tensors: dict[str, Tensor] = {}
    for tensor in coded:
        if tensor.layout is not None:
            tensors |= {tensor.at(part): drawn for part, drawn in _drawn(tensor, tensor.layout)}
    rest = {tensor.name for tensor in stored} - {t.name for t in coded if t.layout is not None}
    with safe_open(plain / "model.safetensors", "pt") as file:
        tensors |= {name: file.get_tensor(name) for name in file.keys() if name in rest}  # noqa: SIM118
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (plain / name).exists():
            shutil.copy(plain / name, target / name)
    (target / "config.json").write_text(json.dumps(whole))


def _is_of_layer(tensor: StoredTensor) -> bool:
    return all(leaf.name.startswith("layers.") for leaf in tensor.leaves)


def _drawn(tensor: StoredTensor, layout: CodeLayout) -> Iterator[tuple[str, Tensor]]:
    """Random tensors of the format, by what follows the module's name."""
    outputs, inputs = tensor.shape
    for name, part in layout.parts(*tensor.shape).items():
        if name == "weight_shape":
            yield name, torch.tensor([outputs, inputs])
        elif name in ("g_idx", "weight_g_idx"):
            groups = torch.arange(inputs, dtype=torch.int32) // (layout.group or inputs)
            order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
            yield name, groups[order] if layout.is_reordered else groups
        elif layout.packing in FLATTENED and name == quant_state(layout):
            yield name, _state(layout, outputs, inputs)
        elif name == "weight.quant_map":
            yield name, torch.linspace(-1, 1, 16)
        else:
            yield name, _numbers(part)


def _numbers(part: StoredPart) -> Tensor:
    dtype, count = part.dtypes[0], math.prod(part.shape)
    if dtype in _SCALES:
        return torch.rand(part.shape).add_(1.0).mul_(1e-3).to(_SCALES[dtype])
    bits = torch.randint(-(2**63), 2**63 - 1, (-(-count // 2),), dtype=torch.int64)
    numbers = bits.view(_CODES[dtype])[:count].view(part.shape).clone()
    if dtype == "F8_E4M3":  # no NaN
        return (numbers.view(torch.uint8) & 0xBF).view(torch.float8_e4m3fn)
    return numbers


_SCALES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_CODES = {"I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.uint8}


def _state(layout: CodeLayout, outputs: int, inputs: int) -> Tensor:
    state = {
        "quant_type": FLATTENED[layout.packing],
        "blocksize": layout.group,
        "shape": [outputs, inputs],
        "dtype": "bfloat16",
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": 1e-3,
    }
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


if __name__ == "__main__":
    raise SystemExit(main())
