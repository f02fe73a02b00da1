"""A model of transformers without memory: every parameter is one zero, seen as the whole tensor,
and linear layers and experts compute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.models.foreign.library import refusal, use_attention
from quire.models.foreign.packing import are_stacked
from quire.models.foreign.spec import ForeignExperts, ForeignLinear


def build(kind: Any, config: Any, name: str, attention: str) -> Any:
    """Build a model of transformers on the meta device, with an attention function of this name.
    Raises UnsupportedArchitecture where that is not possible.
    """
    try:
        with torch.device("meta"):
            model = kind._from_config(
                config, attn_implementation="eager", experts_implementation="eager"
            ).eval()
    except Exception as error:
        raise refusal(name, f"transformers cannot build it ({error})") from error
    use_attention(model, attention)
    return model


def widest(model: Any) -> int:
    """Numbers of a token's widest activation, attention and logits apart."""
    head = model.get_output_embeddings()
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not head]
    experts = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    stacked = [experts * p.shape[1] for p in model.parameters() if p.dim() == 3]
    return max([m.out_features for m in linears] + stacked, default=0)


def linears(model: Any) -> tuple[ForeignLinear, ...]:
    """The model's linear layers."""
    return tuple(
        ForeignLinear(name, module.out_features, module.in_features)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
    )


def experts(model: Any) -> tuple[ForeignExperts, ...]:
    """The model's stacked experts."""
    return tuple(
        _experts(name, module) for name, module in model.named_modules() if are_stacked(module)
    )


def _experts(name: str, module: Any) -> ForeignExperts:
    count, *sizes = module.down_proj.shape
    dim, width = reversed(sizes) if module.is_transposed else sizes
    return ForeignExperts(name, count, width, dim, module.has_gate, module.has_bias)


def empty(model: Any) -> set[str]:
    """Give each parameter and buffer one zero in place of its memory. Returns the set to which
    names of linear layers are added when their weights are read.
    """
    opened: set[str] = set()
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                    is_parameter = tensors is module._parameters
                    tensors[key] = nn.Parameter(zeros, False) if is_parameter else zeros
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = _EmptyLinear
            module.__dict__.update(opened=opened, name=name)
        elif are_stacked(module):
            module.forward = _no_experts
    return opened


def _no_experts(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return torch.zeros_like(hidden)


class NoProducts(TorchFunctionMode):
    """While entered, products with weights are zeros: torch would copy weights without memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        if func in (torch.bmm, torch.addmm):
            a, b = args[-2:]
            return a.new_zeros(*a.shape[:-1], b.shape[-1])
        return func(*args, **(kwargs or {}))


class _EmptyLinear(nn.Linear):
    """A linear layer that computes zeros and notes whether its weight is read from outside."""

    opened: set[str]
    name: str

    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)

    def __getattr__(self, key: str) -> Any:
        if key in ("weight", "bias"):
            self.opened.add(self.name)
        return super().__getattr__(key)
