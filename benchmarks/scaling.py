"""What the exchanges between ranks cost, on paper: bytes and time of each collective of a layer for
published shapes on published links, and what that bounds.

    python -m benchmarks.scaling          # the tables of docs/scaling.md

A time is a latency plus bytes over bandwidth; bytes are those that one rank receives, which on
links of two directions is also what it sends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

FP32, BF16, FP8 = 4, 2, 1
_SEGMENTS = 4
"""Partial sums of a product's inputs (models/cutting/sharding.py); more ranks have one each."""


@dataclass(frozen=True)
class Model:
    """A published shape. `weights`: all values; `weight_bytes`: of one value as it is served;
    `routed` of them are of `experts` experts in each of `moe_layers`, of which a token takes
    `top_k`.
    """

    name: str
    layers: int
    dim: int
    vocab: int
    weights: float
    weight_bytes: int
    moe_layers: int = 0
    routed: float = 0.0
    experts: int = 1
    top_k: int = 0


@dataclass(frozen=True)
class Link:
    """Between ranks: bytes in a second in one direction, and seconds until a small exchange is
    over.
    """

    name: str
    bandwidth: float
    latency_s: float


LLAMA_8B = Model("Llama 3.1 8B, bf16", 32, 4096, 128256, 8.03e9, BF16)
LLAMA_70B = Model("Llama 3.1 70B, bf16", 80, 8192, 128256, 70.6e9, BF16)
_ROUTED = 58 * 256 * 3 * 7168 * 2048
DEEPSEEK_V3 = Model("DeepSeek-V3, fp8", 61, 7168, 129280, 671e9, FP8, 58, _ROUTED, 256, 8)
MODELS = (LLAMA_8B, LLAMA_70B, DEEPSEEK_V3)

NVLINK = Link("NVLink of H100", 450e9, 8e-6)
NETWORK = Link("400 Gb/s", 50e9, 20e-6)
LINKS = (NVLINK, NETWORK)
H100_BYTES_S = 3.35e12


def ring_bytes(tokens: int, dim: int, size: int, element: int = BF16) -> float:
    """All-reduce of rounded sums by a ring, what others do: reduce-scatter, then all-gather."""
    return 2 * (size - 1) / size * tokens * dim * element


def gather_bytes(tokens: int, dim: int, size: int) -> float:
    """All-gather of unrounded segments, what CPU ranks of one host do today."""
    return (size - 1) / size * max(_SEGMENTS, size) * tokens * dim * FP32


def sliced_bytes(tokens: int, dim: int, size: int) -> float:
    """The same sums with fewer bytes: every rank gets all segments of a slice of the outputs, adds
    them in their order, rounds, and all gather the rounded slices.
    """
    per_rank = max(_SEGMENTS, size) / size
    return (size - 1) / size * tokens * dim * (per_rank * FP32 + BF16)


def choice_bytes(model: Model, tokens: int, size: int) -> float:
    """All-gather of the experts' results, per token and choice, of every rank, what ranks of one
    host do today: a choice's result is one rank's and the others bring zeros.
    """
    return (size - 1) * tokens * model.top_k * model.dim * BF16


def home_bytes(model: Model, tokens: int, size: int) -> float:
    """The same results, each from the rank that has it."""
    return (size - 1) / size * tokens * model.top_k * model.dim * BF16


def seconds(num_bytes: float, link: Link, steps: int = 1) -> float:
    """Of a collective with so many exchanges one after the other."""
    return steps * link.latency_s + num_bytes / link.bandwidth


def collectives_of_step(model: Model) -> int:
    """All-reduces of a step: the embedding's and two of each layer; with an embedding that is whole
    on each rank, as here, one less.
    """
    return 2 * model.layers


def step_seconds(model: Model, tokens: int, size: int, link: Link, kind: str = "sliced") -> float:
    """All exchanges of a step of a tensor-parallel model."""
    count = {"ring": ring_bytes, "gather": gather_bytes, "sliced": sliced_bytes}[kind]
    steps = 1 if kind == "gather" else 2
    return collectives_of_step(model) * seconds(count(tokens, model.dim, size), link, steps)


def weight_seconds(model: Model, size: int, tokens: int) -> float:
    """Reading each rank's weights once, which no step of decoding is faster than; of experts those
    that this number of tokens can have chosen.
    """
    chosen = 1 - (1 - model.top_k / model.experts) ** tokens
    read = model.weights - model.routed * (1 - chosen)
    return read * model.weight_bytes / size / H100_BYTES_S


def expert_layer_seconds(tokens: int, link: Link, dim: int = 7000, experts: int = 9) -> float:
    """Dispatch in fp8 and combine in bf16 for a rank's tokens, by the formula of DeepSeek's
    "Insights into DeepSeek-V3" (2025), section 2.3.2: no latency, every expert somewhere else.
    """
    return (FP8 + BF16) * tokens * experts * dim / link.bandwidth


def per_layer() -> Iterator[list[str]]:
    """Rows of the table of collectives."""
    yield ["model", "tokens", "ring, bf16", "gather, fp32", "sliced", *(k.name for k in LINKS)]
    for model in MODELS:
        for tokens in (1, 64, 8192):
            kinds = ring_bytes, gather_bytes, sliced_bytes
            counts = [kind(tokens, model.dim, 8) for kind in kinds]
            times = [seconds(counts[2], link, 2) for link in LINKS]
            yield [model.name, str(tokens), *map(_bytes, counts), *map(_time, times)]


def per_expert_layer() -> Iterator[list[str]]:
    """Rows of the table of experts."""
    yield ["tokens", "gather of all", "each home", *(f"{k.name}, each home" for k in LINKS)]
    for tokens in (1, 64, 8192):
        counts = [kind(DEEPSEEK_V3, tokens, 8) for kind in (choice_bytes, home_bytes)]
        times = [seconds(counts[1], link) for link in LINKS]
        yield [str(tokens), *map(_bytes, counts), *map(_time, times)]


def per_step() -> Iterator[list[str]]:
    """Rows of the table of steps."""
    yield ["model", "tokens", "weights", *(f"{k.name}: {n}" for k in LINKS for n in _KINDS)]
    for model in MODELS:
        for tokens in (1, 64):
            times = [step_seconds(model, tokens, 8, link, n) for link in LINKS for n in _KINDS]
            weights = weight_seconds(model, 8, tokens)
            yield [model.name, str(tokens), *map(_time, (weights, *times))]


_KINDS = ("ring", "gather", "sliced")


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.4g} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("a number of bytes")


def _time(time_s: float) -> str:
    return f"{time_s * 1e6:.0f} us" if time_s < 1e-3 else f"{time_s * 1e3:.2f} ms"


def as_markdown(rows: Iterator[list[str]]) -> str:
    """A table whose first row is the header."""
    header, *others = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([header, "|" + " --- |" * (header.count("|") - 1), *others])


if __name__ == "__main__":
    for rows in (per_layer, per_expert_layer, per_step):
        print(as_markdown(rows()), end="\n\n")
