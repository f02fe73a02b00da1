"""The native ops on logits: the largest entry, draws, filters, what log-probabilities need."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.cpu.row_arguments import address_of, rows_at
from quire.kernels.cpu.runtime import NativeOps
from quire.ops.sampling.sample import TopLogits


class SampleOps(NativeOps):
    """`greedy`, `draw`, `truncate` and `rank` on a runtime; see quire.ops.sampling.sample for each.

    They compute at once and are not part of a recorded program: which of them a step needs is
    decided each time.
    """

    def greedy(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits [R, V] -> ids [R] int64, values [R]."""
        rows, width, logits = self._checked(logits)
        ids = torch.empty(rows, dtype=torch.int64)
        values = torch.empty(rows, dtype=torch.float32)
        start, stride = logits.data_ptr(), logits.stride(0)  # in every step: no call more
        self._context.greedy(rows, start, stride, width, ids.data_ptr(), values.data_ptr())
        return ids, values

    def draw(
        self, logits: Tensor, settings: Tensor, keys: Tensor, hashes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """logits [R, V], settings [R, 4], keys [R, 2], hashes [V] -> ids [R] int64, peaks [R]."""
        rows, width, logits = self._checked(logits)
        _check(settings, torch.float64, rows, 4)
        _check(keys, torch.int32, rows, 2)
        _check(hashes, torch.int32, width)
        ids = torch.empty(rows, dtype=torch.int64)
        peaks = torch.empty(rows, dtype=torch.float32)
        self._context.draw(
            rows, *rows_at(logits), width, *map(address_of, (settings, keys, hashes, ids, peaks))
        )
        return ids, peaks

    def truncate(self, logits: Tensor, settings: Tensor) -> Tensor:
        """logits [R, V], settings [R, 4] -> [R, V]."""
        rows, width, logits = self._checked(logits)
        _check(settings, torch.float64, rows, 4)
        out = torch.empty((rows, width), dtype=torch.float32)
        self._context.truncate(rows, *rows_at(logits), width, settings.data_ptr(), out.data_ptr())
        return out

    def rank(self, logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogits:
        """logits [R, V], token_ids [R] -> see TopLogits. Raises IndexError for an id beyond V."""
        rows, width, logits = self._checked(logits)
        assert 0 <= num_top <= width
        _check(token_ids, torch.int64, rows)
        found = TopLogits(
            torch.empty((rows, num_top), dtype=torch.int32),
            torch.empty((rows, num_top), dtype=torch.float32),
            torch.empty(rows, dtype=torch.int32),
            torch.empty(rows, dtype=torch.float32),
            torch.empty(rows, dtype=torch.float32),
        )
        self._context.rank(
            rows, *rows_at(logits), width, token_ids.data_ptr(), num_top, *map(address_of, found)
        )
        return found

    def _checked(self, logits: Tensor) -> tuple[int, int, Tensor]:
        assert logits.dtype is torch.float32 and logits.dim() == 2 and logits.shape[1] > 0
        assert self._runtime.program is None, "sampling is not recorded"
        is_dense = logits.stride(1) == 1
        return *logits.shape, logits if is_dense else self._runtime.dense(logits)


def _check(array: Tensor, dtype: torch.dtype, *shape: int) -> None:
    assert array.dtype is dtype and array.shape == shape and array.is_contiguous()
