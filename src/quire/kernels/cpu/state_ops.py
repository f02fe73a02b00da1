"""The native ops of layers with a recurrent state; see csrc/kernels/state.cpp.

A row's bits depend on nothing but its own tokens and the state that it begins with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.row_arguments import address_of
from quire.kernels.cpu.runtime import NativeOps
from quire.ops.mixers.state import L2_EPS
from quire.ops.norm import NormWeight

Rows = tuple[int, int]
"""Address of the first token's row, and the stride between tokens."""
States = tuple[int, int, int, int, int]
"""Address of block 0's state, bytes between blocks, blocks, addresses of reads and writes."""

_NOTHING = (0, 0)


class StateOps(NativeOps):
    """`short_conv`, `mamba_scan`, `mamba2_scan`, `gated_delta` and `gated_norm` on a runtime; see
    quire.ops.mixers.state for each. They raise IndexError for a block that the memory does not
    have.
    """

    def short_conv(
        self,
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
        """x [T, W] -> [T, W]."""
        kernel, width = weight.shape
        assert act in (None, "silu") and states.shape[1:] == (kernel - 1, width)
        assert states.dtype is weight.dtype is x.dtype
        assert weight.is_contiguous() and (bias is None or bias.is_contiguous())
        self._runtime.keep(len(x), weight, bias)
        out = self._runtime.output(x.shape, x.dtype)
        self._context.short_conv(
            self._types[x.dtype],
            len(x),
            width,
            kernel,
            act == "silu",
            self._rows(x),
            self._rows(before),
            self._rows(after),
            self._rows(out),
            weight.data_ptr(),
            address_of(bias),
            self._states(states, reads, writes),
        )
        return out

    def mamba_scan(
        self,
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
        """x [T, W] -> [T, W]."""
        size, width = decay.shape
        assert states.shape[1:] == (size, width) and x.shape[1] == dt.shape[1] == width
        out = self._runtime.output(x.shape, x.dtype)
        self._context.mamba_scan(
            self._types[x.dtype],
            len(x),
            width,
            size,
            *map(self._rows, (x, dt, b, c, gate, out)),
            self._wide(len(x), decay),
            self._wide(len(x), skip),
            self._states(states, reads, writes),
        )
        return out

    def mamba2_scan(
        self,
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
        """x [T, H*P] -> [T, H*P]."""
        _, heads, size, dim = states.shape
        assert x.shape[1] == heads * dim and dt.shape[1] == heads and b.shape == c.shape
        out = self._runtime.output(x.shape, x.dtype)
        self._context.mamba2_scan(
            self._types[x.dtype],
            len(x),
            heads,
            dim,
            size,
            b.shape[1] // size,
            *map(self._rows, (x, dt, b, c, out)),
            *(self._wide(len(x), table) for table in (decay, skip, dt_bias)),
            *dt_limits,
            self._states(states, reads, writes),
        )
        return out

    def gated_delta(
        self,
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
        """v [T, H*D] -> [T, H*D]."""
        _, heads, size, dim = states.shape
        assert v.shape[1] == heads * dim and q.shape == k.shape and a.shape == b.shape
        out = self._runtime.output(v.shape, v.dtype)
        self._context.gated_delta(
            self._types[v.dtype],
            len(v),
            heads,
            q.shape[1] // size,
            dim,
            size,
            *map(self._rows, (q, k, v, a, b, out)),
            L2_EPS,
            self._wide(len(v), decay),
            self._wide(len(v), dt_bias),
            self._states(states, reads, writes),
        )
        return out

    def gated_norm(
        self, y: Tensor, gate: Tensor, n: NormWeight | None, group: int, gate_first: bool
    ) -> Tensor:
        """y [T, W] -> [T, W]."""
        weight, width = None if n is None else n.weight, y.shape[1]
        assert n is None or (n.kind == "rms" and weight is not None and weight.dtype is y.dtype)
        assert y.shape == gate.shape and width % group == 0
        self._runtime.keep(len(y), weight)
        out = self._runtime.output(y.shape, y.dtype)
        self._context.gated_norm(
            self._types[y.dtype],
            len(y),
            width,
            group,
            # without a norm both orders are one product
            gate_first or n is None,
            *map(self._rows, (y, gate, out)),
            address_of(weight),
            weight is not None and weight.numel() == group,
            0.0 if n is None else n.eps,
        )
        return out

    def _rows(self, x: Tensor | None) -> Rows:
        if x is None:
            return _NOTHING
        assert x.stride(1) == 1 or x.shape[1] == 1 or not len(x), "rows lie in one piece"
        self._runtime.keep(len(x), x)
        return x.data_ptr(), x.stride(0)

    def _states(self, states: Tensor, reads: Tensor, writes: Tensor) -> States:
        assert states[0].is_contiguous() and reads.is_contiguous() and writes.is_contiguous()
        self._runtime.keep(len(reads), states, reads, writes)
        block_bytes = states.stride(0) * states.element_size()
        return states.data_ptr(), block_bytes, len(states), reads.data_ptr(), writes.data_ptr()

    def _wide(self, num_tokens: int, table: Tensor) -> int:
        assert table.dtype is torch.float32 and table.is_contiguous()
        self._runtime.keep(num_tokens, table)
        return int(table.data_ptr())
