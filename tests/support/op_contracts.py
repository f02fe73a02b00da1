"""What each op is held to, in one record: its definition with its axes, the inputs of its cases, an
oracle, how far others may be from that, and what a call costs.

The parts are functions named as the op. Their parameters are those of the definition, which states
shapes and types; what a provider packs or allocates is the oracle's own, like `OracleKV`.

The oracles are all ops once more, as loops in numpy float64: what the plain-torch definitions are
checked against. Nothing there shares a line or an idea of layout with `quire.ops`: a token, a head,
an expert at a time, and KV memory as two arrays over slots that hold NaN where nobody wrote. Slow,
and only for the small cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from quire.ops import CATALOG, Implementation, Op
from tests.support import (
    op_bounds,
    op_oracle_edits,
    op_oracle_logits,
    op_oracle_masks,
    op_oracle_paged,
    op_oracle_rows,
)
from tests.support.compressed import bounds as compressed_bounds
from tests.support.compressed import oracle as compressed_oracle
from tests.support.lora import op_oracle_lora
from tests.support.op_cases import CASES, Case, costs
from tests.support.op_cases.case import Arguments
from tests.support.recurrent import bounds as state_bounds
from tests.support.recurrent import oracle as state_oracle
from tests.support.running_error import Approx, Stored
from tests.support.streams import bounds as streams_bounds
from tests.support.streams import oracle as streams_oracle


@dataclass(frozen=True, slots=True)
class Contract:
    """All that one op is held to. Ops that prepare the arguments of others have neither `cases` nor
    `cost`. Without `bounds`, as of an op that only chooses, moves or copies, results are the
    oracle's exactly.
    """

    op: Op[Any]
    cases: tuple[Case, ...]
    oracle: Callable[..., Any]
    bounds: Callable[..., dict[str, Approx]] | None
    cost: Callable[..., costs.Cost] | None

    def limits(self, dtype: torch.dtype, arguments: Arguments) -> dict[str, Approx]:
        """What the op makes of the oracle's `arguments`, and how far a provider may be from it, by
        the names of results in a check. A result that is missing must be exact.
        """
        if self.bounds is None:
            return {}
        stored = Stored(dtype)
        with np.errstate(all="ignore"):
            found = self.bounds(stored, **arguments)
        # the oracle is off by as many roundoffs of float64
        scale = stored.unit + float(np.finfo(np.float64).eps) / 2
        return {name: Approx(x.value, x.error * scale) for name, x in found.items()}


def _named_as_ops(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if name in CATALOG and value.__module__ == module.__name__
    }


_ORACLES = _named_as_ops(
    *(op_oracle_rows, op_oracle_paged, op_oracle_lora, state_oracle, streams_oracle),
    *(compressed_oracle, op_oracle_masks, op_oracle_edits, op_oracle_logits),
)
_BOUNDS = _named_as_ops(op_bounds, state_bounds, streams_bounds, compressed_bounds)

CONTRACTS = {
    name: Contract(
        op,
        tuple(case for case in CASES if case.op == name),
        _ORACLES[name],
        _BOUNDS.get(name),
        getattr(costs, name, None),
    )
    for name, op in CATALOG.items()
}

ORACLE = tuple(
    Implementation(name, "oracle", contract.oracle, lambda _: True, batch_invariant=True)
    for name, contract in CONTRACTS.items()
)
"""The provider "oracle"."""
