"""Files of named buffers that are mapped as they lie there: read at once, on huge pages where the
file system keeps them so, and shared by all processes that map them.

A file is: MAGIC; a mark, which is the boot of the system that wrote or last checked the file, and
its time of change after that; length and checksum of its header; the header as JSON, which says
where each buffer is and has its checksum; the buffers, each at a multiple of a page. Nothing waits
for the disk: what one boot has written is in the page cache, and the first to open the file after
another boot, or after somebody has changed it, computes all checksums.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import stat
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire.hardware.torch_library import wait_for_libraries

MAGIC = b"QuirePW2"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_BOOT_BYTES = 36
_MARK_BYTES = _BOOT_BYTES + 8
_START_BYTES = len(MAGIC) + _MARK_BYTES + 8 + 4
_PAGE = 4096
_PIECE = 8 << 20
"""Bytes written at once: whole huge pages, at multiples of their size."""
_POPULATED = 2 << 20
"""Bytes whose pages are mapped by one call."""
_POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, since 5.14; an older one maps a page when it is read."""


class BadFile(Exception):
    """A file that was not written by `write_buffers`, or not to its end."""


class _Mapped(NamedTuple):
    """A file's pages, the offset, size and checksum of each buffer, what it says about them, and
    whether its mark is missing, so that it has to be checked. `identity`: of the file as it was.
    """

    pages: mmap.mmap
    places: dict[str, tuple[int, int, int]]
    about: Any
    is_unmarked: bool
    identity: tuple[int, ...]


_ahead: dict[Path, _Mapped] = {}
"""Files that are mapped already."""


def write_buffers(
    path: Path, buffers: Mapping[str, memoryview], about: Any, go_on: Callable[[], bool]
) -> bool:
    """Write a file under its name once it is complete; False if another has written it meanwhile,
    or if `go_on`, which is asked before each buffer and each piece, says so. `about` is JSON.
    Raises OSError.
    """
    places, at = {}, 0
    for name, data in buffers.items():
        if not go_on():
            return False
        places[name] = [at, data.nbytes, zlib.crc32(data)]
        at += -(-data.nbytes // _PAGE) * _PAGE
    header = json.dumps({"about": about, "places": places, "size": at}).encode()
    head = MAGIC + bytes(_MARK_BYTES) + len(header).to_bytes(8, "little")
    head += zlib.crc32(header).to_bytes(4, "little") + header
    pieces: list[Any] = [head, bytes(-len(head) % _PAGE)]
    for data in buffers.values():
        pieces += [data, bytes(-data.nbytes % _PAGE)]
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o600)  # gone if this process ends
        try:
            if not _write(file, pieces, go_on):
                return False
            _mark(file)
            return _name(file, path.name, folder)
        finally:
            os.close(file)
    finally:
        os.close(folder)


def map_ahead(path: Path) -> None:
    """Map a file for the next `map_buffers` of it, which finds its pages there. Does nothing with a
    file that cannot be mapped.
    """
    with contextlib.suppress(OSError, BadFile):
        _ahead[path] = _map(path)


def end_mapping_ahead() -> None:
    """Forget the files that nobody has asked for."""
    _ahead.clear()


def map_buffers(path: Path) -> tuple[mmap.mmap, dict[str, tuple[int, int]], Any]:
    """Map a file: its pages, which are not to be written, the offset and size in bytes of each
    buffer, and what the file says `about` them. Raises OSError, BadFile.
    """
    mapped = _ahead.pop(path, None)
    if mapped is None or mapped.identity != _identity(path.stat()):
        mapped = _map(path)
    if mapped.is_unmarked:
        _check(mapped.pages, mapped.places)
        # checked once in a boot: the mark spares the next process the sums
        with contextlib.suppress(OSError), path.open("r+b") as file:
            _mark(file.fileno())
    return mapped.pages, {name: at[:2] for name, at in mapped.places.items()}, mapped.about


def _map(path: Path) -> _Mapped:
    """Map a file, and have a thread read it. Raises OSError, BadFile."""
    with open(path, "rb", opener=_open_at_once) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise BadFile("it is not a file")
        size = about.st_size
        start = file.read(_START_BYTES)
        length = int.from_bytes(start[-12:-4], "little")
        if start[: len(MAGIC)] != MAGIC or length > size:
            raise BadFile("it does not begin as such a file")
        try:
            text = file.read(length)
            if zlib.crc32(text).to_bytes(4, "little") != start[-4:]:
                raise BadFile("its header is not what was written")
            header = json.loads(text)
            first = -(-(len(start) + length) // _PAGE) * _PAGE
            if first + header["size"] != size:
                raise BadFile("its size is another one")
            places = {
                name: (first + at, nbytes, checksum)
                for name, (at, nbytes, checksum) in header["places"].items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise BadFile("its header cannot be read") from error
        # private, so that nothing changes the file; never written, so that all pages are shared
        pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    with contextlib.suppress(OSError, AttributeError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    threading.Thread(target=_fault_in, args=(pages,), name="mapped-file", daemon=True).start()
    is_unmarked = start[len(MAGIC) : len(MAGIC) + _MARK_BYTES] != _boot() + _time_of(about)
    return _Mapped(pages, places, header["about"], is_unmarked, _identity(about))


def _identity(about: os.stat_result) -> tuple[int, ...]:
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def mark_used(path: Path) -> None:
    """Set a file's time of use to now, and leave that of its change."""
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def _open_at_once(path: str, flags: int) -> int:
    """Open a path, also a pipe's that nobody writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


def _mark(file: int) -> None:
    """Write that the file is as it should be in this boot, unless its time of change is another."""
    os.utime(file)
    about = os.fstat(file)  # the time as the file system keeps it
    os.pwrite(file, _boot() + _time_of(about), len(MAGIC))
    # writing the mark has changed the time that is in it
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))


def _time_of(about: os.stat_result) -> bytes:
    return (about.st_mtime_ns % (1 << 64)).to_bytes(8, "little")


def _check(pages: mmap.mmap, places: Mapping[str, tuple[int, int, int]]) -> None:
    for name, (at, nbytes, checksum) in places.items():
        with memoryview(pages) as view, view[at : at + nbytes] as data:
            if zlib.crc32(data) != checksum:
                raise BadFile(f"{name} is not what was written")


def _boot() -> bytes:
    """The number of the system's boot."""
    with contextlib.suppress(OSError):
        return _BOOT.read_bytes()[:_BOOT_BYTES]
    return bytes(_BOOT_BYTES)


def _fault_in(pages: mmap.mmap) -> None:
    """Map what the page cache has, and read what it lacks from the disk in its order. Without the
    interpreter's lock, which `mmap.madvise` keeps, and in pieces, between which others can map
    memory, as imports do. Ends where the file does: plain reads of pages that somebody has cut off
    would end the process.
    """
    import ctypes  # in this thread, while another one imports

    wait_for_libraries()  # who waits for those needs the processors more
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    held = ctypes.c_char.from_buffer(pages)
    for at in range(0, len(pages), _POPULATED):
        nbytes = min(_POPULATED, len(pages) - at)
        if madvise(ctypes.addressof(held) + at, nbytes, _POPULATE_READ):
            return


def _name(file: int, name: str, folder: int) -> bool:
    try:
        os.link(f"/proc/self/fd/{file}", name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        return False
    return True


def _write(file: int, pieces: Sequence[Any], go_on: Callable[[], bool]) -> bool:
    """Write the pieces one after the other, in aligned steps of `_PIECE` bytes."""
    step = memoryview(bytearray(_PIECE))
    filled = at = 0
    for piece in pieces:
        left = memoryview(piece)
        while left:
            count = min(len(left), _PIECE - filled)
            step[filled : filled + count] = left[:count]
            left, filled = left[count:], filled + count
            if filled == _PIECE:
                if not go_on():
                    return False
                at += _write_all(file, step, at)
                filled = 0
    _write_all(file, step[:filled], at)
    return True


def _write_all(file: int, data: memoryview, at: int) -> int:
    written = 0
    while written < len(data):
        written += os.pwrite(file, data[written:], at + written)
    return written
