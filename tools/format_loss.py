"""What each format of quantised checkpoints costs the embedded model: loss on its held-out files,
with each provider, as the table of docs/quantization.md.

    PYTHONPATH=src:. python tools/format_loss.py

Weights are rounded to the nearest number, without calibration, by the writers of the tests.
Providers: native code (cpu), plain torch, and what GPUs run: weights widened to bfloat16, which the
native provider multiplies here.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from embedded_model.corpus import HELD_OUT
from torch import Tensor

from quire import embedded
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.weights import load_model
from quire.ops import select
from tests.quantization import coded_checkpoints as packed
from tests.quantization.bitsandbytes_checkpoints import BLOCK_FORMATS, PEAK_FORMATS
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import How, write
from tests.quantization.four_bit_checkpoints import FOUR_BIT_FORMATS
from tests.quantization.held_out import held_out_windows, mean_loss

_DTYPE = torch.bfloat16
_GROUP = 64
"""Inputs with one scale: the model's widths are no multiples of 128."""
_FP8 = BYTE_FORMATS["fp8-blocks"]
_BLOCK = (128, 128)

FORMATS: dict[str, How] = {
    f"AWQ, groups of {_GROUP}": packed.awq(_GROUP),
    f"GPTQ, 4 bits, groups of {_GROUP}": packed.gptq(1, group=_GROUP),
    f"GPTQ, 4 bits, symmetric, groups of {_GROUP}": packed.gptq(1, group=_GROUP, symmetric=True),
    "GPTQ, 8 bits, a scale per output": packed.gptq(2, bits=8, group=-1),
    f"compressed-tensors W4A16, groups of {_GROUP}": packed.compressed(group=_GROUP),
    "compressed-tensors W8A16, a scale per output": packed.compressed(bits=8, group=-1),
    "compressed-tensors W8A8 int8": BYTE_FORMATS["compressed-int"],
    "compressed-tensors W8A8 fp8, a scale per output": BYTE_FORMATS["compressed-float"],
    "FP8, blocks of 128 x 128": dataclasses.replace(
        _FP8,
        config=_FP8.config | {"weight_block_size": list(_BLOCK)},
        block=_BLOCK,
        rows=_BLOCK[1],
    ),
    "FP8, a scale per tensor": BYTE_FORMATS["fp8-tensor"],
    "MXFP4": FOUR_BIT_FORMATS["mxfp4"],
    "NVFP4": FOUR_BIT_FORMATS["nvfp4"],
    "bitsandbytes nf4": BLOCK_FORMATS["bitsandbytes-nf4"],
    "bitsandbytes nf4, nested": BLOCK_FORMATS["bitsandbytes-nf4-nested"],
    "bitsandbytes fp4": BLOCK_FORMATS["bitsandbytes-fp4"],
    "bitsandbytes int8": PEAK_FORMATS["bitsandbytes-int8"],
    "bitsandbytes int8, threshold 0": PEAK_FORMATS["bitsandbytes-int8-rows"],
}


def main() -> None:
    """Print a table of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of formats")
    parser.add_argument("--apart", type=int, default=4096, help="tokens from window to window")
    args = parser.parse_args()
    windows = list(held_out_windows(HELD_OUT, 1024, args.apart))
    whole = loss(embedded.path(), "cpu", windows)
    print(
        f"| weights | native | plain torch | widened | beside bfloat16 ({len(windows)} windows) |"
    )
    print("| --- | --- | --- | --- | --- |")
    print(f"| bfloat16 | {whole:.4f} | {loss(embedded.path(), 'torch', windows):.4f} | | |")
    for name, how in FORMATS.items():
        if args.only in name:
            print(row(name, how, windows, whole), flush=True)


def row(name: str, how: How, windows: Sequence[Tensor], whole: float) -> str:
    """A format's line."""
    with tempfile.TemporaryDirectory() as folder:
        plain = write(embedded.path(), Path(folder), how)
        native, torchs = (loss(Path(folder), provider, windows) for provider in ("cpu", "torch"))
        widened = loss(plain, "cpu", windows)
    assert all(map(math.isfinite, (native, torchs, widened))), f"{name} has no loss"
    losses = f"{native:.4f} | {torchs:.4f} | {widened:.4f}"
    return f"| {name} | {losses} | {native / whole - 1:+.2%} |"


def loss(folder: Path, provider: str, windows: Sequence[Tensor]) -> float:
    """Nats per token of a checkpoint."""
    ops = select(device="cpu", dtype=_DTYPE, providers=[provider, "torch"])
    model = load_model(folder, read_spec(read_config(folder)), ops, dtype=_DTYPE)
    return mean_loss(model, ops, windows)


if __name__ == "__main__":
    main()
