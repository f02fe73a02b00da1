"""A core that costs next to nothing, for looking at what stands before it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import TypeVar, cast

from quire.engine.client.client import CoreStatus
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.params import SamplingParams

T = TypeVar("T")


class SteadyCore:
    """Gives every request (at most 2,048) one random id a step until its max_tokens."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        draw = random.Random(seed)
        self._ids = [draw.randrange(vocab_size) for _ in range(4096)]
        self._ends: dict[int, list[int]] = {}
        self._handles: list[int] = []
        self._new: list[int] = []
        self._num_steps = 0

    @property
    def has_work(self) -> bool:
        """Are there requests?"""
        return bool(self._handles)

    def add_request(self, request: EngineCoreRequest) -> None:
        params = request.params
        assert isinstance(params, SamplingParams), "the core generates only"
        max_tokens = params.max_tokens
        assert max_tokens is not None, "the input processor resolves max_tokens"
        self._handles.append(request.handle)
        self._new.append(request.handle)
        self._ends.setdefault(self._num_steps + max_tokens, []).append(request.handle)

    def abort_requests(self, handles: Sequence[int | str]) -> None:
        gone = set(handles)
        self._handles = [handle for handle in self._handles if handle not in gone]
        self._new = [handle for handle in self._new if handle not in gone]

    def get_output(self) -> EngineCoreOutputs:
        handles, new = self._handles, self._new
        self._num_steps += 1
        start = self._num_steps * 31 % 2048
        ended = self._ends.pop(self._num_steps, [])
        now = time.monotonic()
        outputs = EngineCoreOutputs(
            handles=handles,
            token_ids=self._ids[start : start + len(handles)],
            finished=[Finished(h, FinishReason.LENGTH) for h in ended if h in handles],
            started=[Started(handle, 0, now) for handle in new],
            stats=SchedulerStats(len(handles)),
            timestamp=now,
        )
        self._new = []
        if ended:
            self.abort_requests(ended)
        return outputs

    @property
    def engine_indices(self) -> Sequence[int]:
        return (0,)

    def survives(self, handle: int) -> bool:
        """Whether a request goes on after the death of its core."""
        return True

    def engine_of(self, handle: int) -> int | None:
        return 0 if handle in self._handles else None

    def core_status(self, engine_index: int) -> CoreStatus:
        return CoreStatus(engine_index, 0, os.getpid(), True, True, self.has_work)

    def call(self, utility: Utility[T]) -> T:
        """It has no state to ask for."""
        return cast(T, None)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Forget all requests."""
        self.abort_requests(list(self._handles))
