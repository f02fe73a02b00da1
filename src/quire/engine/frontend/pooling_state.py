"""The state of an unfinished pooling request: it waits for one result."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.engine.frontend.request_state import RequestGroup
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.outputs import RequestStateStats
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.step.columns import PooledOutput
from quire.step.part import OutputPart

_NO_VALUES = np.zeros(0, dtype=np.float32)


class PoolingState:
    """Waits for the result of a prompt. `times` is kept if statistics are on."""

    __slots__ = ("engine_index", "group", "handle", "times", "values")

    max_tokens = None
    """Always 0: no tokens are drawn."""

    def __init__(self, handle: int, group: RequestGroup, times: RequestStateStats | None) -> None:
        self.handle, self.group, self.times = handle, group, times
        self.engine_index = 0
        self.values: np.ndarray[Any, np.dtype[np.float32]] | None = None
        """The result: [D], or [n, D] for n tokens."""

    def take_part(self, part: OutputPart) -> None:
        if isinstance(part, PooledOutput):
            self.values = part.values

    def final(self, end: Finished) -> PoolingRequestOutput[PoolingOutput]:
        self.group.num_open -= 1
        values, error = self.values, end.message
        if end.reason is FinishReason.ABORT and values is None:
            error = "the request was aborted" + (f" ({end.stop_reason})" if end.stop_reason else "")
        elif values is None and error is None:
            error = "the prompt was not pooled"
        return PoolingRequestOutput(
            self.group.request_id,
            PoolingOutput(_NO_VALUES if values is None else values),
            self.group.prompt_token_ids,
            self.group.num_cached_tokens or 0,
            finished=True,
            error=error,
        )

    def failed(self, error: str) -> PoolingRequestOutput[PoolingOutput]:
        """The output after an error on this side."""
        self.values = None
        return self.final(Finished(self.handle, FinishReason.ERROR, None, error))
