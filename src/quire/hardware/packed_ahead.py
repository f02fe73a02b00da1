"""Weights that native threads pack out of a checkpoint's files while torch is imported, before the
loader asks for them. The threads need neither torch nor the interpreter's lock. They go on after
the loader has taken a weight, whose products read the files until it is packed; nobody can write to
these meanwhile.

A weight's key says everything that it is made of. The loader computes the key of each weight that
it is to pack, takes those that are packed already, and packs the others. Free of torch.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.hardware.native import find_native

_TYPES = {"float32": ("f32", 4), "float16": ("f16", 2), "bfloat16": ("bf16", 2)}
"""Type of the values -> its name in native code, and the bytes of each."""


class PackedRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows first..first+count-1 of a weight, which begin `at` bytes into a file."""

    file: int
    at: int
    first: int
    count: int


class PackedPart(msgspec.Struct, frozen=True, array_like=True):
    """A weight [out, in] by its key."""

    key: str
    in_features: int
    out_features: int
    gated: bool
    rows: list[PackedRows]


class PackedBlock(msgspec.Struct, frozen=True, array_like=True):
    """Weights in one piece of memory, one after the other."""

    parts: list[PackedPart]


class PackingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The weights to pack, in the order in which the loader will ask, for kernels of `level`."""

    dtype: str
    level: str
    num_threads: int
    files: list[str]
    blocks: list[PackedBlock]

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights as they are stored."""
        return _TYPES[self.dtype][1] * sum(
            part.in_features * part.out_features for block in self.blocks for part in block.parts
        )


def part_key(dtype: str, gated: bool, sources: Sequence[str]) -> str:
    """The key of a weight of these rows, which are contents of files."""
    return "\n".join([f"{dtype}, {'gated' if gated else 'plain'}", *sources])


class _Packing:
    """The packing for one engine, from `start` to `stop`."""

    def __init__(self, native: Any, plan: PackingPlan) -> None:
        self._packer = native.PackAhead(plan.num_threads, plan.level)
        self._numbers: dict[tuple[str, ...], int] = {}
        files = [self._packer.add_file(file) for file in plan.files]
        for block in plan.blocks:
            self._add(native, plan, block, files)

    def start(self) -> None:
        self._packer.start()

    def _add(self, native: Any, plan: PackingPlan, block: PackedBlock, files: list[int]) -> None:
        kind, item_bytes = _TYPES[plan.dtype]
        sizes = [_panel_bytes(part, item_bytes, native.panel_width) for part in block.parts]
        number, offset = self._packer.add_block(sum(sizes)), 0
        for part, size in zip(block.parts, sizes, strict=True):
            weight = native.PackedWeight(
                *(native.Type.__members__[kind], native.WeightForm.plain),
                *(part.in_features, part.out_features, 0, 0, 0, 0, False, 1, part.gated),
            )
            for rows in part.rows:
                file = files[rows.file]
                if file < 0 or not self._packer.add_rows(
                    number, weight, offset, rows.first, rows.count, file, rows.at
                ):
                    return  # the block has no key, so that the loader packs it
            offset += size
        self._numbers[tuple(part.key for part in block.parts)] = number

    @property
    def has_ended(self) -> bool:
        """Whether its threads have nothing left to pack."""
        return bool(self._packer.has_ended)

    def take(self, keys: tuple[str, ...]) -> Any:
        number = self._numbers.pop(keys, None)
        return None if number is None else self._packer.take(number)

    def end_taking(self) -> None:
        """Pack what was taken, and no more."""
        self._packer.end_taking()

    def wait_for_end(self) -> None:
        """Return when its threads have nothing left to pack."""
        self._packer.wait_for_end()

    def stop(self) -> None:
        self._packer.stop()


def _panel_bytes(part: PackedPart, item_bytes: int, width: int) -> int:
    halves = 2 if part.gated else 1
    panels = halves * -(-part.out_features // (halves * width))
    return panels * -(-part.in_features // 2) * 2 * width * item_bytes


_lock = threading.Lock()
_packings: list[_Packing] = []
"""The one that a loader takes weights from."""
_taken: list[_Packing] = []
"""Those whose weights are in use, and may be packed still."""


def pack_ahead(plan: PackingPlan) -> None:
    """Begin to pack; does nothing without native code, or while another engine's weights are."""
    native, _ = find_native()
    if native is None:
        return
    with _lock:
        if not _packings:
            with contextlib.suppress(ValueError):  # a level that the runtime will refuse
                packing = _Packing(native, plan)
                packing.start()
                _packings.append(packing)


def take_packed(keys: Sequence[str | None]) -> Any:
    """The native block of the weights with these keys, once; None where nobody packs them so. Its
    `wait` returns when it is packed.
    """
    with _lock:
        found = next(iter(_packings), None)
    if found is None or None in keys:
        return None
    return found.take(tuple(key for key in keys if key is not None))


def end_packing() -> None:
    """Free what nobody has taken, and pack the rest in peace."""
    with _lock:
        _taken[:] = [packing for packing in _taken if not packing.has_ended]
        while _packings:
            packing = _packings.pop()
            packing.end_taking()
            _taken.append(packing)


def wait_for_packing() -> None:
    """Return when all that was taken is packed. Nobody hurries for the caller, as for one that asks
    for a weight.
    """
    with _lock:
        going_on = [*_packings, *_taken]
    for packing in going_on:
        packing.wait_for_end()


def _stop() -> None:
    with _lock:
        for packing in [*_packings, *_taken]:
            packing.stop()


# native threads end before the interpreter does
atexit.register(_stop)
