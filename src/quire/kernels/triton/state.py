"""Layers with a recurrent state: a program goes through one row's tokens in order, for one head or
some channels, with the state in registers.

There is a program for every token of the step, and those whose token begins no row end at once: so
the grid depends on nothing but the number of tokens, and a captured step serves any rows.
"""

# The parameters of kernels are named as in the other kernels here: constants in capitals.
# ruff: noqa: N803

from __future__ import annotations

from typing import Any

import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import KEEP_NAN, kernel, power_of_2
from quire.ops.mixers.state import L2_EPS
from quire.ops.norm import NormWeight

_CHANNELS = 128
"""Channels of a program where there are no heads."""
_NUMBERS = 4096
"""Numbers of a state that a program keeps in registers."""


@kernel
def softplus(v: tl.tensor) -> Any:
    """log(1 + e^v); 2 atanh(u / (2 + u)) is log(1 + u), here of u <= 1."""
    u = tl.exp(-tl.abs(v))
    # a series, since Triton has no log1p
    z = u / (u + 2.0)
    w = z * z
    p = 1.0 / 15
    p = p * w + 1.0 / 13
    p = p * w + 1.0 / 11
    p = p * w + 1.0 / 9
    p = p * w + 1.0 / 7
    p = p * w + 1.0 / 5
    p = p * w + 1.0 / 3
    p = p * w + 1.0
    return tl.maximum(v, 0.0, KEEP_NAN) + 2.0 * z * p


@kernel
def silu(v: tl.tensor) -> Any:
    """v times its sigmoid."""
    return v / (1.0 + tl.exp(-v))


@kernel
def goes_on(reads: tl.tensor, token: tl.tensor, num_tokens: tl.tensor) -> Any:
    """Whether the token continues the row of the one before it."""
    return tl.load(reads + token, token < num_tokens, other=0) < 0


@kernel
def _conv_kernel(
    x: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    num_tokens: int,
    x_stride: int,
    before_stride: int,
    after_stride: int,
    block_stride: int,
    W: tl.constexpr,
    KERNEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The window is [BLOCK_K, BLOCK], the oldest input first, with a place for the newest."""
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(reads + token)
    if source >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = channel < W
        tap = tl.arange(0, BLOCK_K)[:, None]
        past = (tap < KERNEL - 1) & inside[None, :]
        place = tap * W + channel[None, :]
        dtype: tl.constexpr = x.dtype.element_ty
        window = tl.load(states + source * block_stride + place, past, other=0.0).to(tl.float32)
        taps = tl.load(weight + place, (tap < KERNEL) & inside[None, :], other=0.0).to(tl.float32)
        is_row = source >= 0
        while is_row:
            newest = tl.load(x + token * x_stride + channel, inside, other=0.0).to(tl.float32)
            if HAS_BEFORE:
                gate = tl.load(before + token * before_stride + channel, inside, other=0.0)
                newest = (gate.to(tl.float32) * newest).to(dtype).to(tl.float32)
            window = tl.where(tap == KERNEL - 1, newest[None, :], window)
            y = tl.sum(window * taps, 0)
            if HAS_BIAS:
                y += tl.load(bias + channel, inside, other=0.0).to(tl.float32)
            if SILU:
                y = silu(y)
            if HAS_AFTER:
                gate = tl.load(after + token * after_stride + channel, inside, other=0.0)
                y = gate.to(tl.float32) * y.to(dtype).to(tl.float32)
            tl.store(out + token * W + channel, y.to(dtype), inside)
            # a shift as a product with a shifted unit matrix: registers cannot be indexed
            following = tl.arange(0, BLOCK_K)[:, None] + 1 == tl.arange(0, BLOCK_K)[None, :]
            moved = tl.sum(tl.where(following[:, :, None], window[None, :, :], 0.0), 1)
            window = moved
            target = tl.load(writes + token)
            if target >= 0:
                tl.store(states + target * block_stride + place, window.to(dtype), past)
            token += 1
            is_row = goes_on(reads, token, num_tokens)


@kernel
def _mamba_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    decay: tl.tensor,
    skip: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    num_tokens: int,
    x_stride: int,
    dt_stride: int,
    b_stride: int,
    c_stride: int,
    gate_stride: int,
    block_stride: int,
    W: tl.constexpr,
    N: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A state is [BLOCK_N, BLOCK] of N numbers for each of W channels."""
    token = tl.program_id(0).to(tl.int64)
    source = tl.load(reads + token)
    if source >= 0:
        channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, BLOCK_N)
        inside, held = channel < W, n < N
        both = held[:, None] & inside[None, :]
        place = n[:, None] * W + channel[None, :]
        state = tl.load(states + source * block_stride + place, both, other=0.0)
        rates = tl.load(decay + place, both, other=0.0)
        skips = tl.load(skip + channel, inside, other=0.0)
        is_row = source >= 0
        while is_row:
            u = tl.load(x + token * x_stride + channel, inside, other=0.0).to(tl.float32)
            raw = tl.load(dt + token * dt_stride + channel, inside, other=0.0)
            step = softplus(raw.to(tl.float32))
            bs = tl.load(b + token * b_stride + n, held, other=0.0).to(tl.float32)
            cs = tl.load(c + token * c_stride + n, held, other=0.0).to(tl.float32)
            state = tl.exp(step[None, :] * rates) * state + (step * u)[None, :] * bs[:, None]
            y = tl.sum(state * cs[:, None], 0) + skips * u
            if HAS_GATE:
                z = tl.load(gate + token * gate_stride + channel, inside, other=0.0)
                y *= silu(z.to(tl.float32))
            tl.store(out + token * W + channel, y.to(out.dtype.element_ty), inside)
            target = tl.load(writes + token)
            if target >= 0:
                tl.store(states + target * block_stride + place, state, both)
            token += 1
            is_row = goes_on(reads, token, num_tokens)


@kernel
def _mamba2_kernel(
    x: tl.tensor,
    dt: tl.tensor,
    b: tl.tensor,
    c: tl.tensor,
    out: tl.tensor,
    decay: tl.tensor,
    skip: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    num_tokens: int,
    x_stride: int,
    dt_stride: int,
    b_stride: int,
    c_stride: int,
    block_stride: int,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    PER_GROUP: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Of head program_id(1), columns program_id(2); a state is [BLOCK_N, BLOCK]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(reads + token)
    if source >= 0:
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, BLOCK_N)
        inside, held = column < DIM, n < N
        both = held[:, None] & inside[None, :]
        place = head * (N * DIM) + n[:, None] * DIM + column[None, :]
        group = head // PER_GROUP * N
        state = tl.load(states + source * block_stride + place, both, other=0.0)
        rate, skipped = tl.load(decay + head), tl.load(skip + head)
        is_row = source >= 0
        while is_row:
            at = token * x_stride + head * DIM + column
            u = tl.load(x + at, inside, other=0.0).to(tl.float32)
            raw = tl.load(dt + token * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head)
            step = tl.maximum(softplus(raw), LEAST, KEEP_NAN)
            step = tl.minimum(step, LARGEST, KEEP_NAN)
            bs = tl.load(b + token * b_stride + group + n, held, other=0.0).to(tl.float32)
            cs = tl.load(c + token * c_stride + group + n, held, other=0.0).to(tl.float32)
            state = tl.exp(step * rate) * state + (step * u)[None, :] * bs[:, None]
            y = tl.sum(state * cs[:, None], 0) + skipped * u
            to = out + token * (HEADS * DIM) + head * DIM + column
            tl.store(to, y.to(out.dtype.element_ty), inside)
            target = tl.load(writes + token)
            if target >= 0:
                tl.store(states + target * block_stride + place, state, both)
            token += 1
            is_row = goes_on(reads, token, num_tokens)


@kernel
def _delta_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    decay: tl.tensor,
    dt_bias: tl.tensor,
    states: tl.tensor,
    reads: tl.tensor,
    writes: tl.tensor,
    num_tokens: int,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    a_stride: int,
    b_stride: int,
    block_stride: int,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    N: tl.constexpr,
    PER_KEY: tl.constexpr,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Of head program_id(1), columns program_id(2); a state is [BLOCK_N, BLOCK]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = tl.load(reads + token)
    if source >= 0:
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        n = tl.arange(0, BLOCK_N)
        inside, held = column < DIM, n < N
        both = held[:, None] & inside[None, :]
        place = head * (N * DIM) + n[:, None] * DIM + column[None, :]
        key_at = head // PER_KEY * N + n
        state = tl.load(states + source * block_stride + place, both, other=0.0)
        rate, bias = tl.load(decay + head), tl.load(dt_bias + head)
        is_row = source >= 0
        while is_row:
            query = tl.load(q + token * q_stride + key_at, held, other=0.0).to(tl.float32)
            key = tl.load(k + token * k_stride + key_at, held, other=0.0).to(tl.float32)
            query = query * (1.0 / tl.sqrt(tl.sum(query * query, 0) + EPS)) * SCALE
            key = key * (1.0 / tl.sqrt(tl.sum(key * key, 0) + EPS))
            at = token * v_stride + head * DIM + column
            value = tl.load(v + at, inside, other=0.0).to(tl.float32)
            step = softplus(tl.load(a + token * a_stride + head).to(tl.float32) + bias)
            beta = 1.0 / (1.0 + tl.exp(-tl.load(b + token * b_stride + head).to(tl.float32)))
            state = tl.exp(step * rate) * state
            delta = (value - tl.sum(state * key[:, None], 0)) * beta
            state += key[:, None] * delta[None, :]
            y = tl.sum(state * query[:, None], 0)
            to = out + token * (HEADS * DIM) + head * DIM + column
            tl.store(to, y.to(out.dtype.element_ty), inside)
            target = tl.load(writes + token)
            if target >= 0:
                tl.store(states + target * block_stride + place, state, both)
            token += 1
            is_row = goes_on(reads, token, num_tokens)


@kernel
def _gated_norm_kernel(
    y: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    y_stride: int,
    gate_stride: int,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    IS_SHARED: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Group program_id(1) of row program_id(0)."""
    token, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUP
    column = tl.arange(0, BLOCK)
    inside = column < GROUP
    dtype: tl.constexpr = out.dtype.element_ty
    z = tl.load(gate + token * gate_stride + begin + column, inside, other=0.0)
    opened = silu(z.to(tl.float32))
    values = tl.load(y + token * y_stride + begin + column, inside, other=0.0).to(tl.float32)
    if GATE_FIRST:
        values *= opened
    if HAS_NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(values * values, 0) / GROUP + EPS)
        values = (values * inverse).to(dtype).to(tl.float32)
        at = column if IS_SHARED else begin + column
        values *= tl.load(weight + at, inside, other=0.0).to(tl.float32)
        if not GATE_FIRST:
            values = values.to(dtype).to(tl.float32) * opened
    tl.store(out + token * W + begin + column, values.to(dtype), inside)


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
    """See `quire.ops.mixers.state.short_conv`."""
    size, width = weight.shape
    out = x.new_empty(x.shape)
    if len(x):
        block = min(_CHANNELS, power_of_2(width))
        gates = [gate if gate is not None else x for gate in (before, after)]
        # a program for each token, of which those work where a row begins: the host does not look
        # for them
        _conv_kernel[(len(x), -(-width // block))](
            x, *gates, out, weight, weight if bias is None else bias, states, reads, writes,
            len(x), x.stride(0), *(gate.stride(0) for gate in gates), states.stride(0),
            W=width, KERNEL=size, HAS_BIAS=bias is not None, SILU=act == "silu",
            HAS_BEFORE=before is not None, HAS_AFTER=after is not None,
            BLOCK_K=power_of_2(size), BLOCK=block,
        )  # fmt: skip
    return out


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
    """See `quire.ops.mixers.state.mamba_scan`."""
    size, width = decay.shape
    out = x.new_empty(x.shape)
    if len(x):
        block, rows = min(_CHANNELS, power_of_2(width)), power_of_2(size)
        z = x if gate is None else gate
        _mamba_kernel[(len(x), -(-width // block))](
            x, dt, b, c, z, out, decay, skip, states, reads, writes,
            len(x), *(part.stride(0) for part in (x, dt, b, c, z)), states.stride(0),
            W=width, N=size, HAS_GATE=gate is not None, BLOCK_N=rows, BLOCK=block,
        )  # fmt: skip
    return out


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
    """See `quire.ops.mixers.state.mamba2_scan`."""
    _, heads, size, dim = states.shape
    out = x.new_empty(x.shape)
    if len(x):
        rows, block = _shape(size, dim)
        _mamba2_kernel[(len(x), heads, -(-dim // block))](
            x, dt, b, c, out, decay, skip, dt_bias, states, reads, writes,
            len(x), *(part.stride(0) for part in (x, dt, b, c)), states.stride(0),
            HEADS=heads, DIM=dim, N=size, PER_GROUP=heads // (b.shape[1] // size),
            LEAST=dt_limits[0], LARGEST=dt_limits[1], BLOCK_N=rows, BLOCK=block,
        )  # fmt: skip
    return out


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
    """See `quire.ops.mixers.state.gated_delta`."""
    _, heads, size, dim = states.shape
    out = v.new_empty(v.shape)
    if len(v):
        rows, block = _shape(size, dim)
        _delta_kernel[(len(v), heads, -(-dim // block))](
            q, k, v, a, b, out, decay, dt_bias, states, reads, writes,
            len(v), *(part.stride(0) for part in (q, k, v, a, b)), states.stride(0),
            HEADS=heads, DIM=dim, N=size, PER_KEY=heads // (k.shape[1] // size),
            SCALE=size**-0.5, EPS=L2_EPS, BLOCK_N=rows, BLOCK=block,
        )  # fmt: skip
    return out


def gated_norm(
    y: Tensor, gate: Tensor, n: NormWeight | None, group: int, gate_first: bool
) -> Tensor:
    """See `quire.ops.mixers.state.gated_norm`."""
    width = y.shape[1]
    out = y.new_empty(y.shape)
    if len(y):
        weight = y if n is None else n.weight
        assert weight is not None
        _gated_norm_kernel[(len(y), width // group)](
            y, gate, weight, out, y.stride(0), gate.stride(0),
            W=width, GROUP=group, HAS_NORM=n is not None, GATE_FIRST=gate_first or n is None,
            IS_SHARED=n is not None and weight.numel() == group, EPS=0.0 if n is None else n.eps,
            BLOCK=power_of_2(group),
        )  # fmt: skip
    return out


def _shape(size: int, dim: int) -> tuple[int, int]:
    """Rows and columns of the part of a head's state that a program has."""
    rows = power_of_2(size)
    return rows, min(power_of_2(dim), max(8, _NUMBERS // rows))
