"""Routes that control the engine; they exist only with `--enable-admin`, and always ask for a key.

Most of them serve one verb of engine/control_verbs.py: `_route` makes such a route of the verb, its
parameters, which are in the query, as the field has it, and the reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import NotEncodable, encoded
from quire.engine.async_llm import AsyncLLM
from quire.engine.wire.control_calls import PauseMode
from quire.errors import EngineError, ProfilerAlreadyActive
from quire.server.context import RouteEntry, Server
from quire.server.http.failures import JSON, Refusal
from quire.server.http.json_body import T, json_response, read_query


class SleepQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The sleep level of the engine, and what happens to running requests."""

    level: Annotated[int, Meta(ge=0, le=2)] = 1
    mode: PauseMode = "abort"


class WakeQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Parts to take back: weights, kv_cache, scheduling; none named: all."""

    tags: list[Literal["weights", "kv_cache", "scheduling"]] | None = None


class PauseQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Treatment of running requests and of cached blocks."""

    mode: PauseMode = "abort"
    clear_cache: bool = True


class ResetQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Whether running requests are preempted for it."""

    reset_running_requests: bool = False
    reset_external: bool = False


class RpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A method that every worker runs."""

    # names with an underscore before them are the workers' own
    method: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[a-z][a-z0-9_]*$")]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0)] | None = None


class ScaleRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Number of cores, and the time that those which go may take to finish (seconds)."""

    new_data_parallel_size: Annotated[int, Meta(ge=1, le=1024)]
    drain_timeout: Annotated[float, Meta(gt=0)] = 120


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The replies' ids of requests to end; None: all."""

    request_ids: list[str] | None = None


class ProfileRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Names of the files of a trace."""

    profile_prefix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None


def _route(
    methods: str,
    path: str,
    verb: Callable[..., Any],
    takes: type[msgspec.Struct] | None = None,
    reply: Callable[[Any, Any], dict[str, Any]] | None = None,
    *,
    has_body: bool = False,
    needs_pause: bool = False,
) -> RouteEntry:
    """The route that calls `verb` with the fields of `takes`, in their order.

    They are in the query, or, with `has_body`, in a body that may be left out. `reply` makes the
    reply's body of them and of the verb's answer; None: it is empty. `needs_pause`: an EngineError
    of the verb says that the engine is not paused (409).
    """

    async def handler(server: Server, request: Request) -> Response:
        given = None
        if takes is not None:
            given = (
                await optional_body(server, request, takes) if has_body else _query(request, takes)
            )
        args = () if given is None else msgspec.structs.astuple(given)
        try:
            answer = await verb(server.engine, *args)
        except ProfilerAlreadyActive as error:
            raise Refusal(409, str(error)) from None
        except EngineError as error:
            # the class itself: its subclasses, such as EngineDeadError, have a status of their own
            if needs_pause and type(error) is EngineError:
                raise Refusal(409, str(error)) from None
            raise
        return Response() if reply is None else json_response(reply(given, answer))

    handler.__doc__ = (verb.__doc__ or "").partition("\n\n")[0]
    body, query = (takes, None) if has_body else (None, takes)
    return RouteEntry(methods, path, handler, body, query=query)


async def collective_rpc(server: Server, request: Request) -> Response:
    """Call a method of every worker by its name."""
    body = await server.read(request, RpcRequest)
    try:
        results = await server.engine.collective_rpc(
            body.method, body.timeout, tuple(body.args), body.kwargs
        )
    except TimeoutError:
        raise Refusal(504, "The workers did not answer in time.") from None
    try:
        return Response(encoded(_results_encoder.encode, {"results": results}), media_type=JSON)
    except NotEncodable as error:
        raise EngineError(f"The results cannot be written as JSON: {error}.") from error


def _listed(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise NotEncodable(f"it has a {type(value).__name__}")


_results_encoder = msgspec.json.Encoder(enc_hook=_listed)


async def abort_requests(server: Server, request: Request) -> Response:
    """End requests by their replies' ids, or all."""
    body = await optional_body(server, request, AbortRequest)
    num_aborted = await server.abort_shown(body.request_ids)
    return json_response({"status": "aborted", "aborted": num_aborted})


async def scale_elastic_ep(server: Server, request: Request) -> Response:
    """Have more or fewer data-parallel cores; replies when they serve, or have finished theirs."""
    body = await server.read(request, ScaleRequest)
    try:
        await server.engine.scale_elastic_ep(body.new_data_parallel_size, body.drain_timeout)
    except TimeoutError as error:
        raise Refusal(408, str(error)) from None
    except EngineError as error:
        if type(error) is EngineError:  # paused or asleep
            raise Refusal(409, str(error)) from None
        raise
    size = body.new_data_parallel_size
    message = f"Scaled to {size} data parallel engines"
    return json_response({"message": message, "data_parallel_size": size})


async def optional_body(server: Server, request: Request, type: type[T]) -> T:
    # a body in chunks has no length
    is_chunked = "transfer-encoding" in request.headers
    if request.headers.get("content-length", "0") == "0" and not is_chunked:
        return type()
    return await server.read(request, type)


def _query(request: Request, type: type[T]) -> T:
    """The query of a request as a `type`, a name that is given several times as a list."""
    many = ("tags",)
    params = request.query_params
    given: dict[str, Any] = {n: params.getlist(n) if n in many else params[n] for n in params}
    return read_query(given, type)


ADMIN_ROUTES: tuple[RouteEntry, ...] = (
    _route(
        "POST", "/sleep", AsyncLLM.sleep, SleepQuery,
        lambda query, _: {"status": "sleeping", "level": query.level},
    ),
    _route(
        "POST", "/wake_up", AsyncLLM.wake_up, WakeQuery,
        lambda query, awake: {"status": "awake" if awake else "sleeping", "tags": query.tags},
    ),
    _route("GET", "/is_sleeping", AsyncLLM.is_sleeping, None, lambda _, it: {"is_sleeping": it}),
    _route(
        "POST", "/pause", AsyncLLM.pause_generation, PauseQuery,
        lambda *_: {"status": "paused"},
    ),
    _route("POST", "/resume", AsyncLLM.resume_generation, None, lambda *_: {"status": "resumed"}),
    _route("GET", "/is_paused", AsyncLLM.is_paused, None, lambda _, it: {"is_paused": it}),
    _route(
        "POST", "/reset_prefix_cache", AsyncLLM.reset_prefix_cache, ResetQuery,
        lambda _, done: {"success": done},
    ),
    _route("POST", "/reset_mm_cache", AsyncLLM.reset_mm_cache),
    _route("POST", "/reset_encoder_cache", AsyncLLM.reset_encoder_cache),
    _route(
        "POST", "/release_kv_cache_memory", AsyncLLM.release_kv_cache_memory,
        needs_pause=True,
    ),
    _route("POST", "/start_profile", AsyncLLM.start_profile, ProfileRequest, has_body=True),
    _route("POST", "/stop_profile", AsyncLLM.stop_profile, None, lambda _, files: {"files": files}),
    RouteEntry("POST", "/collective_rpc", collective_rpc, RpcRequest),
    RouteEntry("POST", "/abort_requests", abort_requests, AbortRequest),
    RouteEntry("POST", "/scale_elastic_ep", scale_elastic_ep, ScaleRequest),
    _route(
        "POST", "/is_scaling_elastic_ep", AsyncLLM.is_scaling_elastic_ep, None,
        lambda _, it: {"is_scaling_elastic_ep": it},
    ),
)  # fmt: skip
