"""Decides where K/V is kept outside of the pool, by `kv_offloading_size` or `kv_transfer_config`,
and where events tell what is kept, by `kv_events_config`.

What stands in those options for other engines and is not built is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.config.kv_pool_size import gib
from quire.config.resolve.decisions import Decisions
from quire.config.resolve.mapping import refuse_files_of_plugin
from quire.environment import expanded
from quire.errors import InvalidParameter, NotBuiltYet
from quire.models.layer_memory import KeyValues
from quire.tiers.kv_events_config import NAME as EVENTS_NAME
from quire.tiers.kv_events_config import kv_events_plan
from quire.tiers.kv_transfer_config import NAME, POLICIES, tier_settings
from quire.tiers.mac_key import read_mac_key
from quire.tiers.plan import DiskTierPlan, KVTierPlan

_EXTRA = "kv_connector_extra_config"
_OFFLOADING, _SIMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector"
_HINT = f"Use {_OFFLOADING}, which keeps K/V in host memory and in a folder."
_GIB = 1 << 30
_DISK_BYTES = 100 * _GIB
_THREADS = 2
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "kv_role": (("kv_both",), "What is computed is stored, and what is stored is loaded."),
    "kv_buffer_device": ((None, "cpu", "cuda"), "Leave it out."),
    "enable_permute_local_kv": ((False,), "Leave it out."),
    "kv_port": ((14579,), "Nothing listens: leave it out."),
    "kv_connector_module_path": ((None,), f"Connectors of one's own are not built. {_HINT}"),
}
"""Fields of the option -> the values that are taken, and what to do instead of others."""

_NEUTRAL_EXTRA: dict[str, dict[str, tuple[tuple[object, ...], str]]] = {
    _OFFLOADING: {
        "eviction_policy": (("lru",), "The least recently used block makes room."),
        "blocks_per_chunk": ((1,), "Blocks are kept as they are in the pool."),
        "block_size": ((None,), "Blocks are kept as they are in the pool."),
        "offload_prompt_only": ((False,), "Blocks of outputs are kept, too: give False."),
        "self_describing_kv_events": ((False,), "Leave it out."),
        "canonical_layout": ((False,), "Blocks are kept as they are in the pool."),
    },
    _SIMPLE: {
        "lazy_offload": ((False,), "Blocks are kept as soon as they are full."),
        "disk_buffer_slots": ((2,), "Leave it out."),
        "use_page_cache": ((True,), "Files go through the page cache."),
    },
}
_NEUTRAL_TIER: dict[str, tuple[tuple[object, ...], str]] = {
    "locality": ((None, "LOCAL"), "The folder is this machine's."),
}


def decide_kv_tier(d: Decisions) -> None:
    """Fix `kv_tier`: None, or a plan. Raises InvalidParameter or NotBuiltYet."""
    plan, name, value = _wish(d)
    if plan is None:
        d.decide("kv_tier", None, "neither kv_offloading_size nor kv_transfer_config asks for it")
        return
    _check_model(d, name, value)
    # files outlive the engine, and their names have to say which weights made them
    if plan.disk is not None:
        refuse_files_of_plugin(d, name, value, "Keep K/V in host memory alone.")
    where = f"{gib(plan.host_bytes)} of host memory"
    if plan.disk is not None:
        where += f", and files of at most {gib(plan.disk.max_bytes)}"
    d.decide("kv_tier", plan, f"{name}: {where}")


def decide_kv_events(d: Decisions) -> None:
    """Fix `kv_events`: None, or a plan. Raises InvalidParameter or NotBuiltYet."""
    given = d.args.kv_events_config
    plan = kv_events_plan(given)
    if plan is None:
        why = "kv_events_config " + ("does not enable them" if given else "was not given")
        d.decide("kv_events", None, why)
        return
    if not d.value("enable_prefix_caching"):
        allowed = "events tell what is in the prefix cache, which is off"
        raise InvalidParameter(EVENTS_NAME, given, allowed, "Leave one of them out.")
    d.decide("kv_events", plan, f"kv_events_config: published at {plan.config.endpoint}")


def _wish(d: Decisions) -> tuple[KVTierPlan | None, str, object]:
    """The plan that is asked for, the option that asks, and its value."""
    size, given = d.args.kv_offloading_size, tier_settings(d.args.kv_transfer_config)
    backend = d.args.kv_offloading_backend
    if backend != "native":
        hint = "Use 'native', or leave it out."
        raise NotBuiltYet("kv_offloading_backend", backend, hint)
    if given is None:
        if not size:
            return None, "", None
        return KVTierPlan(int(size * _GIB)), "kv_offloading_size", size
    if size:
        raise InvalidParameter("kv_offloading_size", size, f"{NAME} says it", "Give one of them.")
    return _connected(given), NAME, given


def _connected(given: Mapping[str, Any]) -> KVTierPlan:
    left = dict(given)
    name = left.pop("kv_connector", None)
    if name is None:
        raise InvalidParameter(NAME, given, f"it names a kv_connector, such as {_OFFLOADING}")
    if name not in _NEUTRAL_EXTRA:
        raise NotBuiltYet(f"{NAME}['kv_connector']", name, _HINT)
    if left.get("kv_role") is None:
        raise InvalidParameter(f"{NAME}['kv_role']", None, "kv_both, with a connector")
    engine_id = left.pop("engine_id", None)
    if engine_id is not None and not isinstance(engine_id, str):
        raise InvalidParameter(f"{NAME}['engine_id']", engine_id, "a text")
    policy = left.pop("kv_load_failure_policy", None)
    if policy not in (None, *POLICIES):
        raise InvalidParameter(f"{NAME}['kv_load_failure_policy']", policy, ", ".join(POLICIES))
    extra = _mapping(f"{NAME}[{_EXTRA!r}]", left.pop(_EXTRA, None) or {})
    _check_neutral(NAME, left, _NEUTRAL)
    _none_left(NAME, left)
    where = f"{NAME}[{_EXTRA!r}]"
    _check_neutral(where, extra, _NEUTRAL_EXTRA[name])
    plan = _offloading(where, extra) if name == _OFFLOADING else _simple(where, extra)
    _none_left(where, extra)
    return msgspec.structs.replace(plan, fails=policy == "fail")


def _offloading(where: str, extra: dict[str, Any]) -> KVTierPlan:
    # each field is popped as it is read, so that what is left at the end is unknown
    host_bytes = _number(where, extra, "cpu_bytes_to_use", None, least=1)
    threshold = _number(where, extra, "store_threshold", 1, least=0)
    tracked = _number(where, extra, "max_tracker_size", 64_000, least=1)
    spec = extra.pop("spec_name", None)
    tiers = extra.pop("secondary_tiers", None) or []
    if spec not in (None, "CPUOffloadingSpec", "TieringOffloadingSpec"):
        hint = "Use CPUOffloadingSpec, or TieringOffloadingSpec with secondary_tiers."
        raise NotBuiltYet(f"{where}['spec_name']", spec, hint)
    if tiers and spec == "CPUOffloadingSpec":
        allowed = "secondary_tiers go with TieringOffloadingSpec"
        raise InvalidParameter(f"{where}['spec_name']", spec, allowed)
    at = f"{where}['secondary_tiers']"
    if not isinstance(tiers, list | tuple):
        raise InvalidParameter(at, tiers, "a list")
    if len(tiers) > 1:
        raise NotBuiltYet(at, tiers, "Give one, of type fs.")
    disk = _folder_tier(at, _mapping(at, tiers[0])) if tiers else None
    return KVTierPlan(host_bytes, disk, max(1, threshold), tracked)


def _folder_tier(where: str, tier: dict[str, Any]) -> DiskTierPlan:
    kind = tier.pop("type", None)
    if kind != "fs":
        raise NotBuiltYet(f"{where}['type']", kind, "Use 'fs', a folder.")
    _check_neutral(where, tier, _NEUTRAL_TIER)
    publishes = tier.pop("enable_kv_events", False)
    if not isinstance(publishes, bool):
        raise InvalidParameter(f"{where}['enable_kv_events']", publishes, "true or false")
    plan = DiskTierPlan(
        _folder(where, tier, "root_dir"),
        _number(where, tier, "capacity_bytes", _DISK_BYTES, least=1),
        _number(where, tier, "n_read_threads", _THREADS, least=1),
        _number(where, tier, "n_write_threads", _THREADS, least=1),
        publishes,
        _key_file(where, tier),
    )
    _none_left(where, tier)
    return plan


def _key_file(where: str, tier: dict[str, Any]) -> str | None:
    """A file with a key, which can be used. Raises InvalidParameter."""
    if tier.get("mac_key_file") is None:
        tier.pop("mac_key_file", None)
        return None
    path = _folder(where, tier, "mac_key_file")
    read_mac_key(f"{where}['mac_key_file']", Path(path))
    return path


def _simple(where: str, extra: dict[str, Any]) -> KVTierPlan:
    names = [n for n in ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank") if n in extra]
    if len(names) == 2:
        raise InvalidParameter(where, extra, f"{names[0]} or {names[1]}, not both")
    name = names[0] if names else "cpu_bytes_to_use"
    host_bytes = _number(where, extra, name, None, least=1)
    kind = extra.pop("kv_offload_backend", "cpu")
    if kind not in ("cpu", "disk"):
        raise InvalidParameter(f"{where}['kv_offload_backend']", kind, "cpu or disk")
    if kind == "cpu":
        return KVTierPlan(host_bytes)
    folder = _folder(where, extra, "disk_path")
    most = _number(where, extra, "disk_capacity_bytes", _DISK_BYTES, least=1)
    return KVTierPlan(host_bytes, DiskTierPlan(folder, most, _THREADS, _THREADS))


def _mapping(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidParameter(where, value, "a dict")
    return dict(value)


def _number(
    where: str, extra: dict[str, Any], name: str, default: int | None, *, least: int
) -> int:
    value = extra.pop(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as JSON has 1e9
    if type(value) is not int or value < least:
        raise InvalidParameter(f"{where}[{name!r}]", value, f"a whole number of at least {least}")
    return value


def _folder(where: str, extra: dict[str, Any], name: str) -> str:
    folder = extra.pop(name, None)
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise InvalidParameter(f"{where}[{name!r}]", folder, "a folder")
    return str(expanded(os.fspath(folder)).absolute())


def _check_neutral(
    where: str, left: dict[str, Any], neutral: Mapping[str, tuple[tuple[object, ...], str]]
) -> None:
    """Take away the fields that have a value at which they change nothing."""
    for name, (values, hint) in neutral.items():
        if name in left and (value := left.pop(name)) not in values:
            raise NotBuiltYet(f"{where}[{name!r}]", value, hint)


def _none_left(where: str, left: Mapping[str, Any]) -> None:
    for name, value in left.items():
        hint = "Leave it out."
        raise InvalidParameter(f"{where}[{name!r}]", value, "there is no such field", hint)


def _check_model(d: Decisions, name: str, value: object) -> None:
    """Raise for a model or an engine that has no blocks that can be found again."""
    memories = d.model.pool_memories
    if not d.value("enable_prefix_caching"):
        raise InvalidParameter(name, value, "it goes with prefix caching", "Leave one of them out.")
    if any(isinstance(memory, KeyValues) and memory.source is not None for memory in memories):
        hint = f"{d.model.architecture} attends to a second content, whose K/V stays in the pool."
        raise NotBuiltYet(name, value, f"{hint} Leave it out.")
    if d.value("distributed_executor_backend") not in ("uni", "mp"):
        hint = "K/V of ranks that a launcher or Ray has started stays in their pools: leave it out."
        raise NotBuiltYet(name, value, hint)
    if all(memory is None for memory in memories):
        allowed = "the model keeps no keys and values of a request"
        raise InvalidParameter(name, value, allowed, "Leave it out.")
