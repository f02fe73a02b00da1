"""Routes about the server itself: alive, ready, load, version, metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.observability.prometheus import exposition, registry_of
from quire.release import __version__
from quire.server.context import Server
from quire.server.http.failures import Refusal, error_response
from quire.server.http.json_body import json_response

_LOADING = Refusal(503, "The model is being loaded.", headers={"Retry-After": "1"})
_UNINSTRUCTED = Refusal(
    501,
    "Engines take no instructions after a failure: cores and ranks that have died or hang are "
    "started anew, and streams go on (max_core_restarts).",
)


async def health(server: Server, request: Request) -> Response:
    """200 while the engine is alive."""
    if server.engine.is_loading:
        return error_response(_LOADING)
    if server.engine.is_alive():
        return Response()
    return error_response(Refusal(503, "The engine is dead or does not answer."))


async def ready(server: Server, request: Request) -> Response:
    """200 while requests are accepted and make progress; else a load balancer should send none."""
    if server.in_flight.is_draining:
        refusal = Refusal(503, "The server is shutting down.", headers={"Retry-After": "1"})
        return error_response(refusal)
    if server.engine.is_loading:
        return error_response(_LOADING)
    if server.engine.is_ready():
        return Response()
    return error_response(Refusal(503, "The engine makes no progress."))


async def version(server: Server, request: Request) -> Response:
    """Answers with the release."""
    return json_response({"version": __version__})


async def load(server: Server, request: Request) -> Response:
    """Answers with the number of requests in progress."""
    count = {"server_load": server.in_flight.num_everywhere}
    return json_response(count)


async def server_info(server: Server, request: Request) -> Response:
    """The engine's plan, each value with its reason."""
    plan = server.engine.vllm_config
    decided = {
        name: {"value": _plain(value), "reason": plan.reasons[name]}
        for name, value in plan.decided()
    }
    info: dict[str, Any] = {"version": __version__, "plan": decided}
    if request.query_params.get("config_format") == "json":
        info["vllm_config"] = _by_their_names(plan)
    return json_response(info)


def _by_their_names(plan: Any) -> dict[str, Any]:
    """The facts that trainers look up, under the names that vLLM has for them."""

    def of(view: Any, *names: str) -> dict[str, Any] | None:
        return None if view is None else {name: _plain(getattr(view, name)) for name in names}

    sizes = [f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data")]
    facts = "model", "dtype", "max_model_len", "logprobs_mode", "max_logprobs"
    return {
        "model_config": of(plan.model_config, *facts),
        "parallel_config": of(plan.parallel_config, *sizes),
        "lora_config": of(plan.lora_config, "max_lora_rank", "max_loras"),
        "weight_transfer_config": of(plan.parallel.weight_transfer, "backend"),
    }


def _plain(value: object) -> object:
    """A value of the plan as JSON; the text of a value that JSON does not have."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    is_plain = value is None or isinstance(value, bool | int | float | str | dict | list)
    return value if is_plain else str(value)


async def metrics(server: Server, request: Request) -> Response:
    """The engine's statistics in the text format of Prometheus."""
    # counters of cores come with their outputs, and an idle core sends none
    await server.engine.refresh_metrics()
    registry = registry_of(server.engine.metrics_collector(server.metrics_prefix))
    text, kind = exposition(registry)
    return Response(text, headers={"Content-Type": kind})


async def unserved(server: Server, request: Request) -> Response:
    """Refuse the request: no model for audio is served."""
    return error_response(server.abilities.refusal("API at this path"))


async def uninstructed(server: Server, request: Request) -> Response:
    """Refuse the request: no engine waits for an instruction after a failure."""
    return error_response(_UNINSTRUCTED)
