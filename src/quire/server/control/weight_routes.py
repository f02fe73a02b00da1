"""Routes of trainers that send an engine new weights."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.errors import InvalidParameter, LoadError, NotBuiltYet, WeightUpdateError
from quire.server.admin import optional_body
from quire.server.context import RouteEntry, Server
from quire.server.http.failures import Refusal
from quire.server.http.json_body import json_response


class InitTransfer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The backend's facts for meeting a trainer."""

    init_info: dict[str, Any] = {}


class StartUpdate(msgspec.Struct, kw_only=True):
    """The start of an update; fields of other releases change nothing."""

    is_checkpoint_format: bool = True


class UpdateWeights(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tensors that come now: for all workers, or a list with an entry for each."""

    update_info: dict[str, Any] | list[dict[str, Any]]


class FinishUpdate(msgspec.Struct, kw_only=True):
    """The name of the new weights; None: that of before."""

    weight_version: str | None = None


class NewVersion(msgspec.Struct, kw_only=True):
    """A name for the weights."""

    new_version: str


class WeightCheck(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether to give the checksums, or to compare them with earlier ones."""

    action: Literal["checksum", "compare", "reset"]
    baseline: dict[str, str] | None = None


class WorldQuery(msgspec.Struct, kw_only=True):
    """Whether the workers of all cores count."""

    include_dp: bool = True


async def init_weight_transfer_engine(server: Server, request: Request) -> Response:
    """Have the workers meet a trainer."""
    body = await server.read(request, InitTransfer)
    await _done(server.engine.init_weight_transfer_engine({"init_info": body.init_info}))
    return _said("Weight transfer initialized")


async def shutdown_weight_transfer_engine(server: Server, request: Request) -> Response:
    """Have the workers leave the trainer."""
    await _done(server.engine.shutdown_weight_transfer_engine())
    return _said("Weight transfer shut down")


async def start_weight_update(server: Server, request: Request) -> Response:
    """Begin an update; requests wait until it has ended."""
    body = await optional_body(server, request, StartUpdate)
    await _done(server.engine.start_weight_update(body.is_checkpoint_format))
    return _said("Weight update started")


async def start_draft_weight_update(server: Server, request: Request) -> Response:
    """Begin an update of the network that drafts; requests wait until it has ended."""
    await _done(server.engine.start_draft_weight_update())
    return _said("Draft weight update started")


async def update_weights(server: Server, request: Request) -> Response:
    """Receive some of the weights; the trainer sends them meanwhile."""
    body = await server.read(request, UpdateWeights)
    await _done(server.engine.update_weights({"update_info": body.update_info}))
    return _said("Weights updated")


async def finish_weight_update(server: Server, request: Request) -> Response:
    """End an update; requests go on with the new weights."""
    body = await optional_body(server, request, FinishUpdate)
    await _done(server.engine.finish_weight_update(body.weight_version))
    return _said("Weight update finished")


async def update_weight_version(server: Server, request: Request) -> Response:
    """Name the weights."""
    body = await server.read(request, NewVersion)
    await server.engine.update_weight_version(body.new_version)
    text = f"Weight version updated to {body.new_version}"
    return json_response({"success": True, "message": text, "new_version": body.new_version})


async def weight_info(server: Server, request: Request) -> Response:
    """The version of the weights."""
    version = await _done(server.engine.get_weight_version())
    return json_response({"weight_version": version})


async def weight_checker(server: Server, request: Request) -> Response:
    """The checksums of the weights, or whether they are those of `baseline`."""
    body = await server.read(request, WeightCheck)
    if body.action == "reset":
        hint = "Send weights of zeros in an update."
        raise NotBuiltYet("action", body.action, hint)
    baseline = {} if body.action == "checksum" else body.baseline
    if baseline is None:
        raise InvalidParameter("baseline", None, "checksums to compare with, of an earlier reply")
    checksums = await server.engine.compute_weight_checksums()
    if body.action == "checksum":
        return json_response({"checksums": checksums})
    names = sorted(checksums.keys() | baseline.keys())
    others = [name for name in names if checksums.get(name) != baseline.get(name)]
    return json_response({"match": not others, "mismatches": others})


async def get_world_size(server: Server, request: Request) -> Response:
    """The number of workers that a trainer sends to."""
    include_dp = request.query_params.get("include_dp", "true").lower() not in ("false", "0")
    plan = server.engine.vllm_config
    assert plan is not None, "engines for serving are made from plans"
    parallel = plan.parallel
    size = parallel.mesh.world_size
    if include_dp:
        size *= parallel.mesh.dp
    return json_response({"world_size": size})


async def _done(call: Any) -> Any:
    """Result of a call; an update that is not possible now, or does not fit, as a reply."""
    try:
        return await call
    # 409: the state forbids it, 400: the tensors themselves are wrong
    except WeightUpdateError as error:
        raise Refusal(409, str(error)) from None
    except LoadError as error:
        raise Refusal(400, str(error)) from None


def _said(text: str) -> Response:
    return json_response({"message": text})


WEIGHT_ROUTES: tuple[RouteEntry, ...] = (
    RouteEntry("POST", "/init_weight_transfer_engine", init_weight_transfer_engine, InitTransfer),
    RouteEntry("POST", "/shutdown_weight_transfer_engine", shutdown_weight_transfer_engine),
    RouteEntry("POST", "/start_weight_update", start_weight_update, StartUpdate),
    RouteEntry("POST", "/start_draft_weight_update", start_draft_weight_update),
    RouteEntry("POST", "/update_weights", update_weights, UpdateWeights),
    RouteEntry("POST", "/finish_weight_update", finish_weight_update, FinishUpdate),
    RouteEntry("POST", "/update_weight_version", update_weight_version, NewVersion),
    RouteEntry("GET", "/weight_info", weight_info),
    RouteEntry("POST", "/weight_checker", weight_checker, WeightCheck),
    RouteEntry("GET", "/get_world_size", get_world_size, query=WorldQuery),
)
