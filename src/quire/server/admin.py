"""Routes that control the engine; they exist only with `--enable-admin`, and always ask for a key.

Most of them serve one verb of engine/control_verbs.py: `_serve` names the verb, the parameters,
which are in the query, as the field has it, and the reply.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.async_llm import AsyncLLM
from quire.engine.wire.control_calls import PauseMode
from quire.errors import EngineError, InvalidParameter, ProfilerAlreadyActive
from quire.server.context import Server
from quire.server.http.body import T
from quire.server.http.failures import JSON, Refusal


class SleepQuery(msgspec.Struct, forbid_unknown_fields=True):
    """How deep the engine sleeps, and what becomes of running requests."""

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: PauseMode = "abort"


class WakeQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What is taken back: weights, kv_cache, scheduling; none named: all."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class PauseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """What becomes of running requests and of cached blocks."""

    mode: PauseMode = "abort"
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


def _serve(
    verb: Callable[..., Any],
    takes: type[msgspec.Struct] | None = None,
    reply: Callable[[Any, Any], dict[str, Any]] | None = None,
    *,
    has_body: bool = False,
    needs_pause: bool = False,
) -> Callable[[Server, Request], Awaitable[Response]]:
    """The handler that calls `verb` with the fields of `takes`, in their order.

    They are in the query, or, with `has_body`, in a body that may be left out. `reply` makes the
    answer's body of them and of what the verb gave; None: it is empty. `needs_pause`: an
    EngineError of the verb says that the engine is not paused (409).
    """

    async def handler(server: Server, request: Request) -> Response:
        given = None
        if takes is not None:
            given = await _optional(server, request, takes) if has_body else _query(request, takes)
        args = () if given is None else msgspec.structs.astuple(given)
        try:
            answer = await verb(server.engine, *args)
        except ProfilerAlreadyActive as error:
            raise Refusal(409, str(error), kind="Conflict") from None
        except EngineError as error:
            if needs_pause and type(error) is EngineError:
                raise Refusal(409, str(error)) from None
            raise
        return Response() if reply is None else _reply(reply(given, answer))

    handler.__name__ = verb.__name__
    handler.__doc__ = (verb.__doc__ or "").partition("\n\n")[0]
    return handler


sleep = _serve(
    AsyncLLM.sleep, SleepQuery, lambda query, _: {"status": "sleeping", "level": query.level}
)
wake_up = _serve(
    AsyncLLM.wake_up,
    WakeQuery,
    lambda query, is_awake: {"status": "awake" if is_awake else "sleeping", "tags": query.tags},
)
is_sleeping = _serve(AsyncLLM.is_sleeping, None, lambda _, answer: {"is_sleeping": answer})
pause = _serve(AsyncLLM.pause_generation, PauseQuery, lambda *_: {"status": "paused"})
resume = _serve(AsyncLLM.resume_generation, None, lambda *_: {"status": "resumed"})
is_paused = _serve(AsyncLLM.is_paused, None, lambda _, answer: {"is_paused": answer})
reset_prefix_cache = _serve(
    AsyncLLM.reset_prefix_cache, ResetQuery, lambda _, answer: {"success": answer}
)
reset_mm_cache = _serve(AsyncLLM.reset_mm_cache)
reset_encoder_cache = _serve(AsyncLLM.reset_encoder_cache)
release_kv_cache_memory = _serve(AsyncLLM.release_kv_cache_memory, needs_pause=True)
start_profile = _serve(AsyncLLM.start_profile, ProfileRequest, has_body=True)
stop_profile = _serve(AsyncLLM.stop_profile, None, lambda _, files: {"files": files})


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
