"""Layers with a recurrent state: a short convolution, the scans of Mamba, the gated delta rule.

A state is in one block per request. Each op computes the recurrence token by token, in the order of
a row's tokens, be they of a prompt, of a decode or drafts: so a row's bits depend neither on how
its tokens are cut into steps nor on other rows. (The chunked forms of these recurrences add in
another order.) `states` [N, ...] are views of blocks; `reads` and `writes` are those of
`StateBatch`: the state before a row's first token is read from block reads[t], the state after a
token is kept in block writes[t].

Everything is computed in fp32 and rounded where it is stored. States are fp32, but the window of
the convolution, which holds inputs. The definitions look at one token at a time, so that torch runs
the same functions on the same shapes whatever the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.ops.activation import ACTIVATIONS, row_by_row
from quire.ops.norm import NormWeight
from quire.ops.registry import WIDE, op

L2_EPS = 1e-6
"""Added to the sum of squares of queries and keys of the delta rule."""

Token = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""The state before a token and the token's place in the step -> the state after it, and y [W]."""


def walk(y: Tensor, states: Tensor, reads: Tensor, writes: Tensor, token: Token) -> Tensor:
    """Run `token` along every row, and fill y [T, W] with what it returns."""
    state = states.new_empty(())
    blocks = zip(reads.tolist(), writes.tolist(), strict=True)
    for t, (source, target) in enumerate(blocks):
        if source >= 0:
            state = states[source]
        state, y[t] = token(state, t)
        if target >= 0:
            states[target] = state
    return y


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), of every x (torch's own gives large ones back as they are)."""
    return torch.logaddexp(x, torch.zeros_like(x))


@op(
    axes={"x": 0, "reads": 0, "writes": 0, "before": 0, "after": 0},
    mutates=("states",),
    is_invariant=True,
)
def short_conv(
    x: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    act: str | None = None,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> Tensor:
    """Causal convolution over each channel of x [T, W] by itself -> [T, W].

    y_t = after * act(bias + sum of weight[k] * u_(t-K+1+k)) of u = before * x, both products
    rounded. weight [K, W], bias [W]; before and after [T, W] or None. states [N, K-1, W] in x's
    dtype: the last K-1 of u, the oldest first.
    """
    wide = WIDE[x.dtype]

    def token(window: Tensor, t: int) -> tuple[Tensor, Tensor]:
        newest = x[t] if before is None else before[t] * x[t]
        window = torch.cat((window, newest[None]))
        y = (window.to(wide) * weight.to(wide)).sum(0)
        y = y if bias is None else y + bias.to(wide)
        y = (y if act is None else ACTIVATIONS[act](y)).to(x.dtype)
        return window[1:], y if after is None else after[t] * y

    return walk(torch.empty_like(x), states, reads, writes, token)


@op(
    axes={"x": 0, "dt": 0, "b": 0, "c": 0, "reads": 0, "writes": 0, "gate": 0},
    mutates=("states",),
    is_invariant=True,
)
def mamba_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    decay: Tensor,
    skip: Tensor,
    gate: Tensor | None = None,
) -> Tensor:
    """The selective scan of Mamba over x [T, W] -> [T, W] (Gu & Dao 2023, section 3.5).

    With d = softplus(dt): s = e^(d * decay) * s + d * x * b, y = (c s + skip * x) * silu(gate). dt
    and gate [T, W], b and c [T, n], decay [n, W] and skip [W] fp32; states [N, n, W].
    """
    wide = WIDE[x.dtype]

    def token(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        step, u = softplus(dt[t].to(wide)), x[t].to(wide)
        state = (step * decay).exp() * state + step * u * b[t].to(wide)[:, None]
        y = (state * c[t].to(wide)[:, None]).sum(0) + skip * u
        return state, y if gate is None else y * F.silu(gate[t].to(wide))

    return walk(torch.empty_like(x), states, reads, writes, token)


@op(
    axes={"x": 0, "dt": 0, "b": 0, "c": 0, "reads": 0, "writes": 0},
    mutates=("states",),
    is_invariant=True,
)
def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    decay: Tensor,
    skip: Tensor,
    dt_bias: Tensor,
    dt_limits: tuple[float, float],
) -> Tensor:
    """The scan of Mamba-2 over x [T, H*P], a state for each of H heads -> [T, H*P] (Dao & Gu 2024).

    With d = softplus(dt + dt_bias) within dt_limits: s = e^(d * decay) * s + d * b x, y = c s +
    skip * x. dt [T, H]; b and c [T, G*n], each for H/G heads; decay, skip and dt_bias [H] fp32;
    states [N, H, n, P].
    """
    wide = WIDE[x.dtype]
    _, heads, size, _ = states.shape

    def per_head(part: Tensor) -> Tensor:
        groups = part.to(wide).view(-1, size)
        return groups.repeat_interleave(heads // len(groups), 0)[:, :, None]

    def token(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        u = x[t].to(wide).view(heads, 1, -1)
        step = softplus(dt[t].to(wide) + dt_bias).clamp(*dt_limits)[:, None, None]
        state = (step * decay[:, None, None]).exp() * state + per_head(b[t]) * (step * u)
        y = (state * per_head(c[t])).sum(1, keepdim=True) + skip[:, None, None] * u
        return state, y.flatten()

    return walk(torch.empty_like(x), states, reads, writes, token)


@op(
    axes={"q": 0, "k": 0, "v": 0, "a": 0, "b": 0, "reads": 0, "writes": 0},
    mutates=("states",),
    is_invariant=True,
)
def gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
) -> Tensor:
    """The gated delta rule over values v [T, H*D] of H heads -> [T, H*D] (Yang et al. 2024).

    q and k [T, K*N] are made of unit length per head, q divided by sqrt(N); each of the K heads
    serves H/K heads of v. s = e^(decay * softplus(a + dt_bias)) * s, then s += k (sigmoid(b) * (v -
    k s)), y = q s. a and b [T, H]; decay and dt_bias [H] fp32; states [N, H, N, D].
    """
    wide = WIDE[v.dtype]

    def log_decay(t: int) -> Tensor:
        return (softplus(a[t].to(wide) + dt_bias) * decay)[:, None]

    return _delta_rule(q, k, v, b, states, reads, writes, log_decay)


@op(
    axes={"q": 0, "k": 0, "v": 0, "a": 0, "b": 0, "reads": 0, "writes": 0},
    mutates=("states",),
    is_invariant=True,
)
def channel_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    bound: float | None = None,
    strength: float = 1.0,
) -> Tensor:
    """The delta rule of `gated_delta` with a decay for each of the N channels of a head's keys, or
    one for all of them, and a strength of up to `strength` (Kimi Team 2025, section 3).

    s = e^(decay * softplus(a + dt_bias)) * s or, with a `bound` below 0, e^(bound * sigmoid(-decay
    * (a + dt_bias))) * s; then s += k (strength * sigmoid(b) * (v - k s)), y = q s. a [T, H*N] or
    [T, H] and dt_bias of as many numbers, decay [H], fp32.
    """
    wide, heads, rate = WIDE[v.dtype], states.shape[1], decay[:, None]

    def log_decay(t: int) -> Tensor:
        step = (a[t].to(wide) + dt_bias).view(heads, -1)
        return rate * softplus(step) if bound is None else bound * (-rate * step).sigmoid()

    return _delta_rule(q, k, v, b, states, reads, writes, log_decay, strength)


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    log_decay: Callable[[int], Tensor],
    strength: float = 1.0,
) -> Tensor:
    """The rule of `gated_delta` and `channel_delta`; `log_decay`: a token's place in the step ->
    the logarithm of its decay, of each channel of a head's keys [H, N] or of the head [H, 1].
    """
    wide = WIDE[v.dtype]
    _, heads, size, _ = states.shape

    def per_head(part: Tensor) -> Tensor:
        vectors = part.to(wide).view(-1, size)
        vectors = vectors * (vectors.square().sum(1, keepdim=True) + L2_EPS).rsqrt()
        return vectors.repeat_interleave(heads // len(vectors), 0)[:, :, None]

    def token(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        query, key = per_head(q[t]) * size**-0.5, per_head(k[t])
        state = log_decay(t).exp()[:, :, None] * state
        missing = v[t].to(wide).view(heads, -1) - (state * key).sum(1)
        learned = strength * b[t].to(wide).sigmoid()[:, None] * missing
        state = state + key * learned[:, None]
        return state, (state * query).sum(1).flatten()

    return walk(torch.empty_like(v), states, reads, writes, token)


@op(
    axes={"x": 0, "gates": 0, "reads": 0, "writes": 0, "positions": 1},
    mutates=("states",),
    is_invariant=True,
)
def gated_linear(
    x: Tensor,
    gates: Tensor,
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    positions: Tensor,
    rate: Tensor,
    bias: Tensor,
) -> Tensor:
    """The real-gated linear recurrent unit over x [T, W] -> [T, W] (De et al. 2024, section 2.4).

    With i = sigmoid(a + bias[0]) and g = e^(rate * sigmoid(b + bias[1])): s = g * s + sqrt(1 - g^2)
    * i * x, without the root at position 0, and y = s. gates [T, K, 2*W/K]: a and then b of each of
    K blocks of channels; bias [2, W] and rate [W] fp32, positions [1, T] int64; states [N, W].
    """
    wide, blocks = WIDE[x.dtype], gates.shape[1]

    def token(state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        of_blocks = gates[t].to(wide).view(blocks, 2, -1).transpose(0, 1)
        entering, keeping = row_by_row(torch.sigmoid, of_blocks.reshape(2, -1) + bias)
        log_gate = rate * keeping
        u = x[t].to(wide) * entering
        squared, gate = row_by_row(torch.exp, torch.stack((2 * log_gate, log_gate)))
        # RecurrentGemma takes the first input of a sequence as it is
        if positions[0, t] > 0:
            u = u * (1 - squared).sqrt()
        state = gate * state + u
        return state, state

    return walk(torch.empty_like(x), states, reads, writes, token)


@op(axes={"y": 0, "gate": 0}, is_invariant=True)
def gated_norm(
    y: Tensor, gate: Tensor, n: NormWeight | None, group: int, gate_first: bool
) -> Tensor:
    """RMS norm of each `group` of neighbours of y [T, W], and y times silu(gate) -> [T, W].

    gate_first: the product is normalised (Mamba-2), else the norm is multiplied (gated delta net).
    The norm's weight is [W], or [group] where all groups have one; n None: the product alone.
    """
    wide = WIDE[y.dtype]

    def token(y: Tensor, gate: Tensor) -> Tensor:
        opened, entering = F.silu(gate.to(wide)), y.to(wide)
        if n is None:
            return entering * opened
        assert n.weight is not None and n.kind == "rms", "no other norm has a gate"
        if gate_first:
            entering = entering * opened
        groups = torch.rms_norm(entering.view(-1, group), (group,), None, n.eps).to(y.dtype)
        normed = (groups * n.weight.view(-1, group)).flatten()
        return normed if gate_first else normed.to(wide) * opened

    out = torch.empty_like(y)
    for t in range(len(y)):
        out[t] = token(y[t], gate[t])
    return out
