"""Inputs of their own for every layer (per-layer embeddings, Gemma 3n): the stage that makes a
token's vectors for all layers, and the part of a layer that reads one of them.

The models scale sums by h^-1/2 and 2^-1/2 before they go through an RMS norm, with only linear
steps between. Here these norms have a larger epsilon instead, which is the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quire.models.maker import Maker
from quire.models.spec import Activation, Decoder, LayerInputs, Norm
from quire.ops import Batch, LinearWeight, NormWeight, Ops

_DIVISOR = math.sqrt(2.0)
"""Divisor of the sum of both parts."""


@dataclass(frozen=True, slots=True)
class LayerInputStage:
    """sqrt(P) * table[id] + norm(project(x)), for all L layers at once. `table` [V, L * P]."""

    ops: Ops
    table: Tensor
    scale: float
    project: LinearWeight
    norm: NormWeight
    width: int

    def __call__(self, ids: Tensor, x: Tensor) -> Tensor:
        """ids [T] and their embeddings x [T, C] -> [T, L * P], sqrt(2) times what is described."""
        ops = self.ops
        projected = ops.linear(x, self.project).unflatten(1, (-1, self.width))
        own = ops.embed(ids, self.table, self.scale)
        return ops.add(own, ops.norm(projected, self.norm).flatten(1))


@dataclass(frozen=True, slots=True)
class InputGate:
    """project(act(gate(x)) * v) for the layer's vector v, which begins at `start`."""

    ops: Ops
    gate: LinearWeight
    act: Activation
    start: int
    width: int
    project: LinearWeight

    def __call__(self, h: Tensor, batch: Batch) -> Tensor:
        """h [T, C] -> [T, C]."""
        ops, inputs = self.ops, batch.layer_inputs
        assert inputs is not None, "the embedding stage has not run"
        own = inputs.narrow(1, self.start, self.width)
        return ops.linear(ops.modulate(ops.linear(h, self.gate), own, self.act), self.project)


def make_layer_inputs(make: Maker, d: Decoder, inputs: LayerInputs) -> LayerInputStage:
    """Build the stage of a decoder."""
    return LayerInputStage(
        make.ops,
        table=make.tensor("inputs.embed.weight", change=partial(_with_rows, count=d.vocab)),
        # rounded to the model's type, in which transformers keeps it
        scale=torch.tensor(inputs.width**0.5, dtype=make.dtype).item(),
        project=make.linear("inputs.proj", "inputs.proj"),
        norm=make.norm("inputs.norm", inputs.norm, divisor=math.sqrt(d.dim)),
        width=inputs.width,
    )


def _with_rows(table: Tensor, count: int) -> Tensor:
    """The table with row 0 in place of rows that it lacks, up to `count`."""
    if len(table) >= count:
        return table
    # transformers looks up id 0 for ids that are not in this smaller table
    return torch.cat((table, table[:1].expand(count - len(table), -1)))


def make_input_gate(make: Maker, at: str, layer: int, width: int, act: Activation) -> InputGate:
    """Build the part of a layer whose leaves' names begin with `at`."""
    return InputGate(
        make.ops,
        gate=make.linear(at + "gate", at + "gate"),
        act=act,
        start=layer * width,
        width=width,
        project=make.linear(at + "proj", at + "proj"),
    )


def make_input_norm(make: Maker, at: str, norm: Norm) -> NormWeight:
    """Build the norm of what the gate makes of the stage's sums."""
    return make.norm(at + "post", norm, divisor=_DIVISOR)
