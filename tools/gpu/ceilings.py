"""What the GPU can do at most, measured, and the least time that a step of a decoder takes there.

The roofline of a step is the sum over its operations of max(bytes / bandwidth, FLOPs / peak), since
they run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpu.clock import median_seconds
from gpu.told import Line

_COPY_BYTES = 2 << 30
_SIDE = 8192


@dataclass(frozen=True)
class Ceilings:
    """What a copy moves (read and written bytes counted) and what a bf16 product computes."""

    bytes_per_s: float
    flops_per_s: float

    def least_seconds(self, num_bytes: float, flops: float) -> float:
        """What an operation takes at the larger of its two limits."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def share(self, num_bytes: float, flops: float, seconds: float) -> float:
        """The least time as a share of the time that was taken."""
        return self.least_seconds(num_bytes, flops) / seconds


@dataclass(frozen=True)
class DecoderShape:
    """What the costs of a Llama-like decoder follow from, and bytes of a number (bf16)."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    itemsize: float = 2

    @staticmethod
    def of(config: dict[str, Any]) -> DecoderShape:
        """From the keys of a config.json."""
        return DecoderShape(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["intermediate_size"],
            config["vocab_size"],
        )

    def products(self) -> Iterator[tuple[int, int, int]]:
        """(how often, inputs, outputs) of each weight that a step multiplies with."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield self.layers, self.width, q + 2 * kv
        yield self.layers, q, self.width
        yield self.layers, self.width, 2 * self.ffn
        yield self.layers, self.ffn, self.width
        yield 1, self.width, self.vocab

    @property
    def kv_bytes_per_token(self) -> float:
        """Of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


def decode_seconds(shape: DecoderShape, ceilings: Ceilings, rows: int, context: int) -> float:
    """The roofline of a step in which each of `rows` requests with `context` tokens gets one."""
    total = 0.0
    for count, inputs, outputs in shape.products():
        num_bytes = shape.itemsize * (inputs * outputs + rows * (inputs + outputs))
        total += count * ceilings.least_seconds(num_bytes, 2 * rows * inputs * outputs)
    num_bytes = rows * context * shape.kv_bytes_per_token
    flops = 4 * rows * context * shape.heads * shape.head_dim * shape.layers
    return total + ceilings.least_seconds(num_bytes, flops)


def prefill_flops(shape: DecoderShape, rows: int, length: int) -> float:
    """Of `rows` prompts: all products of their tokens, one row of logits each, causal attention."""
    *layers, head = shape.products()
    tokens = rows * length
    total = sum(2.0 * tokens * count * inputs * outputs for count, inputs, outputs in layers)
    total += 2.0 * rows * head[1] * head[2]
    pairs = rows * length * (length + 1) / 2
    return total + 4.0 * pairs * shape.heads * shape.head_dim * shape.layers


def limits() -> Iterator[Line]:
    """The two limits, and what a large read alone reaches."""
    found = measure()
    yield Line("copy bandwidth", found.bytes_per_s / 1e9, "GB/s")
    yield Line("bf16 product", found.flops_per_s / 1e12, "TFLOP/s")
    source = torch.randn(_COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    read = median_seconds(lambda: source.sum())
    yield Line("read bandwidth", _COPY_BYTES / read / 1e9, "GB/s", note="torch's sum")
    free, total = torch.cuda.mem_get_info()
    yield Line("free memory", free / 1e9, "GB", note=f"of {total / 1e9:.1f}")


def measure() -> Ceilings:
    """The GPU's own, from torch's copy and torch's product; their memory is free afterwards."""
    ceilings = Ceilings(_copied_per_second(), _multiplied_per_second())
    torch.cuda.empty_cache()
    return ceilings


def _copied_per_second() -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / median_seconds(lambda: target.copy_(source))


def _multiplied_per_second() -> float:
    a = torch.randn(_SIDE, _SIDE, dtype=torch.bfloat16, device="cuda")
    return 2 * _SIDE**3 / median_seconds(lambda: a @ a)
