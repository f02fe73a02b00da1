"""Settings of connectors of K/V: the fields of `kv_transfer_config`, checked.

Connectors that keep K/V on this machine are the tier's concern (config/resolve/kv_tier.py). The
others are classes, of Quire or of one's own; several may be used together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.errors import InvalidParameter, NotBuiltYet
from quire.plugins.tables import KV_CONNECTORS, home_of

NAME = "kv_transfer_config"
EXTRA = "kv_connector_extra_config"
HIDDEN_STATES = "ExampleHiddenStatesConnector"
OFFLOADING, SIMPLE, MULTI = "OffloadingConnector", "SimpleCPUOffloadConnector", "MultiConnector"
TIERS = (OFFLOADING, SIMPLE)
PEER_TIER = "p2p"
_HOME = "quire.distributed.kv_connector"
OWN = {
    "ExampleConnector": (f"{_HOME}.example", "ExampleConnector"),
    "SharedStorageConnector": (f"{_HOME}.example", "ExampleConnector"),
    "NixlConnector": (f"{_HOME}.peer_connector", "NixlConnector"),
    "NixlPullConnector": (f"{_HOME}.peer_connector", "NixlConnector"),
    PEER_TIER: (f"{_HOME}.peer_connector", "PeerTier"),
}
"""Quire's classes: names -> module and class."""
_UNBUILT = {
    "NixlPushConnector": "K/V is pulled, not pushed: use NixlConnector.",
    "LMCacheConnectorV1": "Give the class of the package with kv_connector_module_path.",
    "LMCacheMPConnector": "Give the class of the package with kv_connector_module_path.",
    **dict.fromkeys(
        ("MooncakeConnector", "MooncakeStoreConnector", "MoRIIOConnector", "FlexKVConnectorV1")
        + ("HF3FSKVConnector", "HiSparseConnector", "DecodeBenchConnector"),
        "Use NixlConnector between engines, OffloadingConnector for memory and folders.",
    ),
}
POLICY = "kv_load_failure_policy"
_INNER = ("children", "rank", "tp_size", "pp_size", "worker")
"""Fields that are not the option's."""
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("recompute", "fail")
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "kv_buffer_device": ((None, "cpu", "cuda"), "Leave it out."),
    "enable_permute_local_kv": ((False,), "Leave it out."),
    "kv_port": ((14579,), "Ports are in kv_connector_extra_config."),
}


class KVTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A connector and its role. `kv_connector_module_path`: the module of its class.
    `kv_load_failure_policy`: whether a request whose load has failed is computed or ends.
    """

    kv_connector: str
    kv_role: str
    kv_connector_extra_config: dict[str, Any] = {}
    kv_connector_module_path: str = ""
    kv_load_failure_policy: str = "recompute"
    engine_id: str = ""
    children: tuple[KVTransferConfig, ...] = ()
    """The connectors of a `MultiConnector`, but for those of the tier."""
    rank: int = 0
    """The number of the core among its data-parallel ones."""
    tp_size: int = 1
    pp_size: int = 1
    worker: int = 0
    """The number of the worker among those of its core."""

    def of_rank(self, rank: int) -> KVTransferConfig:
        """The settings of a core."""
        children = tuple(child.of_rank(rank) for child in self.children)
        return msgspec.structs.replace(self, rank=rank, children=children)

    @property
    def num_workers(self) -> int:
        """The workers of a core."""
        return self.tp_size * self.pp_size

    @property
    def is_kv_producer(self) -> bool:
        """Whether K/V is sent or saved."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def is_kv_consumer(self) -> bool:
        """Whether K/V is loaded."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def is_kv_transfer_instance(self) -> bool:
        """Always True: there is a connector."""
        return True

    def has_connector(self, name: str) -> bool:
        """Whether this is that connector, or one of several is."""
        return self.kv_connector == name or any(each.has_connector(name) for each in self.children)

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """A setting of the connector's own."""
        return self.kv_connector_extra_config.get(key, default)


def tier_settings(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The part of `kv_transfer_config` that is about memory and folders of this machine; None:
    there is none. Raises InvalidParameter or NotBuiltYet.
    """
    if not given:
        return None
    name = given.get("kv_connector")
    if name in TIERS and not given.get("kv_connector_module_path"):
        return _without_peers(given)[0]
    if name == MULTI:
        found = [child for child in _children(given) if child.get("kv_connector") in TIERS]
        if len(found) > 1:
            raise NotBuiltYet(f"{NAME}[{EXTRA!r}]['connectors']", found, "Give one of them.")
        return _without_peers(found[0])[0] if found else None
    return None


def kv_transfer_config(given: Mapping[str, Any] | None) -> KVTransferConfig | None:
    """The connector that `kv_transfer_config` names apart from the tier's; None: there is none.
    Raises InvalidParameter or NotBuiltYet.
    """
    if not given or given.get("kv_connector") == HIDDEN_STATES:
        return None
    name = given.get("kv_connector")
    if name in TIERS and not given.get("kv_connector_module_path"):
        tier = _without_peers(given)[1]
        if tier is None:
            return None
        engine = {name: given[name] for name in ("engine_id", POLICY) if name in given}
        return _made({"kv_connector": PEER_TIER, "kv_role": "kv_both", EXTRA: tier, **engine})
    if name != MULTI:
        return _made(given)
    children = [
        found for child in _children(given) if (found := kv_transfer_config(child)) is not None
    ]
    own = _made(given)
    if not children:
        return None
    if len({child.kv_load_failure_policy for child in children}) > 1:
        allowed = "one kv_load_failure_policy for all"
        raise InvalidParameter(f"{NAME}[{EXTRA!r}]['connectors']", given, allowed)
    return msgspec.structs.replace(
        own, children=tuple(children), kv_load_failure_policy=children[0].kv_load_failure_policy
    )


def _children(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    extra = given.get(EXTRA)
    found = extra.get("connectors") if isinstance(extra, Mapping) else None
    where = f"{NAME}[{EXTRA!r}]['connectors']"
    is_list = isinstance(found, list | tuple) and all(isinstance(child, Mapping) for child in found)
    if not found or not is_list:
        raise InvalidParameter(where, found, "a list of connectors, each as kv_transfer_config")
    of_all = {name: given[name] for name in ("kv_role", POLICY) if name in given}
    for child in found:
        if child.get("kv_connector") == HIDDEN_STATES:
            raise NotBuiltYet(where, child, "Hidden states are written without other connectors.")
        if "engine_id" in child or child.get("kv_connector") == MULTI:
            allowed = "engine_id and other MultiConnectors stand outside of it"
            raise InvalidParameter(where, child, allowed)
    return [{**of_all, **child} for child in found]


def _without_peers(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Settings of a tier without the peer among its secondary tiers, and that."""
    settings = dict(given)
    extra = given.get(EXTRA)
    tiers = extra.get("secondary_tiers") if isinstance(extra, Mapping) else None
    if not isinstance(extra, Mapping) or not isinstance(tiers, list | tuple):
        return settings, None
    peers = [tier for tier in tiers if isinstance(tier, Mapping) and tier.get("type") == PEER_TIER]
    if not peers:
        return settings, None
    if len(peers) > 1:
        raise NotBuiltYet(f"{NAME}[{EXTRA!r}]['secondary_tiers']", tiers, "Give one of type p2p.")
    others = [tier for tier in tiers if tier is not peers[0]]
    settings[EXTRA] = {**extra, "secondary_tiers": others}
    return settings, {key: value for key, value in peers[0].items() if key != "type"}


def _made(given: Mapping[str, Any]) -> KVTransferConfig:
    options = dict(given)
    for name, (values, hint) in _NEUTRAL.items():
        if name in options and options.pop(name) not in values:
            raise NotBuiltYet(f"{NAME}[{name!r}]", given[name], hint)
    if options.get("kv_connector") is None:
        raise InvalidParameter(NAME, given, "it names a kv_connector")
    if options.get("kv_role") not in _ROLES:
        where = f"{NAME}['kv_role']"
        raise InvalidParameter(where, options.get("kv_role"), ", ".join(_ROLES))
    for name in _INNER:
        if name in options:
            allowed = "there is no such field"
            raise InvalidParameter(f"{NAME}[{name!r}]", options[name], allowed)
    for name in [name for name, value in options.items() if value is None]:
        del options[name]
    if options.get("kv_connector_module_path") == "":
        where = f"{NAME}['kv_connector_module_path']"
        raise InvalidParameter(where, "", "the name of a module", "Leave it out.")
    try:
        config = msgspec.convert(options, KVTransferConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(
            name for name in KVTransferConfig.__struct_fields__ if name not in _INNER
        )
        raise InvalidParameter(NAME, given, f"{error}; its fields are {fields}") from None
    if config.kv_load_failure_policy not in POLICIES:
        where = f"{NAME}['kv_load_failure_policy']"
        raise InvalidParameter(where, config.kv_load_failure_policy, ", ".join(POLICIES))
    module, name = _class_of(config)
    return msgspec.structs.replace(config, kv_connector=name, kv_connector_module_path=module)


def _class_of(config: KVTransferConfig) -> tuple[str, str]:
    """The module and the name of a connector's class."""
    name = config.kv_connector
    if config.kv_connector_module_path:
        return config.kv_connector_module_path, name
    if name in KV_CONNECTORS:
        return home_of(KV_CONNECTORS[name])
    if name == MULTI:
        return f"{_HOME}.multi", MULTI
    if name in OWN:
        return OWN[name]
    why = _UNBUILT.get(name, "It is not known.")
    raise NotBuiltYet(
        f"{NAME}['kv_connector']",
        name,
        f"{why} Others are {', '.join([*TIERS, MULTI, *list(OWN)[:3]])}, and a class of your own "
        "with kv_connector_module_path.",
    )


def moves_whole_blocks(config: KVTransferConfig) -> bool:
    """Whether nothing of a connector belongs to a step: blocks move beside them alone."""
    if config.kv_connector == MULTI:
        return all(map(moves_whole_blocks, config.children))
    return pulls(config)


def pulls(config: KVTransferConfig) -> bool:
    """Whether it is a connector that pulls from other engines, and no other one."""
    return config.kv_connector_module_path == f"{_HOME}.peer_connector"
