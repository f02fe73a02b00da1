"""The layers of a pooling head, made from a `PoolerSpec` and its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.models.maker import Maker
from quire.models.pooling.spec import Classifier, HeadLayer, PoolerSpec
from quire.ops import LinearWeight, NormWeight, Ops

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "identity": lambda x: x,
        "tanh": torch.tanh,
        "relu": torch.relu,
        "gelu": F.gelu,
        "gelu_tanh": partial(F.gelu, approximate="tanh"),
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
    }
)


@dataclass(frozen=True, slots=True)
class _Layer:
    ops: Ops
    weight: LinearWeight
    act: Callable[[Tensor], Tensor]
    norm: NormWeight | None

    def __call__(self, x: Tensor) -> Tensor:
        x = self.act(self.ops.linear(x, self.weight))
        return x if self.norm is None else self.ops.norm(x, self.norm)


@dataclass(frozen=True, slots=True)
class Pooler:
    """A pooling head with its weights, in `dtype`. A row's result depends on that row alone.

    `classifier` is the product behind `layers`: of labels, or of the vocabulary for their weights.
    """

    ops: Ops
    spec: PoolerSpec
    dtype: torch.dtype
    dense: Sequence[_Layer]
    layers: Sequence[_Layer]
    classifier: LinearWeight | None

    def embed(self, x: Tensor) -> Tensor:
        """Hidden states [M, C] of prompts or tokens -> vectors [M, D], uncut, not normalised."""
        return _through(self.dense, x.to(self.dtype))

    def classify(self, x: Tensor) -> Tensor:
        """Hidden states [M, C] -> a score for each label [M, num_labels], before its activation,
        or for each token of the vocabulary [M, V].
        """
        assert self.classifier is not None, "the model has no classifier"
        x = x.to(self.dtype)
        return self.ops.linear(x if self.is_late else _through(self.layers, x), self.classifier)

    @property
    def is_late(self) -> bool:
        """Whether `classify` takes vectors of which `inner` has made something before pooling."""
        c = self.spec.classifier
        return c is not None and c.is_late

    def inner(self, x: Tensor) -> Tensor:
        """Hidden states [T, C] of tokens through the classifier's layers."""
        return _through(self.layers, x.to(self.dtype))


def _through(layers: Sequence[_Layer], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def make_pooler(make: Maker, spec: PoolerSpec, token_rows: Callable[[], Tensor]) -> Pooler:
    """Take the leaves of a pooler; `token_rows` takes the language-model head's [V, C]."""
    dtype = torch.float32 if spec.is_wide else make.dtype
    dense = _layers(make, "pooler.dense.", spec.dense, dtype)
    c, terms = spec.classifier, spec.terms
    scored = c if terms is None else terms
    if scored is None:
        return Pooler(make.ops, spec, dtype, dense, (), None)
    layers = _layers(make, "pooler.layers.", scored.layers, dtype)
    name = "pooler.classifier"
    if terms is not None:
        bias = make.weights.tensor("pooler.terms.bias", dtype) if terms.bias else None
        weight: LinearWeight = make.ops.pack_linear(token_rows().to(dtype), bias)
        make.keep(name, weight)
    elif c is not None and c.token_ids:
        weight = make.ops.pack_linear(_rows_of(c, token_rows()).to(dtype), None)
        make.keep(name, weight)
    else:
        weight = _linear(make, name, dtype)
    return Pooler(make.ops, spec, dtype, dense, layers, weight)


def with_other_leaves(pooler: Pooler, leaves: Mapping[str, Tensor], device: torch.device) -> Pooler:
    """The head with these leaves by canonical name; a projection or norm is replaced whole."""

    def leaf(name: str) -> Tensor | None:
        return leaves[name].to(device, pooler.dtype) if name in leaves else None

    def weight(at: str, own: LinearWeight) -> LinearWeight:
        if f"{at}.weight" not in leaves:
            return own
        return pooler.ops.pack_linear(leaf(f"{at}.weight"), leaf(f"{at}.bias"))

    def norm(at: str, own: NormWeight | None) -> NormWeight | None:
        if own is None or f"{at}.weight" not in leaves:
            return own
        return replace(own, weight=leaf(f"{at}.weight"), bias=leaf(f"{at}.bias"))

    def layers(at: str, own: Sequence[_Layer]) -> tuple[_Layer, ...]:
        return tuple(
            replace(
                layer,
                weight=weight(f"{at}{i}", layer.weight),
                norm=norm(f"{at}{i}.norm", layer.norm),
            )
            for i, layer in enumerate(own)
        )

    classifier = pooler.classifier
    return replace(
        pooler,
        dense=layers("pooler.dense.", pooler.dense),
        layers=layers("pooler.layers.", pooler.layers),
        classifier=None if classifier is None else weight("pooler.classifier", classifier),
    )


def _rows_of(c: Classifier, head: Tensor) -> Tensor:
    """The classifier's weight [num_labels, C], fp32, of the head's rows for its tokens."""
    rows = head[list(c.token_ids)].float()
    # the softmax of two scores is the sigmoid of their difference
    return rows[1:] - rows[:1] if c.is_difference else rows


def _layers(
    make: Maker, at: str, specs: Sequence[HeadLayer], dtype: torch.dtype
) -> tuple[_Layer, ...]:
    return tuple(_layer(make, f"{at}{i}", layer, dtype) for i, layer in enumerate(specs))


def _layer(make: Maker, at: str, layer: HeadLayer, dtype: torch.dtype) -> _Layer:
    weight, norm = _linear(make, at, dtype), None
    if layer.norm_eps is not None:
        bias = make.tensor(f"{at}.norm.bias", dtype) if layer.norm_bias else None
        norm = NormWeight("layer", layer.norm_eps, make.tensor(f"{at}.norm.weight", dtype), bias)
    return _Layer(make.ops, weight, _ACTIVATIONS[layer.act], norm)


def _linear(make: Maker, name: str, dtype: torch.dtype) -> LinearWeight:
    """A projection in the head's dtype, which is never rounded."""
    weight = make.weights.tensor(f"{name}.weight", dtype)
    bias = None
    if make.weights.has(f"{name}.bias"):
        bias = make.weights.tensor(f"{name}.bias", dtype)
    packed = make.ops.pack_linear(weight, bias)
    make.keep(name, packed)
    return packed
