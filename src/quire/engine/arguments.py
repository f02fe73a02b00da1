"""Engine arguments that accept a single value, which is checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.config.plan import EnginePlan
from quire.errors import InvalidType, NotBuiltYet, UnknownParameter

_LEAVE_OUT = "Leave it out."
_SERVERS = "Leave it out: quire serve --api-server-count starts several front ends of one engine."

_OF_REQUESTS = {
    "session_id": "Requests share what they have in common by the prefix cache; leave it out.",
    "kv_hints": "The prefix cache keeps what was used last; leave it out.",
    "reasoning_ended": "It is found in the prompt; leave it out.",
    "reasoning_parser_kwargs": "Give structured_outputs a starts_after, or leave it out.",
}
"""Keywords of requests that are documented elsewhere and not built here -> what to do instead."""


def require_plan(vllm_config: object) -> EnginePlan:
    """Return the argument as a plan. Raises InvalidType for anything else."""
    if not isinstance(vllm_config, EnginePlan):
        raise InvalidType("vllm_config", vllm_config, "it must be an EnginePlan")
    return vllm_config


def check_executor_class(executor_class: object, plan: EnginePlan | None) -> None:
    """Raise NotBuiltYet for a class other than the one that the plan names."""
    if executor_class is None:
        return
    from quire.executor.backends import executor_class_of  # imports torch, as who has the class

    if plan is None or executor_class is not executor_class_of(plan):
        hint = "Give executor_class_of(vllm_config) of quire.executor.backends, or leave it out."
        raise NotBuiltYet("executor_class", executor_class, hint)


def refuse_given(**values: object) -> None:
    """Raise NotBuiltYet for the first that is given."""
    for name, value in values.items():
        if value:
            raise NotBuiltYet(name, value, _LEAVE_OUT)


def check_clients(addresses: object, count: int, index: int) -> None:
    """Raise NotBuiltYet for an engine that several front ends are to share."""
    if addresses is not None:
        raise NotBuiltYet("client_addresses", addresses, _SERVERS)
    if count != 1:
        raise NotBuiltYet("client_count", count, _SERVERS)
    if index != 0:
        raise NotBuiltYet("client_index", index, _SERVERS)


def request_ids(given: object) -> list[str]:
    """Return the ids in an argument that is one id or several. Raises InvalidType."""
    if isinstance(given, str):
        return [given]
    ids: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    for each in ids:
        if not isinstance(each, str):
            raise InvalidType("request_ids", each, "it must be a str, or several of them")
    return ids


def refuse_keywords(given: Mapping[str, object]) -> None:
    """Raise NotBuiltYet for a documented one that is not None, UnknownParameter for others."""
    for name, value in given.items():
        if name not in _OF_REQUESTS:
            raise UnknownParameter(name, "the parameters are those of the signature")
        if value is not None:
            raise NotBuiltYet(name, value, _OF_REQUESTS[name])
