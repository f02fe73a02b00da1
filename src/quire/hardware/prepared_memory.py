"""Memory that is cleared in a thread before it is filled."""

from __future__ import annotations

from quire.hardware.native import find_native


def prepare_memory(num_bytes: int) -> None:
    """Have a thread clear memory for weights, while this process does something else."""
    native, _ = find_native()
    if native is not None and num_bytes:
        native.prepare_memory(num_bytes)


def end_preparation() -> None:
    """Free what of that memory nobody has taken."""
    native, _ = find_native()
    if native is not None:
        native.end_preparation()
