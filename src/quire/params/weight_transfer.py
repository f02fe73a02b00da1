"""Requests of trainers that send new weights to an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from quire.errors import InvalidParameter, InvalidType, NotBuiltYet
from quire.plugins.tables import WEIGHT_TRANSFERS

BACKENDS = ("nccl", "ipc", "sparse_nccl")
"""The ways that weights can come; others are registered by plugins."""
UNBUILT_BACKENDS = ("sharded_rdt", "nccl_m2n", "modelexpress")
NAME = "weight_transfer_config"


class WeightTransferPlan(msgspec.Struct, frozen=True):
    """Transfer of a trainer's weights to the workers of the core of this number. `snapshots`:
    updated weights are kept in files, for a core that restarts.
    """

    backend: str
    core: int = 0
    snapshots: bool = False


@dataclass
class WeightTransferInitRequest:
    """Connects workers with a trainer; `init_info` has what the engine's backend needs."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """Some of the new weights; `update_info` says what comes, or is a list with the information for
    each worker of all cores.
    """

    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)


def init_info_of(request: object) -> dict[str, Any]:
    """The information of a request, or of a mapping with its field. Raises InvalidType."""
    info = _field(request, "init_info", WeightTransferInitRequest)
    if not isinstance(info, dict):
        raise InvalidType("init_info", info, "it must be a dict")
    return info


def update_info_of(request: object) -> dict[str, Any] | list[dict[str, Any]]:
    """The information of a request, or of a mapping with its field. Raises InvalidType."""
    info = _field(request, "update_info", WeightTransferUpdateRequest)
    each = info if isinstance(info, list) else [info]
    if not all(isinstance(one, dict) for one in each):
        raise InvalidType("update_info", info, "it must be a dict, or a list of dicts")
    return info  # type: ignore[no-any-return]


def _field(request: object, name: str, kind: type) -> Any:
    if isinstance(request, Mapping):
        # an unknown field would be a wish that nobody reads
        if list(request) != [name]:
            raise InvalidType("request", request, f"it must be a dict with {name} alone")
        return request[name]
    if not hasattr(request, name):
        raise InvalidType("request", request, f"it must be a {kind.__name__} or a dict with {name}")
    return getattr(request, name)


def weight_transfer_plan(given: dict[str, Any] | None) -> WeightTransferPlan | None:
    """The plan; None: no trainer sends weights. Raises InvalidParameter or NotBuiltYet."""
    if given is None:
        return None
    for name in given:
        if name not in ("backend", "snapshots"):
            allowed = "there is no such field; its fields are backend and snapshots"
            raise InvalidParameter(f"{NAME}[{name!r}]", given[name], allowed)
    backend = given.get("backend", BACKENDS[0])
    if backend in UNBUILT_BACKENDS:
        raise NotBuiltYet(f"{NAME}['backend']", backend, f"Use one of {', '.join(BACKENDS)}.")
    if backend not in BACKENDS and backend not in WEIGHT_TRANSFERS:
        known = ", ".join([*BACKENDS, *WEIGHT_TRANSFERS])
        hint = "A plugin registers others: quire.plugins.tables.WEIGHT_TRANSFERS."
        raise InvalidParameter(f"{NAME}['backend']", backend, f"the backends are {known}", hint)
    snapshots = given.get("snapshots", False)
    if not isinstance(snapshots, bool):
        raise InvalidType(f"{NAME}['snapshots']", snapshots, "it must be True or False")
    return WeightTransferPlan(str(backend), snapshots=snapshots)


def require_checkpoint_format(value: bool) -> None:
    """Raise NotBuiltYet for tensors that are not those of a checkpoint."""
    if value is not True:
        hint = (
            "Tensors of vLLM's fused and packed modules fit no weight of this engine, which packs "
            "its own: name and store them as the model's checkpoint does, and leave it True."
        )
        raise NotBuiltYet("is_checkpoint_format", value, hint)


FileFormat = Literal["auto", "safetensors", "pt", "mistral", "runai_streamer"]
"""A load format of files of tensors by their names."""
FILE_FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)


def config_changes(overrides: object) -> tuple[FileFormat, Path | None]:
    """The load format and the folder, None for the present one, that `update_config` is told.
    Raises InvalidParameter for other changes, NotBuiltYet for formats that are not files of
    tensors by their names.
    """
    known = {"load_config": "load_format", "model_config": "model"}
    found: dict[str, str] = {}
    for part, changes in overrides.items() if isinstance(overrides, Mapping) else [(None, None)]:
        if part not in known or not isinstance(changes, Mapping) or list(changes) != [known[part]]:
            allowed = "a dict of load_config with load_format, and of model_config with model"
            raise InvalidParameter("overrides", overrides, allowed)
        value = changes[known[part]]
        if not isinstance(value, str | Path):
            raise InvalidType(known[part], value, "it must be a string")
        found[known[part]] = str(value)
    given = found.get("load_format", "auto").lower()
    chosen: list[FileFormat] = [each for each in FILE_FORMATS if each == given]
    if given != "hf" and not chosen:
        hint = f"reload_weights reads {', '.join(FILE_FORMATS)}; others are for the start."
        raise NotBuiltYet("load_format", given, hint)
    folder = Path(found["model"]) if "model" in found else None
    return chosen[0] if chosen else "auto", folder


def mixture_text(reason: str) -> str:
    """The sentence of an engine whose weights are a mixture."""
    return (
        "The engine answers no request, because its weights are a mixture of two versions: an "
        f"update ended before it was complete ({reason.rstrip('.')}). Send all weights in one "
        "update, or reload them."
    )


def versions_text(reason: str) -> str:
    """The sentence of an engine whose cores may have different weights."""
    return (
        "The engine answers no request, because its cores may have weights of two versions: an "
        f"update ended before it was complete on all of them ({reason.rstrip('.')}). Send all "
        "weights in one update, or reload them."
    )
