"""Bounds of the ops of layers with a recurrent state; see op_bounds. The error of a state grows
with every token that went into it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.op_oracle_rows import to_array
from tests.support.running_error import FUNCTION, Approx, contract, exp, sigmoid, sqrt

exact = Approx.exact
Token = Callable[[Approx, int], tuple[Approx, Approx]]


def _along_rows(
    shape: Any, states: Tensor, reads: Tensor, writes: Tensor, token: Token
) -> dict[str, Approx]:
    y, kept = exact(np.zeros(tuple(shape))), exact(to_array(states).copy())
    state: Any = None
    for t in range(len(reads)):
        if reads[t] >= 0:
            held = kept[int(reads[t])]
            state = Approx(held.value.copy(), held.error.copy())
        state, out = token(state, t)
        y.value[t], y.error[t] = out.value, out.error
        if writes[t] >= 0:
            kept.value[int(writes[t])], kept.error[int(writes[t])] = state.value, state.error
    return {"0": y, "1": kept}


def _softplus(x: Approx) -> Approx:
    """No steeper than 1, and right to a few ulps."""
    value = np.logaddexp(0.0, x.value)
    return Approx(value, x.error / (1 + np.exp(-x.value)) + FUNCTION * value)


def _silu(x: Approx) -> Approx:
    return x * sigmoid(x)


def short_conv(
    stored, x, states, reads, writes, weight, bias=None, act=None, before=None, after=None
) -> dict[str, Approx]:
    inputs, taps = exact(x), exact(weight)
    if before is not None:
        inputs = stored(exact(before) * inputs)

    def token(window: Approx, t: int) -> tuple[Approx, Approx]:
        newest = inputs[t : t + 1]
        window = Approx(
            np.concatenate([window.value, newest.value]),
            np.concatenate([window.error, newest.error]),
        )
        y = contract("kw,kw->w", window, taps, len(taps.value))
        y = y if bias is None else y + exact(bias)
        y = stored(y if act is None else _silu(y))
        return window[1:], y if after is None else stored(exact(after)[t] * y)

    return _along_rows(x.shape, states, reads, writes, token)


def mamba_scan(
    stored, x, dt, b, c, states, reads, writes, decay, skip, gate=None
) -> dict[str, Approx]:
    inputs, steps = exact(x), _softplus(exact(dt))

    def token(state: Approx, t: int) -> tuple[Approx, Approx]:
        kept = exp(steps[t] * exact(decay)) * state
        state = kept + steps[t] * inputs[t] * exact(b)[t].reshape(-1, 1)
        y = contract("nw,n->w", state, exact(c)[t], len(kept.value)) + exact(skip) * inputs[t]
        return state, stored(y if gate is None else y * _silu(exact(gate)[t]))

    return _along_rows(x.shape, states, reads, writes, token)


def mamba2_scan(
    stored, x, dt, b, c, states, reads, writes, decay, skip, dt_bias, dt_limits
) -> dict[str, Approx]:
    _, heads, size, dim = states.shape
    raw = _softplus(exact(dt) + exact(dt_bias))
    steps = Approx(np.clip(raw.value, *dt_limits), raw.error)

    def per_head(part: Tensor, t: int) -> Approx:
        groups = to_array(part)[t].reshape(-1, size)
        return exact(np.repeat(groups, heads // len(groups), 0))

    def token(state: Approx, t: int) -> tuple[Approx, Approx]:
        u, step = exact(x)[t].reshape(heads, 1, dim), steps[t].reshape(heads, 1, 1)
        kept = exp(step * exact(decay).reshape(heads, 1, 1)) * state
        state = kept + per_head(b, t).reshape(heads, size, 1) * (step * u)
        y = contract("hnp,hn->hp", state, per_head(c, t), size)
        y = y + exact(skip).reshape(heads, 1) * u.reshape(heads, dim)
        return state, stored(y.reshape(-1))

    return _along_rows(x.shape, states, reads, writes, token)


def gated_delta(stored, q, k, v, a, b, states, reads, writes, decay, dt_bias) -> dict[str, Approx]:
    return channel_delta(stored, q, k, v, a, b, states, reads, writes, decay, dt_bias)


def channel_delta(
    stored, q, k, v, a, b, states, reads, writes, decay, dt_bias, bound=None, strength=1.0
) -> dict[str, Approx]:
    _, heads, size, dim = states.shape
    rates = exact(to_array(decay).reshape(heads, 1))
    steps = exact(a) + exact(dt_bias)
    betas = sigmoid(exact(b)) * strength

    def kept(t: int) -> Approx:
        step = steps[t].reshape(heads, a.shape[1] // heads)
        log = _softplus(step) * rates if bound is None else sigmoid(step * rates * -1.0) * bound
        return exp(log).reshape(heads, log.value.shape[1], 1)

    def unit(part: Tensor, t: int) -> Approx:
        vectors = exact(to_array(part)[t].reshape(-1, size))
        vectors = vectors / sqrt((vectors * vectors).sum() + 1e-6)
        times = heads // len(vectors.value)
        return Approx(np.repeat(vectors.value, times, 0), np.repeat(vectors.error, times, 0))

    def token(state: Approx, t: int) -> tuple[Approx, Approx]:
        query, key = unit(q, t) * size**-0.5, unit(k, t)
        state = kept(t) * state
        seen = contract("hnd,hn->hd", state, key, size)
        delta = (exact(v)[t].reshape(heads, dim) - seen) * betas[t].reshape(heads, 1)
        state = state + key.reshape(heads, size, 1) * delta.reshape(heads, 1, dim)
        return state, stored(contract("hnd,hn->hd", state, query, size).reshape(-1))

    return _along_rows(v.shape, states, reads, writes, token)


def gated_linear(
    stored, x, gates, states, reads, writes, positions, rate, bias
) -> dict[str, Approx]:
    blocks, width = gates.shape[1], x.shape[1]

    def opened(t: int, which: int) -> Approx:
        part = to_array(gates)[t].reshape(blocks, 2, -1)[:, which].reshape(width)
        return sigmoid(exact(part) + exact(to_array(bias)[which]))

    def token(state: Approx, t: int) -> tuple[Approx, Approx]:
        log = exact(rate) * opened(t, 1)
        u = exact(x)[t] * opened(t, 0)
        if int(positions[0, t]) > 0:
            u = u * sqrt(exact(np.ones(width)) - exp(log * 2.0))
        state = exp(log) * state + u
        return state, stored(state)

    return _along_rows(x.shape, states, reads, writes, token)


def gated_norm(stored, y, gate, n, group, gate_first) -> dict[str, Approx]:
    entering, opened = exact(y), _silu(exact(gate))
    if gate_first or n is None:
        entering = entering * opened
    if n is None:
        return {"0": stored(entering)}
    groups = entering.reshape(len(y), y.shape[1] // group, group)
    normed = stored(groups / sqrt((groups * groups).mean() + n.eps))
    weight = exact(to_array(n.weight).reshape(-1, group))
    out = stored(normed * weight).reshape(*y.shape)
    return {"0": out if gate_first else stored(out * opened)}
