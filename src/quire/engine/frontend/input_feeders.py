"""The tasks that send the parts of streamed prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from quire.engine.client.client import AsyncEngineCoreClient
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.output_stream import RequestOutputCollector
from quire.engine.frontend.request_state import RequestGroup
from quire.engine.frontend.streaming_input import (
    InputStream,
    check_part,
    check_streamable,
    params_of_first,
    params_of_next,
)
from quire.errors import InputStreamError, RequestError
from quire.params import SamplingParams
from quire.request_options import RequestOptions


class InputFeeders:
    """One task for each streamed prompt, until its stream or its request ends."""

    def __init__(
        self,
        front_end: FrontEnd[AsyncEngineCoreClient],
        end: Callable[[RequestOutputCollector, str], None],
    ) -> None:
        """`end` ends the request of a mailbox, and is told why."""
        self._front_end = front_end
        self._end = end
        self.running: dict[asyncio.Task[None], RequestGroup] = {}

    def add(
        self,
        request_id: str,
        stream: InputStream,
        params: object,
        options: RequestOptions,
    ) -> RequestGroup:
        """Register a request and start the task that sends its parts as they come; the first may be
        long in coming. Raises RequestError for what such a request cannot have.

        What the stream raises, or a part that is refused, reaches the mailbox as InputStreamError.
        """
        own = check_streamable(params).clone()
        own.skip_clone = True  # nobody else has it
        options = replace(options, resumable=True)
        group, opened = self._front_end.open(request_id, own, options)
        first = partial(self._front_end.begin, group, opened, options)
        more = partial(self._front_end.extend, group, options=options)
        task = asyncio.create_task(self._feed(group, stream, own, first, more))
        self.running[task] = group
        task.add_done_callback(partial(self._on_end, group))
        return group

    async def _feed(
        self,
        group: RequestGroup,
        stream: InputStream,
        params: SamplingParams,
        first: Callable[..., None],
        more: Callable[..., None],
    ) -> None:
        """Send every part as it arrives, then close the input. Raises InputStreamError."""
        is_begun = False
        try:
            async for given in stream:
                part = check_part(given)
                if is_begun:
                    params = params_of_next(part, params)
                    more(part.prompt, params)
                else:
                    params = params_of_first(part, params)
                    first(part.prompt, params)
                    is_begun = True
            if not is_begun:
                raise RequestError("The input stream ended before its first part.")
        except Exception as error:
            raise InputStreamError(error) from error
        self._front_end.end_input(group)

    def end_unread(self) -> None:
        """Cancel the tasks of requests that have ended, whose input is no longer used."""
        for task, group in self.running.items():
            if not self._front_end.outputs.is_unfinished(group):
                task.cancel()

    def cancel(self) -> None:
        for task in self.running:
            task.cancel()

    def _on_end(self, group: RequestGroup, task: asyncio.Task[None]) -> None:
        del self.running[task]
        if task.cancelled() or (error := task.exception()) is None:
            return
        assert group.mailbox is not None, "streams have a reader"
        group.mailbox.put(error)
        self._end(group.mailbox, str(error))
