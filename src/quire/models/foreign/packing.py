"""Puts Quire's products in the place of transformers' linear layers, embeddings and experts.

A product of plain torch has other bits in another number of rows; ours have not, so that a
request's answer does not depend on what else is in its steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from quire.models.foreign.coded_layer import CodedExpertsLayer, CodedLinearLayer
from quire.models.foreign.experts import SeparateProducts
from quire.ops import LinearWeight, Ops

_EMBEDDINGS = (nn.Embedding,)


class PackedLinear(nn.Module):
    """A linear layer of a provider's."""

    def __init__(self, ops: Ops, weight: LinearWeight) -> None:
        super().__init__()
        self._ops, self.packed = ops, weight
        self.in_features, self.out_features = weight.in_features, weight.out_features

    def forward(self, x: Tensor) -> Tensor:
        """x [*, in] -> [*, out]."""
        y: Tensor = self._ops.linear(x.reshape(-1, self.in_features), self.packed)
        return y.view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """A look-up in the head's packed weight, where a model ties the two."""

    def __init__(self, ops: Ops, weight: LinearWeight) -> None:
        super().__init__()
        self._ops, self.packed = ops, weight

    def forward(self, ids: Tensor) -> Tensor:
        """ids [*] -> [*, C]."""
        rows: Tensor = self._ops.embed_packed(ids.reshape(-1), self.packed)
        return rows.view(*ids.shape, -1)


class PackedExperts(SeparateProducts):
    """Experts that transformers stacks, or that were in codes, each with a provider's products."""

    def __init__(self, ops: Ops, experts: Any) -> None:
        super().__init__()
        self._ops = ops
        if isinstance(experts, CodedExpertsLayer):
            self.up = [[ops.pack_linear(w, None) for w in parts] for parts in experts.up]
            self.down = [ops.pack_linear(w, None) for w in experts.down]
            self.act = experts.act
            return
        name = "gate_up_proj" if experts.has_gate else "up_proj"
        self.up = [[weight] for weight in _packed_each(ops, experts, name)]
        self.down = _packed_each(ops, experts, "down_proj")
        self.act = experts._apply_gate if experts.has_gate else experts.act_fn

    def multiply(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._ops.linear(x, weight)


def are_stacked(module: Any) -> bool:
    """Whether a module is stacked experts in a form that `PackedExperts` has."""
    return getattr(module, "has_post_expert_norm", None) is False and hasattr(module, "has_gate")


def pack(model: Any, ops: Ops, dtype: torch.dtype, kept: Collection[str]) -> None:
    """Replace what is replaceable: linear layers and experts of `dtype`, but those named in `kept`,
    and the embedding where it is the head's weight. Each weight is packed and given back before
    the next.
    """
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = type(table) is nn.Embedding and head is not None and head.weight is table.weight
    # a list, since modules are replaced meanwhile
    for name, module in list(model.named_modules()):
        if name in kept:
            continue
        new = _replacement(module, ops, dtype)
        if new is None:
            continue
        model.set_submodule(name, new)
        if is_tied and module is head:
            model.set_input_embeddings(PackedEmbedding(ops, new.packed))


def unpacked_products(model: Any) -> Iterator[str]:
    """The names of parameters of matrix shape that are still multiplied by plain torch."""
    for name, module in model.named_modules():
        if not isinstance(module, _EMBEDDINGS):
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    yield f"{name}.{key}"


def _replacement(module: Any, ops: Ops, dtype: torch.dtype) -> Any:
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, CodedLinearLayer):
        return PackedLinear(ops, ops.pack_linear(module.codes, module.bias))
    # not a subclass, which may compute something else
    if type(module) is nn.Linear and module.weight.dtype is dtype:
        return PackedLinear(ops, ops.pack_linear(module.weight, module.bias))
    if type(module) is Conv1D and module.weight.dtype is dtype:
        weight = module.weight.t().contiguous()
        return PackedLinear(ops, ops.pack_linear(weight, module.bias))
    if isinstance(module, CodedExpertsLayer):
        return PackedExperts(ops, module)
    if are_stacked(module) and module.down_proj.dtype is dtype:
        return PackedExperts(ops, module)
    return None


def _packed_each(ops: Ops, experts: Any, name: str) -> list[LinearWeight]:
    weights, biases = experts._parameters[name], experts._parameters.get(name + "_bias")
    if experts.is_transposed:
        weights = weights.transpose(1, 2)
    packed: list[LinearWeight] = [
        ops.pack_linear(weight.contiguous(), biases[i] if experts.has_bias else None)
        for i, weight in enumerate(weights)
    ]
    # at once: there may be no memory for all experts twice
    experts._parameters[name] = None
    return packed
