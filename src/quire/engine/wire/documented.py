"""The messages of messages.py under the fields that the reference documents, for programs that make
some: `EngineCoreRequest(sampling_params=...)`, `EngineCoreOutputs(outputs=[...])`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, ClassVar, TypeAlias

import msgspec

from quire.engine.arguments import refuse_keywords
from quire.engine.wire import messages
from quire.engine.wire.core_output import EngineCoreOutput, columns_of
from quire.engine.wire.messages import AdapterRef, SchedulerStats
from quire.errors import InvalidParameter, InvalidType, NotBuiltYet
from quire.lora.request import LoRARequest, check_lora_request
from quire.params import PoolingParams, SamplingParams


class Documented(msgspec.StructMeta):
    """The type of a class whose calls make messages of its base class, of either's fields; to
    `isinstance` the two are one.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        """Make a message; positional fields are the reference's, named ones also the base's."""
        if args or not cls.documented.isdisjoint(fields):  # type: ignore[attr-defined]
            return cls.make(*args, **fields)  # type: ignore[attr-defined]
        return cls.make_own(**fields)  # type: ignore[attr-defined]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__base__)  # type: ignore[arg-type]


_HINTS = {
    "mm_features": "Give text alone.",
    "prompt_embeds": "Give prompt_token_ids.",
    "prompt_is_token_ids": "Give prompt_token_ids.",
    "eos_token_id": "The model's are known; give more as stop_token_ids.",
    "client_index": "An engine has one front end; leave it out.",
    "current_wave": "The coordinator of lock-step cores counts waves; leave it out.",
    "abort_immediately": "Call abort_request.",
}
"""Fields of what is not built -> what to do instead."""

_NEUTRAL = {"client_index": 0, "current_wave": 0, "abort_immediately": False}


def _request(
    request_id: str,
    prompt_token_ids: list[int] | None,
    mm_features: Sequence[Any] | None = None,
    sampling_params: SamplingParams | None = None,
    pooling_params: PoolingParams | None = None,
    arrival_time: float = 0.0,
    lora_request: LoRARequest | None = None,
    cache_salt: str | None = None,
    data_parallel_rank: int | None = None,
    prompt_embeds: Any = None,
    prompt_is_token_ids: Any = None,
    client_index: int = 0,
    current_wave: int = 0,
    priority: int = 0,
    trace_headers: Mapping[str, str] | None = None,
    resumable: bool = False,
    external_req_id: str | None = None,
    *,
    params: SamplingParams | PoolingParams | None = None,
    **unbuilt: Any,
) -> messages.EngineCoreRequest:
    """Positions are those of release 0.32. Raises NotBuiltYet for a value of what this release does
    not have, InvalidParameter where there are no parameters, or two, and InvalidType for a value at
    the place of another field.
    """
    for name, value, kinds in (
        ("request_id", request_id, str),
        ("arrival_time", arrival_time, (int, float)),
        ("cache_salt", cache_salt, (str, NoneType)),
        ("data_parallel_rank", data_parallel_rank, (int, NoneType)),
        ("priority", priority, int),
        ("external_req_id", external_req_id, (str, NoneType)),
        ("resumable", resumable, bool),
    ):
        if not isinstance(value, kinds):
            raise InvalidType(name, value, "it is not a value of that field")
    unbuilt |= {"prompt_embeds": prompt_embeds, "prompt_is_token_ids": prompt_is_token_ids}
    unbuilt |= {"client_index": client_index, "current_wave": current_wave}
    unbuilt["mm_features"] = mm_features or None
    for name, hint in _HINTS.items():
        value = unbuilt.pop(name, None)
        is_neutral = isinstance(value, int) and value == _NEUTRAL.get(name)
        if value is not None and not is_neutral:
            raise NotBuiltYet(name, value, hint)
    refuse_keywords(unbuilt)
    given = [one for one in (sampling_params, pooling_params, params) if one is not None]
    if len(given) != 1:
        allowed = "a request has sampling_params or pooling_params"
        raise InvalidParameter("sampling_params", sampling_params, allowed)
    if prompt_token_ids is None:
        raise InvalidParameter("prompt_token_ids", None, "a request has token ids")
    adapter = None if lora_request is None else AdapterRef.of(check_lora_request(lora_request))
    return messages.EngineCoreRequest(
        prompt_token_ids=prompt_token_ids,
        params=given[0],
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=cache_salt,
        data_parallel_rank=data_parallel_rank,
        resumable=resumable,
        request_id=request_id,
        external_req_id=external_req_id,
        trace_headers=None if trace_headers is None else dict(trace_headers),
        adapter=adapter,
    )


class DocumentedRequest(messages.EngineCoreRequest, metaclass=Documented):
    """A request for an engine, in place of a prompt. Made from the reference's fields, which raise
    NotBuiltYet at values that this release does not have, or from those of its base class.
    """

    documented: ClassVar = frozenset(("sampling_params", "pooling_params", "lora_request", *_HINTS))
    make: ClassVar = staticmethod(_request)
    make_own: ClassVar = messages.EngineCoreRequest


def _outputs(
    engine_index: int = 0,
    outputs: Sequence[EngineCoreOutput] | None = None,
    scheduler_stats: SchedulerStats | None = None,
    timestamp: float = 0.0,
    utility_output: messages.UtilityOutput | None = None,
    finished_requests: set[str] | None = None,
    **own: Any,
) -> messages.EngineCoreOutputs:
    """Positions are those that all releases share."""
    for name, value, kinds in (
        ("engine_index", engine_index, int),
        ("outputs", outputs, (list, tuple, NoneType)),
        ("scheduler_stats", scheduler_stats, (SchedulerStats, NoneType)),
        ("timestamp", timestamp, (int, float)),
        ("utility_output", utility_output, (messages.UtilityOutput, NoneType)),
    ):
        if not isinstance(value, kinds):
            raise InvalidType(name, value, "it is not a value of that field")
    return messages.EngineCoreOutputs(
        engine_index=engine_index,
        stats=scheduler_stats,
        timestamp=timestamp or time.monotonic(),
        utility_output=utility_output,
        **columns_of(outputs, finished_requests),
        **own,
    )


def _own_outputs(*, timestamp: float = 0.0, **own: Any) -> messages.EngineCoreOutputs:
    return messages.EngineCoreOutputs(timestamp=timestamp or time.monotonic(), **own)


class DocumentedOutputs(messages.EngineCoreOutputs, metaclass=Documented):
    """Outputs of a core in a step. Made from the reference's fields or from those of its base
    class; requests are named by the `request_id` that the core was given, or by their handles.
    """

    documented: ClassVar = frozenset(("outputs", "scheduler_stats", "finished_requests"))
    make: ClassVar = staticmethod(_outputs)
    make_own: ClassVar = staticmethod(_own_outputs)


EngineCoreRequest: TypeAlias = DocumentedRequest
EngineCoreOutputs: TypeAlias = DocumentedOutputs
