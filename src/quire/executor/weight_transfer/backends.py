"""The ways that a trainer's weights come, by name. Plugins register theirs (plugins/tables.py)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from quire.errors import InvalidParameter
from quire.executor.weight_transfer.engines import WeightTransferEngine
from quire.params.weight_transfer import BACKENDS
from quire.plugins import resolve_reference
from quire.plugins.tables import WEIGHT_TRANSFERS

_OWN: Mapping[str, str] = MappingProxyType(
    {
        "nccl": "quire.executor.weight_transfer.group_engine:GroupTransferEngine",
        "sparse_nccl": "quire.executor.weight_transfer.patch_engine:PatchTransferEngine",
        "ipc": "quire.executor.weight_transfer.memory_engine:MemoryTransferEngine",
    }
)


def find_engine(name: str) -> type[WeightTransferEngine]:
    """The class of a backend. Raises InvalidParameter for an unknown one."""
    if name not in WEIGHT_TRANSFERS and name not in _OWN:
        known = ", ".join([*BACKENDS, *WEIGHT_TRANSFERS])
        raise InvalidParameter(
            "weight_transfer_config['backend']", name, f"the backends are {known}"
        )
    given = WEIGHT_TRANSFERS[name] if name in WEIGHT_TRANSFERS else _OWN[name]
    found = resolve_reference(given) if isinstance(given, str) else given
    assert isinstance(found, type)
    return found
