"""A case of an op: named, reproducible arguments that any provider can be given."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ops.catalog import CATALOG, Ops
from tests.support.op_cases import costs

Arguments = dict[str, Any]


class Draw:
    """Random inputs of one dtype, the same for every provider; keeps what it made.

    Values are drawn in fp64 and rounded to the dtype. `tensors` holds the memory behind everything
    drawn, margins included, so that a test can see whether anybody wrote to it.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: str = "cpu") -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype
        self.device = device
        self.tensors: list[Tensor] = []

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Normal values, contiguous."""
        return self.of(self.rng.standard_normal(shape) * scale + mean)

    def with_nan(self, *shape: int) -> Tensor:
        """Normal values but for one in the middle."""
        values = self.rng.standard_normal(shape)
        values.flat[values.size // 2] = np.nan
        return self.of(values)

    def strided(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal values as a view whose rows are 3 elements apart and start off any alignment."""
        *lead, width = shape
        values = self.normal(*lead, width + 3, scale=scale)
        return values[..., 1 : 1 + width]

    def of(self, values: Any) -> Tensor:
        """Given values in the case's dtype."""
        tensor = torch.from_numpy(np.asarray(values, dtype=np.float64))
        return self._keep(tensor.to(self.device, self.dtype))

    def wide(self, values: Any) -> Tensor:
        """Given values in fp32 (fp64 where the case is): tables that stay fp32 in a model of any
        dtype.
        """
        dtype = torch.promote_types(self.dtype, torch.float32)
        return self._keep(torch.from_numpy(np.asarray(values, np.float64)).to(self.device, dtype))

    def integers(self, values: Any) -> Tensor:
        """Given integers, int64."""
        return self._keep(torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device))

    def exact(self, values: np.ndarray) -> Tensor:
        """Given numbers in their own dtype."""
        return self._keep(torch.from_numpy(values).to(self.device))

    def _keep(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor)
        return tensor


@dataclass(frozen=True)
class Prepared:
    """Arguments for one call, and the calls of one row each whose results in order are the same
    rows.
    """

    arguments: Arguments
    singles: tuple[Arguments, ...] = ()


@dataclass(frozen=True)
class Case:
    """One named situation for one op.

    `prepare` makes the arguments, packing weights and filling KV memory through the given ops, so
    that every provider gets its own format. `is_bench` marks shapes of real models; the others are
    small and hostile.
    """

    op: str
    name: str
    prepare: Callable[[Ops, Draw], Prepared]
    is_bench: bool = False
    _seed: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_seed", zlib.crc32(f"{self.op}/{self.name}".encode()))

    def draw(self, dtype: torch.dtype, device: str = "cpu") -> Draw:
        """This case's source of inputs: equal for equal arguments."""
        return Draw(self._seed, dtype, device)

    def one_of(self, dtypes: Sequence[torch.dtype]) -> torch.dtype:
        """The dtype that runs where one has to do: of all cases, each dtype gets its share."""
        return dtypes[self._seed % len(dtypes)]

    def run(self, ops: Ops, arguments: Arguments) -> Any:
        """Call the op; a tensor that it changes is a copy, and comes after what it returns."""
        changed = {
            name: torch.empty_like(value).copy_(value)
            for name in CATALOG[self.op].mutates
            if isinstance(value := arguments[name], Tensor)
        }
        result = getattr(ops, self.op)(**{**arguments, **changed})
        if not changed:
            return result
        return tuple(changed.values()) if result is None else (result, *changed.values())

    def num_bytes(self, arguments: Arguments) -> int:
        """The least memory traffic of the call."""
        return self.cost(arguments).num_bytes

    def flops(self, arguments: Arguments) -> int:
        return self.cost(arguments).flops

    def cost(self, arguments: Arguments) -> costs.Cost:
        """What the op's function in `costs` says of the call."""
        return getattr(costs, self.op)(**arguments)


def by_row(op: str, arguments: Arguments, axes: Mapping[str, int] | None = None) -> Prepared:
    """Prepared with one single call per token, or row, on the op's axes, or on these."""
    named = CATALOG[op].axes if axes is None else axes
    axes = {name: axis for name, axis in named.items() if arguments.get(name) is not None}
    name, axis = next(iter(axes.items()))
    count = arguments[name].shape[axis]
    singles = tuple(
        arguments | {n: arguments[n].narrow(a, i, 1) for n, a in axes.items()} for i in range(count)
    )
    return Prepared(arguments, singles)
