"""The experts that a request's tokens were sent to, collected over its steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.engine.outputs.kept_part import KeptPart, PartKind
from quire.outputs import CompletionOutput
from quire.step.columns import RoutedExperts


class OutputExperts(KeptPart):
    """The experts of tokens from position `start` on; later parts replace earlier ones."""

    __slots__ = ("_end", "_start", "_values")

    def __init__(self, start: int) -> None:
        self._start = self._end = start
        self._values: np.ndarray[Any, Any] | None = None

    def add(self, part: RoutedExperts) -> None:
        skipped = max(0, self._start - part.first)
        values = part.values[skipped:]
        first = part.first + skipped - self._start
        end = first + len(values)
        known = 0 if self._values is None else len(self._values)
        if self._values is None or end > known:
            # doubled, so that a long output is not copied in every step
            grown = np.zeros((max(end, 2 * known), *values.shape[1:]), dtype=values.dtype)
            if self._values is not None:
                grown[:known] = self._values
            self._values = grown
        self._values[first:end] = values
        self._end = max(self._end, self._start + end)

    def of(self, num_tokens: int) -> np.ndarray[Any, Any] | None:
        """The experts before the last of `num_tokens`, never computed: [n, L, k]; None: unknown."""
        if self._values is None:
            return None
        end = max(self._start, min(self._end, num_tokens - 1))
        return self._values[: end - self._start].copy()

    def end(self, completion: CompletionOutput, num_tokens: int) -> None:
        completion.routed_experts = self.of(num_tokens)


EXPERTS = PartKind(
    RoutedExperts, lambda params, *_: OutputExperts(params.routed_experts_prompt_start)
)
