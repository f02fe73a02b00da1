"""The tasks that send the later parts of streamed prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.request_state import RequestGroup
from quire.engine.frontend.streaming_input import (
    InputStream,
    StreamingInput,
    check_streamable,
    feed,
)
from quire.errors import InputStreamError, RequestError
from quire.params import PoolingParams, SamplingParams


class InputFeeders:
    """One task for each streamed prompt, until its stream or its request ends."""

    def __init__(self, front_end: FrontEnd[AsyncEngineCoreClient]) -> None:
        self._front_end = front_end
        self.running: dict[asyncio.Task[None], RequestGroup] = {}

    def __len__(self) -> int:
        """The number of streams that are still read."""
        return len(self.running)

    async def add(
        self,
        add: Callable[..., RequestGroup],
        request_id: str,
        stream: InputStream,
        params: SamplingParams | PoolingParams,
        inputs: dict[str, Any],
    ) -> RequestGroup:
        """Add the stream's first part and start a task that sends the others. Raises
        InputStreamError for what the stream raises, RequestError if it has no part.
        """
        check_streamable(params)
        assert isinstance(params, SamplingParams)
        try:
            first = await anext(stream)
        except StopAsyncIteration:
            raise RequestError("The input stream ended before its first part.") from None
        except Exception as error:
            raise InputStreamError(error) from error
        group = add(
            request_id, first.prompt, first.sampling_params or params, resumable=True, **inputs
        )
        latest = params

        def send(part: StreamingInput) -> None:
            nonlocal latest
            latest = part.sampling_params or latest
            self._front_end.extend(group, part.prompt, latest, **inputs)

        def end() -> None:
            self._front_end.end_input(group, latest)

        task = asyncio.create_task(feed(stream, send, end))
        self.running[task] = group
        task.add_done_callback(partial(self._on_end, group))
        return group

    def end_unread(self) -> None:
        """Cancel the tasks of requests that have ended, whose input is no longer used."""
        for task, group in self.running.items():
            if not self._front_end.outputs.is_unfinished(group):
                task.cancel()

    def cancel(self) -> None:
        """Cancel all tasks."""
        for task in self.running:
            task.cancel()

    def _on_end(self, group: RequestGroup, task: asyncio.Task[None]) -> None:
        del self.running[task]
        if not task.cancelled() and task.exception() is not None and group.mailbox is not None:
            group.mailbox.put(task.exception() or AssertionError())
