"""Control calls that wait for the answers of other processes: cores, or API servers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from quire import errors
from quire.encodable import NotEncodable
from quire.engine.control_verbs import combined
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreRequest, UtilityOutput
from quire.errors import EngineError, InvalidParameter

T = TypeVar("T")


@dataclass(slots=True)
class _Call:
    utility: Utility[Any]
    future: Future[Any]
    missing: set[int]
    results: dict[int, Any] = field(default_factory=dict)


class PendingCalls:
    """Collects the answers of the cores that a call was sent to. Its future gets their combined
    answer, or the first failure; a call whose future is cancelled is forgotten.
    """

    def __init__(self) -> None:
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)

    def begin(
        self, utility: Utility[Any], engine_indices: Iterable[int]
    ) -> tuple[int, Future[Any]]:
        call_id, future = next(self._ids), Future[Any]()
        self._calls[call_id] = _Call(utility, future, set(engine_indices))
        future.add_done_callback(lambda _: self.forget(call_id))
        return call_id, future

    def forget(self, call_id: int) -> None:
        """Drop a call; answers that still arrive are ignored."""
        self._calls.pop(call_id, None)

    def answer(self, engine_index: int, output: UtilityOutput) -> None:
        call = self._calls.get(output.call_id)
        if call is None or engine_index not in call.missing:
            return
        if output.failure_message is not None:
            kind = _ERRORS.get(output.failure_type, EngineError)
            call.future.set_exception(kind(output.failure_message))
            return
        call.missing.discard(engine_index)
        call.results[engine_index] = output.result
        if not call.missing:
            results = [call.results[index] for index in sorted(call.results)]
            call.future.set_result(combined(call.utility, results))

    def fail(self, engine_index: int, error: EngineError) -> None:
        """A core has died: the calls that wait for its answer fail with `error`."""
        for call in list(self._calls.values()):
            if engine_index in call.missing:
                call.future.set_exception(error)


async def answer_to(utility: Utility[T], future: Future[T]) -> T:
    """Await an answer; after the utility's `timeout_s`, TimeoutError, and the call is forgotten."""
    waiting = asyncio.wrap_future(future)
    try:
        await asyncio.wait([waiting], timeout=utility.timeout_s)
        if not waiting.done():
            raise not_answered(utility)
        return waiting.result()
    finally:
        waiting.cancel()


def not_answered(utility: Utility[Any]) -> TimeoutError:
    """The error of a call whose time is over."""
    return TimeoutError(f"{utility.method} was not answered within {utility.timeout_s:g} s.")


def not_encodable(utility: Utility[Any], error: NotEncodable) -> InvalidParameter:
    """The error of a call with an argument that cannot be sent to another process."""
    return InvalidParameter(utility.method, utility.args, _cannot_be_sent(error))


def request_not_encodable(
    encode: Callable[[object], object], request: EngineCoreRequest, error: NotEncodable
) -> InvalidParameter:
    """The error of a request with a value that cannot be sent, by the name of its field."""
    for name, value in [*_items(request), *_items(request.params)]:
        if value is not request.params:
            try:
                encode(value)
            except NotEncodable as why:
                shown = "lora_request" if name == "adapter" else name
                return InvalidParameter(shown, value, _cannot_be_sent(why))
    return InvalidParameter("prompt", request.request_id, _cannot_be_sent(error))


def _cannot_be_sent(error: NotEncodable) -> str:
    return f"it cannot be sent to another process: {error}"


def _items(struct: msgspec.Struct) -> list[tuple[str, Any]]:
    return list(msgspec.structs.asdict(struct).items())


_ERRORS: dict[str, type[EngineError] | type[TimeoutError]] = {
    "TimeoutError": TimeoutError,
    "EngineDeadError": errors.EngineDeadError,
    "CapacityError": errors.CapacityError,
    "InvalidParameter": errors.RequestError,
    "InvalidType": errors.RequestError,
    "NotBuiltYet": errors.RequestError,
    "RequestError": errors.RequestError,
    "BadAdapter": errors.BadAdapter,
    "AdapterNotFound": errors.AdapterNotFound,
    "ProfilerAlreadyActive": errors.ProfilerAlreadyActive,
    "WeightUpdateError": errors.WeightUpdateError,
    "WeightMismatch": errors.WeightMismatch,
    "LoadError": errors.LoadError,
}
"""Errors that keep their class on the way from a core, where one text is enough to make one."""
