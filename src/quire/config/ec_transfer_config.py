"""The fields of `ec_transfer_config`, checked: outputs of encoders kept outside of the engine."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.environment import expanded
from quire.errors import InvalidParameter, NotBuiltYet
from quire.plugins.tables import EC_CONNECTORS, home_of

NAME = "ec_transfer_config"
EXAMPLE = "ECExampleConnector"
FOLDER = "shared_storage_path"
_UNBUILT = {
    "ECCPUConnector": "It moves outputs between machines by RDMA.",
    "ECMooncakeConnector": "It needs the store of Mooncake.",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "ec_buffer_device": ("cuda", "cpu", None), "ec_buffer_size": (1e9,), "ec_rank": (None, 0),
    "ec_parallel_size": (1,), "ec_ip": ("127.0.0.1",), "ec_port": (14579,),
}  # fmt: skip
"""Fields of connectors between machines, at the values that change nothing."""


class ECTransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The connector that keeps encoders' outputs, and whether this engine saves (ec_producer) or
    loads (ec_consumer) them, or both. `ec_connector_module_path`: the module of a class of one's
    own, below `ECConnectorBase`.
    """

    ec_connector: str
    ec_role: str = "ec_both"
    ec_connector_extra_config: dict[str, Any] = {}
    ec_connector_module_path: str | None = None
    engine_id: str | None = None

    @property
    def is_ec_producer(self) -> bool:
        """Whether outputs are saved."""
        return self.ec_role in ("ec_producer", "ec_both")

    @property
    def is_ec_consumer(self) -> bool:
        """Whether outputs are loaded."""
        return self.ec_role in ("ec_consumer", "ec_both")

    def get_from_extra_config(self, key: str, default: Any) -> Any:
        """A setting of the connector's own."""
        return self.ec_connector_extra_config.get(key, default)


def ec_transfer_config(given: dict[str, Any] | None) -> ECTransferConfig | None:
    """Check `ec_transfer_config`; None: nothing is kept. Raises InvalidParameter or NotBuiltYet."""
    options = dict(given or {})
    for name, neutral in _NEUTRAL.items():
        if name in options and options.pop(name) not in neutral:
            hint = f"{EXAMPLE} keeps files in a folder; leave it out."
            raise NotBuiltYet(f"{NAME}[{name!r}]", (given or {})[name], hint)
    if options.get("ec_connector") is None:
        if options:
            raise InvalidParameter(NAME, given, f"it names an ec_connector, such as {EXAMPLE}")
        return None
    try:
        config = msgspec.convert(options, ECTransferConfig)
    except msgspec.ValidationError as error:
        fields = ", ".join(ECTransferConfig.__struct_fields__)
        raise InvalidParameter(NAME, given, f"{error}; its fields are {fields}") from None
    if config.ec_role not in ("ec_producer", "ec_consumer", "ec_both"):
        allowed = "ec_producer, ec_consumer or ec_both"
        raise InvalidParameter(f"{NAME}['ec_role']", config.ec_role, allowed)
    # a class of one's own may have any settings
    if config.ec_connector_module_path is not None:
        return config
    if config.ec_connector in EC_CONNECTORS:
        module, name = home_of(EC_CONNECTORS[config.ec_connector])
        return msgspec.structs.replace(config, ec_connector=name, ec_connector_module_path=module)
    if config.ec_connector != EXAMPLE:
        why = _UNBUILT.get(config.ec_connector, "It is not known.")
        hint = f"{why} Use {EXAMPLE}, or a class of your own with ec_connector_module_path."
        raise NotBuiltYet(f"{NAME}['ec_connector']", config.ec_connector, hint)
    return _with_folder(config)


def _with_folder(config: ECTransferConfig) -> ECTransferConfig:
    """The settings of `ECExampleConnector` with its folder as an absolute path."""
    extra = dict(config.ec_connector_extra_config)
    folder = extra.pop(FOLDER, None)
    where = f"{NAME}['ec_connector_extra_config']"
    if extra:
        raise InvalidParameter(where, extra, f"{EXAMPLE} has {FOLDER} alone")
    if not isinstance(folder, str) or not folder:
        raise InvalidParameter(where, config.ec_connector_extra_config, f"{FOLDER} is a folder")
    path = str(expanded(folder).absolute())
    return msgspec.structs.replace(config, ec_connector_extra_config={FOLDER: path})
