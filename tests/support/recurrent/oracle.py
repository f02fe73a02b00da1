"""The oracle of layers with a recurrent state: one token, one channel after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.op_oracle_rows import Array, to_array, to_tensor


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def _along_rows(
    shape: tuple[int, int],
    states: Tensor,
    reads: Tensor,
    writes: Tensor,
    token: Callable[[Array, int], tuple[Array, Array]],
) -> Tensor:
    y = np.zeros(shape)
    state: Any = None
    for t in range(len(reads)):
        if reads[t] >= 0:
            state = to_array(states[int(reads[t])]).copy()
        state, y[t] = token(state, t)
        if writes[t] >= 0:
            states[int(writes[t])] = to_tensor(state)
    return to_tensor(y)


def short_conv(
    x, states, reads, writes, weight, bias=None, act=None, before=None, after=None
) -> Tensor:
    inputs, taps = to_array(x), to_array(weight)

    def token(window: Array, t: int) -> tuple[Array, Array]:
        newest = inputs[t] * (1 if before is None else to_array(before)[t])
        window = np.vstack([window, newest])
        y = np.zeros(len(newest))
        for w in range(len(newest)):
            y[w] = sum(window[k, w] * taps[k, w] for k in range(len(taps)))
            y[w] += 0 if bias is None else to_array(bias)[w]
            y[w] = silu(y[w]) if act == "silu" else y[w]
        return window[1:], y * (1 if after is None else to_array(after)[t])

    return _along_rows(inputs.shape, states, reads, writes, token)


def mamba_scan(x, dt, b, c, states, reads, writes, decay, skip, gate=None) -> Tensor:
    inputs, steps, bs, cs, rates, skips = map(to_array, (x, dt, b, c, decay, skip))

    def token(state: Array, t: int) -> tuple[Array, Array]:
        y = np.zeros(inputs.shape[1])
        for w in range(len(y)):
            step = softplus(steps[t, w])
            for n in range(len(state)):
                grown = step * inputs[t, w] * bs[t, n]
                state[n, w] = math.exp(step * rates[n, w]) * state[n, w] + grown
                y[w] += state[n, w] * cs[t, n]
            y[w] += skips[w] * inputs[t, w]
            y[w] *= 1 if gate is None else silu(to_array(gate)[t, w])
        return state, y

    return _along_rows(inputs.shape, states, reads, writes, token)


def mamba2_scan(x, dt, b, c, states, reads, writes, decay, skip, dt_bias, dt_limits) -> Tensor:
    inputs, steps, bs, cs = map(to_array, (x, dt, b, c))
    rates, skips, biases = map(to_array, (decay, skip, dt_bias))
    _, heads, size, dim = states.shape
    groups = bs.shape[1] // size

    def token(state: Array, t: int) -> tuple[Array, Array]:
        y = np.zeros((heads, dim))
        for h in range(heads):
            at = h * groups // heads * size
            step = min(max(softplus(steps[t, h] + biases[h]), dt_limits[0]), dt_limits[1])
            for p in range(dim):
                u = inputs[t, h * dim + p]
                for n in range(size):
                    grown = step * u * bs[t, at + n]
                    state[h, n, p] = math.exp(step * rates[h]) * state[h, n, p] + grown
                    y[h, p] += state[h, n, p] * cs[t, at + n]
                y[h, p] += skips[h] * u
        return state, y.reshape(-1)

    return _along_rows(inputs.shape, states, reads, writes, token)


def gated_delta(q, k, v, a, b, states, reads, writes, decay, dt_bias) -> Tensor:
    return channel_delta(q, k, v, a, b, states, reads, writes, decay, dt_bias)


def channel_delta(
    q, k, v, a, b, states, reads, writes, decay, dt_bias, bound=None, strength=1.0
) -> Tensor:
    qs, ks, vs, steps, betas, rates, biases = map(to_array, (q, k, v, a, b, decay, dt_bias))
    _, heads, size, dim = states.shape
    key_heads, channels = qs.shape[1] // size, steps.shape[1] // heads

    def unit(x: Array) -> Array:
        return x / math.sqrt(sum(value * value for value in x) + 1e-6)

    def shrink(h: int, n: int, t: int) -> float:
        at = h * channels + n % channels
        step = steps[t, at] + biases[at]
        if bound is None:
            return math.exp(rates[h] * softplus(step))
        return math.exp(bound / (1 + math.exp(rates[h] * step)))

    def token(state: Array, t: int) -> tuple[Array, Array]:
        y = np.zeros((heads, dim))
        for h in range(heads):
            at = h * key_heads // heads * size
            query, key = unit(qs[t, at : at + size]) / math.sqrt(size), unit(ks[t, at : at + size])
            beta = strength / (1 + math.exp(-betas[t, h]))
            for n in range(size):
                state[h, n] *= shrink(h, n, t)
            for d in range(dim):
                seen = sum(state[h, n, d] * key[n] for n in range(size))
                state[h, :, d] += key * beta * (vs[t, h * dim + d] - seen)
                y[h, d] = sum(state[h, n, d] * query[n] for n in range(size))
        return state, y.reshape(-1)

    return _along_rows(vs.shape, states, reads, writes, token)


def gated_linear(x, gates, states, reads, writes, positions, rate, bias) -> Tensor:
    inputs, opened, rates, biases = map(to_array, (x, gates, rate, bias))
    width, blocks = inputs.shape[1], opened.shape[1]
    size = width // blocks

    def token(state: Array, t: int) -> tuple[Array, Array]:
        for w in range(width):
            block, channel = divmod(w, size)
            entering = opened[t, block, channel] + biases[0, w]
            keeping = opened[t, block, size + channel] + biases[1, w]
            gate = math.exp(rates[w] / (1 + math.exp(-keeping)))
            u = inputs[t, w] / (1 + math.exp(-entering))
            if int(positions[0, t]) > 0:
                u *= math.sqrt(1 - gate * gate)
            state[w] = gate * state[w] + u
        return state, state.copy()

    return _along_rows(inputs.shape, states, reads, writes, token)


def gated_norm(y, gate, n, group, gate_first) -> Tensor:
    out, opened = to_array(y).copy(), np.vectorize(silu, otypes=[float])(to_array(gate))
    if gate_first or n is None:
        out *= opened
    if n is None:
        return to_tensor(out)
    weight = np.resize(to_array(n.weight), out.shape[1])
    for t in range(len(out)):
        for at in range(0, out.shape[1], group):
            part = out[t, at : at + group]
            part /= math.sqrt(sum(value * value for value in part) / group + n.eps)
    out *= weight
    return to_tensor(out if gate_first else out * opened)
