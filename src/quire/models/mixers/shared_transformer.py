"""A transformer that several layers share, as a part of a decoder that runs (Zamba2): its weights
are made once, and each use has adapters and an output projection of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quire.models.layers import PlacedMixer, Projection
from quire.models.maker import Maker
from quire.models.mixers.attention import AttentionLayer, make_attention
from quire.models.spec import SharedTransformer
from quire.ops import Batch, LinearWeight, NormWeight, Ops


@dataclass(frozen=True, slots=True)
class AdaptedProjection:
    """base(x) + up(down(x))."""

    ops: Ops
    base: Projection
    down: LinearWeight
    up: LinearWeight

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        ops = self.ops
        return ops.add(self.base(x), ops.linear(ops.linear(x, self.down), self.up))


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Weights of all uses: `gate_up` makes gates and then inputs of the hidden layer."""

    norm: NormWeight
    attention: AttentionLayer
    mlp_norm: NormWeight
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class SharedTransformerUse:
    """Norm of the stream next to the embeddings, attention, norm, feed-forward, projection."""

    ops: Ops
    shared: SharedWeights
    attend: PlacedMixer
    gate_up: Projection
    act: str
    width: int
    out: LinearWeight

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, C] -> [T, C]; writes this step's K/V."""
        ops, shared, embeddings = self.ops, self.shared, batch.layer_inputs
        assert embeddings is not None, "the embedding stage has not run"
        both = ops.norm(ops.join_streams(x, embeddings), shared.norm)
        hidden = self.gate_up(ops.norm(self.attend(both, batch), shared.mlp_norm))
        gate, up = hidden.narrow(1, 0, self.width), hidden.narrow(1, self.width, self.width)
        return ops.linear(shared.down(ops.modulate(gate, up, self.act)), self.out)


def make_shared_weights(make: Maker, s: SharedTransformer) -> SharedWeights:
    """Build what all uses of a transformer have in common, in the order of its leaves."""
    at = f"shared.{s.number}."
    norm = make.norm(at + "attn_pre", s.norm)
    attention = make_attention(make, at + "attn.", s.attention)
    assert isinstance(attention, AttentionLayer), "keys and values of its own"
    assert s.mlp.gated and s.mlp.bound is s.mlp.clamp is None, "gates without another form"
    assert not s.mlp.sparsity, "gates without another form"
    mlp_norm, mlp = make.norm(at + "mlp_pre", s.norm), at + "mlp."
    gate_up = make.linear(mlp + "up", mlp + "gate", mlp + "up")
    return SharedWeights(
        norm,
        attention,
        mlp_norm,
        gate_up=partial(make.ops.linear, w=gate_up),
        down=make.row_linear(mlp + "down", s.mlp.width),
    )


def make_use(
    make: Maker, at: str, s: SharedTransformer, shared: SharedWeights, place: int
) -> SharedTransformerUse:
    """Build a layer's use, of leaves below `at`; `place`: of its attention's memory."""
    attention = shared.attention
    if s.attention_rank:
        attention = replace(attention, qkv=_adapted(make, at, "qkv", attention.qkv))
    gate_up = _adapted(make, at, ("mlp",), shared.gate_up)
    return SharedTransformerUse(
        make.ops,
        shared,
        PlacedMixer(attention, place),
        gate_up,
        act=s.mlp.act,
        width=s.mlp.width,
        out=make.linear(at + "out", at + "out"),
    )


def _adapted(
    make: Maker, at: str, parts: str | tuple[str, ...], base: Projection
) -> AdaptedProjection:
    """The projection with the adapters of its parts, which are one product."""
    name = at + "".join(parts)
    down = make.linear(name + "_a", *(f"{at}{part}_a" for part in parts))
    ups = [make.weights.tensor(f"{at}{part}_b.weight") for part in parts]
    # one product for all parts, in which a part's low-rank numbers reach its own outputs alone
    up = make.ops.pack_linear(torch.block_diag(*ups), None, make.format_of("projection"))
    make.keep(name + "_b", up)
    return AdaptedProjection(make.ops, base, down, up)
