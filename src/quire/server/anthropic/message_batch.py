"""A batch of messages, which is answered in the background."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.types import ASGIApp

from quire.encodable import to_json
from quire.server.batch.direct_call import DirectReply, post
from quire.server.http.in_flight import ID_SLOT, InFlightRequests
from quire.server.http.security import KEY_SLOT

AT_ONCE = 16
"""Requests of one batch that are in the engine at the same time."""
LIFETIME = timedelta(hours=24)
_OK, _BUSY = 200, 503


class BatchedRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message to be made: `params` is the body of `/v1/messages`."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=64)]
    params: msgspec.Raw


class RequestCounts(msgspec.Struct):
    """Counts of a batch's requests by state."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch as it is now."""

    id: str
    type: Literal["message_batch"] = "message_batch"
    processing_status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    request_counts: RequestCounts
    created_at: str
    expires_at: str
    ended_at: str | None = None
    archived_at: str | None = None
    cancel_initiated_at: str | None = None
    results_url: str | None = None


class MessageBatch:
    """One batch: its requests in their order, the results as they come. `owner` is the digest of
    the API key that made it, and only this key retrieves it.
    """

    def __init__(self, requests: list[BatchedRequest], owner: bytes | None, url: str) -> None:
        self.owner = owner
        self.results: dict[str, bytes] = {}
        self._requests = requests
        self.num_bytes = sum(len(request.params) for request in requests)
        """Bytes of the results, and of the requests that have none yet."""
        now = datetime.now(UTC)
        id = f"msgbatch_{secrets.token_hex(12)}"
        self._url = f"{url}/{id}/results"
        self.shown = BatchObject(
            id=id,
            request_counts=RequestCounts(processing=len(requests)),
            created_at=now.isoformat(),
            expires_at=(now + LIFETIME).isoformat(),
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.shown.id

    @property
    def is_over(self) -> bool:
        """Whether every request has its result."""
        return self.shown.processing_status == "ended"

    def start(self, app: ASGIApp, in_flight: InFlightRequests) -> None:
        """Answer the requests in a task of its own."""
        self._task = asyncio.create_task(self._run(app, in_flight))

    def cancel(self) -> None:
        """End what has no result yet. Idempotent."""
        if self._task is not None and self.shown.processing_status == "in_progress":
            self.shown.processing_status = "canceling"
            self.shown.cancel_initiated_at = datetime.now(UTC).isoformat()
            self._task.cancel()

    async def _run(self, app: ASGIApp, in_flight: InFlightRequests) -> None:
        """Answer all requests. Those that are cancelled or too late get such a result."""
        rest, left_over = iter(self._requests), "canceled"
        try:
            async with asyncio.timeout(LIFETIME.total_seconds()), asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(self._work(app, in_flight, rest))
        except TimeoutError:
            left_over = "expired"
        finally:
            for request in self._requests:
                # after a cancellation or the end of the time, or because the server shut down
                if request.custom_id not in self.results:
                    self._finish(request, left_over, {})
            self.shown.ended_at = datetime.now(UTC).isoformat()
            self.shown.processing_status = "ended"
            self.shown.results_url = self._url
            # their bytes are counted no longer
            self._requests = []

    async def _work(
        self, app: ASGIApp, in_flight: InFlightRequests, rest: Iterable[BatchedRequest]
    ) -> None:
        # one iterator for all workers: each request is taken by the next that is free
        for request in rest:
            # a batch may take a day, and the server waits for requests in progress only
            if in_flight.is_draining:
                return
            with in_flight.counted():
                reply = await self._answer(app, request)
            if reply.status == _OK:
                self._finish(request, "succeeded", {"message": msgspec.Raw(reply.body)})
            else:
                self._finish(request, "errored", {"error": msgspec.Raw(reply.body)})

    async def _answer(self, app: ASGIApp, request: BatchedRequest) -> DirectReply:
        """The reply of `/v1/messages`; a full queue means to try again."""
        body, id = bytes(request.params), f"{self.shown.id}-{secrets.token_hex(4)}"
        while True:
            # the call goes past the middleware that would set these
            state = {ID_SLOT: id, KEY_SLOT: self.owner}
            reply = await post(app, "/v1/messages", body, id, state)
            if reply.status != _BUSY:
                return reply
            await asyncio.sleep(float(reply.headers.get("retry-after", "1")))

    def _finish(self, request: BatchedRequest, kind: str, result: dict[str, Any]) -> None:
        counts = self.shown.request_counts
        counts.processing -= 1
        setattr(counts, kind, getattr(counts, kind) + 1)
        line = {"custom_id": request.custom_id, "result": {"type": kind, **result}}
        result_line = to_json(line)
        self.results[request.custom_id] = result_line
        self.num_bytes += len(result_line) - len(request.params)
