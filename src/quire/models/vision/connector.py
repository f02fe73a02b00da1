"""Connectors: what makes rows for a decoder out of a tower's patches, as steps that run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch
from torch import Tensor

from quire.models.maker import Maker
from quire.models.vision.spec import (
    AveragePool,
    ConnectorStep,
    Merge,
    NormStep,
    Project,
    widths,
)
from quire.ops import NormWeight
from quire.ops.activation import ACTIVATIONS, row_by_row

RowFunction = Callable[[Tensor], Tensor]
"""Rows [n, width] -> rows [m, width]; the patches of a cell are neighbours."""


def make_connector(
    make: Maker, at: str, steps: tuple[ConnectorStep, ...], width: int, merge: int
) -> RowFunction:
    """Build the steps of leaves below `at`, for cells of `merge`² patches of `width` values."""
    made = [
        _make_step(make, f"{at}.{i}", step, inputs, merge)
        for i, step, inputs in widths(steps, width, merge)
    ]

    def run(x: Tensor) -> Tensor:
        return reduce(lambda rows, step: step(rows), made, x)

    return run


def _make_step(make: Maker, at: str, step: ConnectorStep, inputs: int, merge: int) -> RowFunction:
    ops, size = make.ops, merge**2
    if isinstance(step, Merge):
        return lambda x: x.reshape(-1, size * inputs)
    if isinstance(step, AveragePool):
        return _make_pool(make, at, step, size)
    if isinstance(step, NormStep):
        if step.norm.kind == "rms_bare":
            norm = NormWeight("rms", step.norm.eps, make.ones(inputs))
        else:
            norm = make.norm(at, step.norm)
        if step.act is None:
            return lambda x: ops.norm(x, norm)
        act = ACTIVATIONS[step.act]
        return lambda x: row_by_row(act, ops.norm(x, norm))
    return _make_product(make, at, step, merge)


def _make_product(make: Maker, at: str, p: Project, merge: int) -> RowFunction:
    leaves = [at + ".gate", at + ".up"] if p.gated else [at]
    change = partial(_cells_outside, cells=p.cells) if p.cells > 1 else None
    weight = make.linear(at, *leaves, change=change, is_adaptable=False, gated=p.gated)
    if p.act is None:
        return partial(make.ops.linear, w=weight)
    return partial(make.ops.hidden, up=weight, act=p.act, gated=p.gated)


def _cells_outside(rows: Tensor, cells: int) -> Tensor:
    """A weight [out, C * cells] with its inputs as [cells, C]; a bias as it is."""
    if rows.dim() == 1:
        return rows
    return rows.flatten(1).unflatten(1, (-1, cells)).transpose(1, 2).flatten(1)


def _make_pool(make: Maker, at: str, p: AveragePool, size: int) -> RowFunction:
    shift = make.tensor(at + ".shift") if p.standardizes else None
    factor = make.tensor(at + ".factor") if p.standardizes else None

    def pool(x: Tensor) -> Tensor:
        # added in one order, so that a cell's bits do not depend on the number of cells
        total = reduce(torch.add, x.float().unflatten(0, (-1, size)).unbind(1))
        mean = (total / size).to(x.dtype)
        if p.scale == 1.0:
            return mean
        wide = mean.float() * p.scale
        if shift is not None and factor is not None:
            wide = (wide - shift.float()) * factor.float()
        return wide.to(x.dtype)

    return pool
