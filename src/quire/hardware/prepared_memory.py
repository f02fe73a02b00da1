"""Threads that pack a model's weights before it is loaded, map the file that has them packed, or
clear the memory for them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from quire.hardware.buffer_file import end_mapping_ahead, map_ahead
from quire.hardware.native import find_native
from quire.hardware.packed_ahead import PackingPlan, end_packing, pack_ahead


class Preparation(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that are packed, or the file that has them; without any, `num_bytes` of memory are
    cleared.
    """

    num_bytes: int = 0
    packing: PackingPlan | None = None
    file: str | None = None


def prepare(preparation: Preparation) -> None:
    """Have threads prepare for weights, while this process does something else."""
    if preparation.file is not None:
        map_ahead(Path(preparation.file))
    elif preparation.packing is not None:
        pack_ahead(preparation.packing)
    else:
        prepare_memory(preparation.num_bytes)


def prepare_memory(num_bytes: int) -> None:
    """Have a thread clear memory for weights, while this process does something else."""
    native, _ = find_native()
    if native is not None and num_bytes:
        native.prepare_memory(num_bytes)


def end_preparation() -> None:
    """Free what of that memory, of packed weights and of mapped files nobody has taken."""
    end_mapping_ahead()
    native, _ = find_native()
    if native is not None:
        native.end_preparation()
    end_packing()
