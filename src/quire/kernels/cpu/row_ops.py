"""The native ops that treat each row by itself: embedding, norms, sums, gates; and sums of rows.

A row's result depends on nothing but the row: all are batch-invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.row_arguments import address_of, rows_at
from quire.kernels.cpu.runtime import CpuRuntime, NativeOps
from quire.ops.mixers.pooling import SPAN
from quire.ops.norm import NormWeight

Layout = tuple[int, int, int, int, int]
"""T, rows per token, width, and the strides between tokens and between a token's rows."""


class RowOps(NativeOps):
    """`embed`, `norm`, `add`, `add_norm`, `scale_gate` and `sum_chunks` on a runtime; see quire.ops
    for each.
    """

    def __init__(self, runtime: CpuRuntime) -> None:
        super().__init__(runtime)
        self._kinds = runtime.native.NormKind.__members__

    def norm(self, x: Tensor, n: NormWeight) -> Tensor:
        """x [*, C] -> [*, C]."""
        runtime = self._runtime
        out = runtime.output_like(x)
        x = runtime.dense(_as_rows(x, n))
        tokens, rows, width, token_stride, row_stride = _layout(x)
        weight, bias, param_stride = _params(n, x.dtype)
        runtime.keep(tokens, x, n.weight, n.bias)
        self._context.norm(
            self._types[x.dtype],
            tokens,
            rows,
            width,
            x.data_ptr(),
            token_stride,
            row_stride,
            out.data_ptr(),
            self._kinds[n.kind],
            n.eps,
            weight,
            bias,
            param_stride,
        )
        return out

    def add(self, x: Tensor, delta: Tensor, scale: float = 1.0) -> Tensor:
        """x, delta [T, C] -> [T, C]."""
        runtime = self._runtime
        assert x.shape == delta.shape and x.dtype is delta.dtype
        x, delta = runtime.dense(x), runtime.dense(delta)
        tokens, width = x.shape
        runtime.keep(tokens, x, delta)
        out = runtime.output_like(x)
        self._context.add(
            self._types[x.dtype], tokens, width, scale, *rows_at(x), *rows_at(delta), out.data_ptr()
        )
        return out

    def add_norm(
        self, x: Tensor, delta: Tensor, n: NormWeight, scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """x, delta [T, C] -> sum and normed sum, [T, C] each."""
        runtime = self._runtime
        assert x.shape == delta.shape and x.dtype is delta.dtype
        x, delta = runtime.dense(x), runtime.dense(delta)
        tokens, width = x.shape
        weight, bias, _ = _params(n, x.dtype)
        runtime.keep(tokens, x, delta, n.weight, n.bias)
        total, out = runtime.output_like(x), runtime.output_like(x)
        self._context.add_norm(
            self._types[x.dtype],
            tokens,
            width,
            scale,
            *rows_at(x),
            *rows_at(delta),
            total.data_ptr(),
            out.data_ptr(),
            self._kinds[n.kind],
            n.eps,
            weight,
            bias,
        )
        return total, out

    def embed(
        self,
        ids: Tensor,
        table: Tensor,
        scale: float = 1.0,
        positions: Tensor | None = None,
        position_table: Tensor | None = None,
    ) -> Tensor:
        """ids [T], table [V, C] -> [T, C]."""
        runtime = self._runtime
        ids, table = runtime.dense(ids), runtime.dense(table)
        width = table.shape[1]
        runtime.keep(len(ids), ids, table, positions, position_table)
        out = runtime.output((len(ids), width), table.dtype)
        learned = (0, 0, 0, 0)
        if positions is not None and position_table is not None:
            positions, position_table = runtime.dense(positions), runtime.dense(position_table)
            learned = (
                positions.data_ptr(),
                position_table.data_ptr(),
                position_table.shape[0],
                position_table.stride(0),
            )
        self._context.embed(
            self._types[table.dtype],
            len(ids),
            width,
            scale,
            ids.data_ptr(),
            table.data_ptr(),
            table.shape[0],
            table.stride(0),
            None,
            *learned,
            out.data_ptr(),
        )
        return out

    def scale_gate(self, y: Tensor, gate: Tensor) -> Tensor:
        """y [T, F], gate [T, F] or [T, 1] -> [T, F]."""
        runtime = self._runtime
        assert gate.shape[1] in (1, y.shape[1]) and y.dtype is gate.dtype
        y, gate = runtime.dense(y), runtime.dense(gate)
        tokens, width = y.shape
        runtime.keep(tokens, y, gate)
        out = runtime.output_like(y)
        self._context.scale_gate(
            self._types[y.dtype],
            tokens,
            width,
            gate.shape[1],
            *rows_at(y),
            *rows_at(gate),
            out.data_ptr(),
        )
        return out

    def sum_chunks(self, x: Tensor, chunks: Tensor, spans: Tensor, rest: Tensor) -> None:
        """x [T, C] into spans and rest [R, C]. Raises IndexError for a chunk that is not in x."""
        x = self._runtime.dense(x)
        assert chunks.dtype is torch.int64 and chunks.is_contiguous()
        for sums in (spans, rest):
            assert sums.dtype is torch.float32 and sums.is_contiguous()
            assert sums.shape == (len(chunks), x.shape[1])
        self._context.sum_chunks(
            self._types[x.dtype],
            len(chunks),
            x.shape[1],
            SPAN,
            *rows_at(x),
            len(x),
            *map(address_of, (chunks, spans, rest)),
        )


def _as_rows(x: Tensor, n: NormWeight) -> Tensor:
    """x as [T, C] or [T, M, C]; with parameters per head, M are the heads."""
    if n.weight is not None and n.weight.dim() == 2:
        return x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])
    return x if x.dim() in (2, 3) else x.reshape(-1, x.shape[-1])


def _layout(x: Tensor) -> Layout:
    shape, strides = x.shape, x.stride()
    if len(shape) == 2:
        return shape[0], 1, shape[1], strides[0], 0
    return shape[0], shape[1], shape[2], strides[0], strides[1]


def _params(n: NormWeight, dtype: torch.dtype) -> tuple[int, int, int]:
    """Addresses of weight and bias (0 for none), and the stride between heads."""
    weight, bias = n.weight, n.bias
    for tensor in (weight, bias):
        assert tensor is None or (tensor.dtype is dtype and tensor.is_contiguous())
    return (
        address_of(weight),
        address_of(bias),
        weight.shape[1] if weight is not None and weight.dim() == 2 else 0,
    )
