"""Requests that a program gives straight to a core, or to its client, without a front end."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec

from quire.engine.wire.declared_types import check_message
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.errors import InvalidParameter, InvalidType
from quire.params import RequestParams, SamplingParams

FIRST_HANDLE = 1 << 62
"""The handles of direct requests count from here: no front end has so high an index."""

SEED_MASK = 2**64 - 1


class DirectRequests:
    """Gives each such request a handle of its own, and its outputs its name.

    It is asked for requests without a handle alone: those of front ends have one already.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self._next_handle = FIRST_HANDLE

    def take(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """The request with a handle. Raises InvalidType for a direct one with a field that has a
        value of another type than its own, InvalidParameter for what only a front end does.
        """
        check_message(request)
        _check_params(request.params)
        own = msgspec.structs.replace(
            request, handle=self._next_handle, seed=request.seed or _seed_of(request)
        )
        self._next_handle += 1
        self.names[own.handle] = request.request_id or str(own.handle)
        return own

    def handles_of(self, ids: Sequence[int | str]) -> Sequence[int]:
        """The handles that are meant, or named. Raises InvalidType for anything else."""
        if {int}.issuperset(map(type, ids)):
            return ids  # type: ignore[return-value]
        found: list[int] = []
        for each in ids:
            if isinstance(each, str):
                found += [handle for handle, name in self.names.items() if name == each]
            elif type(each) is int:
                found.append(each)
            else:
                raise InvalidType("request_ids", each, "it must be a str or a handle")
        return found

    def drop(self, handles: Sequence[int]) -> None:
        """Forget aborted requests, which have no last output."""
        if self.names:
            for handle in handles:
                self.names.pop(handle, None)

    def name(self, outputs: EngineCoreOutputs) -> None:
        known = self.names
        found = {handle: known[handle] for handle in outputs.handles if handle in known}
        for end in outputs.finished:
            if end.handle in known:
                found[end.handle] = known.pop(end.handle)
        outputs.names |= found


def _check_params(params: RequestParams) -> None:
    if not isinstance(params, SamplingParams):
        return
    hint = "Give the request to the engine, in place of a prompt."
    if params.n > 1:
        raise InvalidParameter("n", params.n, "a core makes one completion of a request", hint)
    if params.max_tokens is None:
        raise InvalidParameter("max_tokens", None, "a core needs a number", hint)


def _seed_of(request: EngineCoreRequest) -> int:
    """The seed that the parameters have; without any a random one."""
    params = request.params
    if isinstance(params, SamplingParams) and params.seed is not None:
        return params.seed & SEED_MASK
    return secrets.randbits(64)
