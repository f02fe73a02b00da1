"""The rows of a case with recurrent states, computed one token after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.ops import Ops
from tests.support.op_cases import Case

PER_TOKEN = ("x", "before", "after", "dt", "b", "c", "gate", "q", "k", "v", "a")
"""Arguments with a row per token."""


def check_token_by_token(case: Case, dtype: torch.dtype, ops: Ops, device: str = "cpu") -> None:
    """Raise AssertionError if outputs or kept states have other bits than in one step."""
    run = getattr(ops, case.op)
    arguments = case.prepare(ops, case.draw(dtype, device)).arguments
    whole_states = arguments["states"].clone()
    whole = run(**arguments | {"states": whole_states})
    states = arguments["states"].clone()
    parts = [
        run(**_one_token(arguments, t) | {"states": states} | blocks)
        for t, blocks in enumerate(_blocks(arguments["reads"], arguments["writes"], len(states)))
    ]
    assert _bits(torch.cat(parts)) == _bits(whole), "other outputs"
    kept = arguments["writes"][arguments["writes"] >= 0]
    assert _bits(states[kept]) == _bits(whole_states[kept]), "other states"


def _blocks(reads: Tensor, writes: Tensor, num_blocks: int) -> list[dict[str, Tensor]]:
    """Where each token reads and writes: between those that are kept, in two spare blocks."""
    used = {*reads.tolist(), *writes.tolist()}
    spare = [block for block in range(num_blocks) if block not in used]
    found, now = [], -1
    for t, (source, target) in enumerate(zip(reads.tolist(), writes.tolist(), strict=True)):
        now = source if source >= 0 else now
        after = target if target >= 0 else spare[t % 2]
        found.append({"reads": reads.new_tensor([now]), "writes": reads.new_tensor([after])})
        now = after
    return found


def _one_token(arguments: dict[str, Any], t: int) -> dict[str, Any]:
    rows = {name: arguments.get(name) for name in PER_TOKEN}
    return arguments | {name: x[t : t + 1] for name, x in rows.items() if x is not None}


def _bits(x: Tensor) -> bytes:
    return x.cpu().contiguous().view(torch.uint8).numpy().tobytes()
