"""Cases of low-rank adapters: products with what they add, and tables of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.catalog import Ops
from quire.ops.formats.lora import NO_ADAPTER, LoraPart, LoraPiece, LoraShape
from quire.ops.moe import ExpertAdapters, MoeArgs
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared, by_row

_SLOTS = 5
_EMPTY = 3
"""A slot whose adapter leaves the product alone."""


def pieces_of(sizes: Sequence[int], parts: Sequence[int]) -> tuple[LoraPiece, ...]:
    """Pieces of these sizes, one after the other."""
    starts = np.cumsum([0, *sizes]).tolist()
    return tuple(map(LoraPiece, starts, sizes, parts))


def filled(
    ops: Ops, draw: Draw, width: int, pieces: tuple[LoraPiece, ...], *, rank: int, **traits: Any
) -> Any:
    """A bank whose slots have adapters of ranks up to `rank`, some without some parts. traits: of
    the shape.
    """
    num_slots = traits.get("num_slots", _SLOTS)
    shape = LoraShape(
        *(width, pieces, traits.get("segments", 1), num_slots, rank, draw.dtype),
        torch.device(draw.device),
        traits.get("is_table", False),
    )
    bank = ops.allocate_lora(shape)
    for slot in range(num_slots):
        ops.load_lora(bank, slot, [_part(draw, shape, slot, n) for n in range(shape.num_parts)])
    for slot in (1, _EMPTY):  # over what was there
        first = None if slot == _EMPTY else _part(draw, shape, 0, 0)
        ops.load_lora(bank, slot, [first] + [None] * (shape.num_parts - 1))
    return bank


def _part(draw: Draw, shape: LoraShape, slot: int, number: int) -> LoraPart | None:
    rank = 1 + (3 * slot + 5 * number) % shape.max_rank if slot != 2 else shape.max_rank
    sizes = [piece.size for piece in shape.pieces if piece.part == number]
    spread = 1.0 if shape.is_table else shape.in_features**-0.5
    a = draw.normal(rank, shape.in_features, scale=spread)
    return LoraPart(a, tuple(draw.normal(size, rank) for size in sizes))


def slots_of(draw: Draw, rows: int) -> Tensor:
    """Slots of rows, several rows in a slot; every fourth row has no adapter."""
    slots = draw.rng.integers(0, _SLOTS, rows)
    slots[3::4] = NO_ADAPTER
    return draw.exact(slots.astype(np.int32))


def _product(
    op: str,
    rows: int,
    width: int,
    sizes: Sequence[int],
    *,
    parts: Sequence[int] | None = None,
    rank: int = 8,
    segments: int = 1,
    in_steps: bool = False,
) -> Case:
    """in_steps: the factors of segments first, as several workers have them."""

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        x, out = draw.normal(rows, width), sum(sizes)
        weight = draw.normal(out, width, scale=width**-0.5)
        gated = op == "hidden"
        packed = ops.pack_linear(weight, draw.normal(out), segments=segments, gated=gated)
        pieces = pieces_of(sizes, parts or range(len(sizes)))
        bank = filled(ops, draw, width, pieces, rank=rank, segments=segments)
        slots = slots_of(draw, rows)

        def added(some: Tensor, own: Tensor) -> Any:
            if in_steps:
                return ops.lora_total(ops.lora_partial(some, bank, own), bank, own)
            return ops.lora(some, bank, own)

        arguments: Arguments = {"x": x, **_of_op[op](packed)}
        singles = by_row(op, arguments).singles
        alone = (
            {**one, "addend": added(x[t : t + 1], slots[t : t + 1]) if slots[t] >= 0 else None}
            for t, one in enumerate(singles)
        )
        return Prepared({**arguments, "addend": added(x, slots)}, tuple(alone))

    traits = f"{'-steps' * in_steps}-rank{rank}-{segments}segments"
    return Case(op, f"lora-{rows}x{width}x{'+'.join(map(str, sizes))}{traits}", prepare)


_of_op: dict[str, Any] = {
    "linear": lambda w: {"w": w},
    "hidden": lambda w: {"up": w, "act": "silu", "gated": True},
    "logits": lambda w: {"head": w, "scale": 0.5, "softcap": 30.0},
}


def _embed(rows: int, vocab: int, width: int, scale: float) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        arguments = {
            "x": draw.normal(rows, width),
            "ids": draw.integers(draw.rng.integers(0, vocab, rows)),
            "bank": filled(ops, draw, vocab, pieces_of([width], [0]), rank=5, is_table=True),
            "slots": slots_of(draw, rows),
            "scale": scale,
        }
        return by_row("lora_embed", arguments, {"x": 0, "ids": 0, "slots": 0})

    return Case("lora_embed", f"{rows}x{vocab}x{width}-scale{scale:g}", prepare)


def _moe(name: str, rows: int, top_k: int, experts: int, args: MoeArgs) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        width, ffn = experts + 5, 7
        inner = ffn * (2 if args.gated else 1)
        chosen = [draw.rng.permutation(experts)[:top_k] for _ in range(rows)]
        into = pieces_of([ffn] * (inner // ffn), range(inner // ffn))
        many = {"rank": 3, "num_slots": _SLOTS * experts}
        up = filled(ops, draw, width, into, **many)
        adapters = ExpertAdapters(
            up,
            filled(ops, draw, ffn, pieces_of([width], [0]), **many),
            experts,
            slots_of(draw, rows),
        )
        arguments: Arguments = {
            "x": draw.normal(rows, width),
            "chosen": draw.exact(np.reshape(chosen, (rows, top_k)).astype(np.int32)),
            "weights": draw.wide(draw.rng.random((rows, top_k)) * 1.7),
            "experts": ops.pack_experts(
                draw.normal(experts, inner, width, scale=width**-0.5),
                draw.normal(experts, width, ffn, scale=ffn**-0.5),
                draw.normal(experts, inner),
                draw.normal(experts, width),
                gated=args.gated,
            ),
            "args": args,
        }
        singles = by_row("moe", arguments).singles
        alone = tuple(
            {**one, "adapters": replace(adapters, slots=adapters.slots[t : t + 1])}
            if adapters.slots[t] >= 0
            else one
            for t, one in enumerate(singles)
        )
        return Prepared({**arguments, "adapters": adapters}, alone)

    return Case("moe", f"lora-{name}", prepare)


CASES = (
    _moe("silu", 9, 2, 4, MoeArgs()),
    _moe("relu2", 3, 1, 3, MoeArgs("relu2", gated=False)),
    _moe("weighs_input", 5, 2, 4, MoeArgs(weighs_input=True)),
    _moe("clamp", 5, 2, 3, MoeArgs(clamp=0.6)),
    _moe("bound", 5, 2, 3, MoeArgs(bound=0.4)),
    *(_product("linear", rows, 24, [40]) for rows in (0, 1, 5)),
    _product("linear", 9, 37, [17, 5, 20], rank=3),
    _product("linear", 9, 32, [32, 16, 16], rank=16),
    _product("linear", 6, 20, [16, 9, 9], parts=[0, 1, 1]),
    _product("linear", 6, 64, [33], segments=4),
    *(_product("linear", 6, 64, [33], segments=s, in_steps=True) for s in (1, 2, 4)),
    _product("hidden", 7, 24, [20, 20]),
    _product("hidden", 7, 24, [64, 64], rank=1),
    _product("logits", 5, 16, [70]),
    *(_embed(rows, 11, 33, scale) for rows, scale in ((0, 1.0), (1, 1.0), (6, 4.0))),
)
