"""Routes that control the engine; they exist only with `--enable-admin`, and always ask for a key.

Parameters of most are in the query, as the field has it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import (
    EngineDeadError,
    EngineError,
    InvalidParameter,
    ProfilerAlreadyActive,
)
from quire.server.context import Server
from quire.server.http.body import T
from quire.server.http.failures import JSON, Refusal

Mode = Literal["abort", "wait", "keep"]


class SleepQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How deep the engine sleeps, and what becomes of running requests."""

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: Mode = "abort"


class WakeQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What is taken back: weights, kv_cache, scheduling; none named: all."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] = []


class PauseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What becomes of running requests and of cached blocks."""

    mode: Mode = "abort"
    clear_cache: bool = True


class ResetQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Whether running requests are preempted for it."""

    reset_running_requests: bool = False
    reset_external: bool = False


class RpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A method that every worker runs."""

    method: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-z][a-z0-9_]*$")]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0)] | None = None


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How many cores, and how long those that go may take to finish (seconds)."""

    new_data_parallel_size: Annotated[int, Meta(ge=1, le=1024)]
    drain_timeout: Annotated[float, Meta(gt=0)] = 120


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The replies' ids of requests to end; None: all."""

    request_ids: list[str] | None = None


class ProfileRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How the files of a trace are named."""

    profile_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None


async def sleep(server: Server, request: Request) -> Response:
    """Give memory back: nothing (0), the KV cache (1), the weights too (2)."""
    query = _query(request, SleepQuery)
    await server.engine.sleep(query.level, query.mode)
    return _reply({"status": "sleeping", "level": query.level})


async def wake_up(server: Server, request: Request) -> Response:
    """Take memory back and go on."""
    query = _query(request, WakeQuery)
    is_awake = await server.engine.wake_up(list(query.tags) or None)
    return _reply({"status": "awake" if is_awake else "sleeping", "tags": query.tags or None})


async def is_sleeping(server: Server, request: Request) -> Response:
    """Whether a sleep is in force."""
    return _reply({"is_sleeping": await server.engine.is_sleeping()})


async def pause(server: Server, request: Request) -> Response:
    """Schedule nothing more; new requests wait."""
    query = _query(request, PauseQuery)
    await server.engine.pause_generation(query.mode, query.clear_cache)
    return _reply({"status": "paused"})


async def resume(server: Server, request: Request) -> Response:
    """Go on after a pause."""
    await server.engine.resume_generation()
    return _reply({"status": "resumed"})


async def is_paused(server: Server, request: Request) -> Response:
    """Whether a pause is in force."""
    return _reply({"is_paused": await server.engine.is_paused()})


async def reset_prefix_cache(server: Server, request: Request) -> Response:
    """Forget cached blocks; not a success while requests use some."""
    query = _query(request, ResetQuery)
    done = await server.engine.reset_prefix_cache(
        query.reset_running_requests, query.reset_external
    )
    return _reply({"success": done})


async def reset_mm_cache(server: Server, request: Request) -> Response:
    """Forget processed media, of which a text model has none."""
    await server.engine.reset_mm_cache()
    return Response()


async def reset_encoder_cache(server: Server, request: Request) -> Response:
    """Forget encoders' outputs, of which a text model has none."""
    await server.engine.reset_encoder_cache()
    return Response()


async def release_kv_cache_memory(server: Server, request: Request) -> Response:
    """Give the KV cache back, while paused."""
    try:
        await server.engine.release_kv_cache_memory()
    except EngineDeadError:
        raise
    except EngineError as error:
        raise Refusal(409, str(error)) from None
    return Response()


async def collective_rpc(server: Server, request: Request) -> Response:
    """Call a method of every worker by its name."""
    body = await server.read(request, RpcRequest)
    try:
        results = await server.engine.collective_rpc(
            body.method, body.timeout, tuple(body.args), body.kwargs
        )
    except TimeoutError:
        raise Refusal(504, "The workers did not answer in time.") from None
    except (TypeError, OverflowError):
        allowed = "they must be values that a worker can be sent"
        raise InvalidParameter("args", [body.args, body.kwargs], allowed) from None
    return _reply({"results": results})


async def abort_requests(server: Server, request: Request) -> Response:
    """End requests by their replies' ids, or all."""
    body = await _optional(server, request, AbortRequest)
    num_aborted = await server.abort_shown(body.request_ids)
    return _reply({"status": "aborted", "aborted": num_aborted})


async def scale_elastic_ep(server: Server, request: Request) -> Response:
    """Have more or fewer data-parallel cores; replies when they serve, or have finished theirs."""
    body = await server.read(request, ScaleRequest)
    try:
        await server.engine.scale_elastic_ep(body.new_data_parallel_size, body.drain_timeout)
    except TimeoutError as error:
        raise Refusal(408, str(error)) from None
    return _reply({"data_parallel_size": body.new_data_parallel_size})


async def start_profile(server: Server, request: Request) -> Response:
    """Begin a trace of the steps."""
    body = await _optional(server, request, ProfileRequest)
    try:
        await server.engine.start_profile(body.profile_prefix)
    except ProfilerAlreadyActive as error:
        raise Refusal(409, str(error), kind="Conflict") from None
    return Response()


async def stop_profile(server: Server, request: Request) -> Response:
    """End the trace, and say where it is."""
    return _reply({"files": [str(file) for file in await server.engine.stop_profile()]})


async def _optional(server: Server, request: Request, type: type[T]) -> T:
    """The body of a request that need not have one."""
    if request.headers.get("content-length", "0") == "0":
        return type()
    return await server.read(request, type)


def _query(request: Request, type: type[T]) -> T:
    """The query of a request as a `type`, a name that is given several times as a list."""
    many = ("tags",)
    params = request.query_params
    given: dict[str, Any] = {n: params.getlist(n) if n in many else params[n] for n in params}
    try:
        return msgspec.convert(given, type, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidParameter("query", str(params)[:80], str(error)) from None


def _reply(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)
