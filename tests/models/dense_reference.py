"""A decoder computed densely in float64, layer by layer: what paged runs of specs that no family
makes are compared with.

Only the facts that the specs of the tests have: RMS norm, rotary embedding, windows, output gates,
gated SiLU.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from quire.models.loading.random_weights import RandomLeaves
from quire.models.parameters import parameters


@functools.cache
def leaves_of(spec, seed):
    """The weights that `load_model(..., load_format="dummy", seed=seed)` draws."""
    draw = RandomLeaves(seed)
    return {name: draw(leaf).double() for name, leaf in parameters(spec).items()}


def run_dense(spec, seed, ids):
    """Logits [T, V], and the residual stream [T, C] into each layer and out of the last, L + 1."""
    leaves = leaves_of(spec, seed)
    x = leaves["embed.weight"][ids] * spec.embed_scale
    entering = [x]
    for i, block in enumerate(spec.blocks):
        at = f"layers.{i}."
        h = _norm(x, leaves[at + "attn_pre.weight"], block.norm)
        x = x + block.residual_scale * _attention(h, leaves, at + "attn.", block.mixer)
        h = _norm(x, leaves[at + "mlp_pre.weight"], block.norm)
        gate = F.silu(h @ leaves[at + "mlp.gate.weight"].T)
        up = gate * (h @ leaves[at + "mlp.up.weight"].T)
        x = x + block.residual_scale * (up @ leaves[at + "mlp.down.weight"].T)
        entering.append(x)
    head = leaves["embed.weight" if spec.tie else "head.weight"]
    return _norm(x, leaves["norm.weight"], spec.final_norm) @ head.T, entering


def _norm(x, weight, norm):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight


def _attention(h, leaves, at, a):
    q, k, v = (h @ leaves[f"{at}{part}.weight"].T for part in "qkv")
    q = _rotated(q.view(-1, a.heads, a.head_dim), a.rope)
    k = _rotated(k.view(-1, a.kv_heads, a.head_dim), a.rope)
    k, v = (
        t.repeat_interleave(a.heads // a.kv_heads, 1)
        for t in (k, v.view(-1, a.kv_heads, a.head_dim))
    )
    scores = a.scale * torch.einsum("qhd,khd->hqk", q, k)
    count = torch.arange(len(h))
    distance = count[:, None] - count
    hidden = distance < 0 if a.window is None else (distance < 0) | (distance >= a.window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    y = torch.einsum("hqk,khd->qhd", weights, v)
    y = y.flatten(1)
    if a.gate == "full":
        y = y * torch.sigmoid(h @ leaves[f"{at}gate.weight"].T)
    return y @ leaves[f"{at}o.weight"].T


def _rotated(x, rope):
    half = rope.dim // 2
    frequencies = rope.theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(len(x), dtype=torch.float64)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second, rest = x[..., :half], x[..., half : rope.dim], x[..., rope.dim :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
