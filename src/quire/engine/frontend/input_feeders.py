"""The tasks that send the later parts of streamed prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.request_state import RequestGroup
from quire.engine.frontend.streaming_input import InputStream, check_streamable
from quire.errors import InputStreamError, RequestError
from quire.params import PoolingParams, SamplingParams


class InputFeeders:
    """One task for each streamed prompt, until its stream or its request ends."""

    def __init__(self, front_end: FrontEnd[AsyncEngineCoreClient]) -> None:
        self._front_end = front_end
        self.running: dict[asyncio.Task[None], RequestGroup] = {}

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
        task = asyncio.create_task(self._feed(group, stream, params, inputs))
        self.running[task] = group
        task.add_done_callback(partial(self._on_end, group))
        return group

    async def _feed(
        self,
        group: RequestGroup,
        stream: InputStream,
        latest: SamplingParams,
        inputs: dict[str, Any],
    ) -> None:
        """Send every part as it arrives, then close the input. Raises InputStreamError."""
        try:
            async for part in stream:
                if part.sampling_params is not None:
                    check_streamable(part.sampling_params)
                    latest = part.sampling_params
                self._front_end.extend(group, part.prompt, latest, **inputs)
        except Exception as error:
            raise InputStreamError(error) from error
        self._front_end.end_input(group)

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
