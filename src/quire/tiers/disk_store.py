"""Blocks of K/V as files of a folder, which survive the process.

A file is complete or a miss: it is written under another name, renamed when it is whole, and its
head has the checksum of the content, and one of itself. So a torn or flipped file, one of a
crash or of a full disk, costs time and never gives an answer. The folder and its files are the
user's own (0700, 0600): whoever can write there could put K/V into answers. With a key they may be
others', too: then each file has a MAC, and one without the right one is as a damaged one.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import mmap
import os
import re
import secrets
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from quire.errors import InvalidParameter
from quire.step.transfers import BlockKey
from quire.tiers.checksum import SUM_BYTES, Bytes, content_sum

MAGIC = b"quire kv block 3\n"
_HEAD = struct.Struct(f"<17s32sIQ{SUM_BYTES}s")
"""Magic, digest, KV group, bytes of the content, and its checksum."""
_SEAL_BYTES = 32
"""The checksum of the head, after it; with a key, the MAC of root, head and content."""
_PAGE = 4096
HEAD_BYTES = _PAGE
"""The head, its checksum, and zeros up to a place where disks can begin to write."""
_NAME = re.compile(r"([0-9a-f]{64})_g(\d{1,4})\.kv")
_HALF_WRITTEN = ".part"
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_ABANDONED_S = 600.0
"""Age at which a half-written file is deleted. Process ids do not tell whose it is: containers that
share the folder each count their own.
"""
_LOOKS_AGAIN = 16
"""Part of the bound after whose writing the folder is read again: others may write there, too."""


class DiskStore:
    """The files of one `root` in a folder that engines with other roots may share; at most
    `max_bytes` for all of them, the least recently used deleted first. Several threads may use it.

    `root`: a hexadecimal name of everything that determines contents apart from their keys. No lock
    is held while the disk works, so that `has` answers at once even if the disk hangs.
    """

    def __init__(
        self, folder: Path, root: str, max_bytes: int, mac_key: bytes | None = None
    ) -> None:
        """`mac_key`, of at most 64 bytes, is that of a folder to which others may write. Raises
        InvalidParameter for such a folder without one, and for one that cannot be made.
        """
        self._mac_key = mac_key
        self._modes = (0o700, 0o600) if mac_key is None else (0o770, 0o660)
        if mac_key is not None:  # engines without it, or with another one, delete none of its files
            root += "-" + hashlib.blake2b(mac_key, digest_size=4, person=b"kv key name").hexdigest()
        self._top, self.folder, self._max_bytes = folder, folder / root, max_bytes
        self._lock, self._commit = threading.Lock(), threading.Lock()
        self._files: OrderedDict[str, int] = OrderedDict()
        """Paths below the top folder -> bytes, the least recently used first."""
        self._bytes = 0
        self._until_look = 0
        self._changes: dict[str, int | None] | None = None
        """Files that have come (their bytes) or gone (None) since the folder began to be read."""
        for each in (folder, self.folder):
            _make_folder(each, self._modes[0], is_shared=mac_key is not None)
        self._look()

    @property
    def num_bytes(self) -> int:
        """The bytes of the files that are known."""
        return self._bytes

    def contents(self) -> list[BlockKey]:
        """The keys of the files of this root, the least recently used first."""
        with self._lock:
            own = [path for path in self._files if path.startswith(self.folder.name + os.sep)]
        found = (_NAME.fullmatch(os.path.basename(path)) for path in own)
        return [(bytes.fromhex(name[1]), int(name[2])) for name in found if name is not None]

    def has(self, key: BlockKey) -> bool:
        """Whether there is a file with this name; `get` says whether it is whole."""
        with self._lock:
            return self._path(key) in self._files

    def get(self, key: BlockKey, into: Bytes) -> bytes | None:
        """Read the content, of as many bytes as `into` has, and return its checksum; None: there is
        no file. Raises OSError for one that cannot be read, or is not whole: that is deleted.
        """
        path = self._path(key)
        full = self._top / path
        # one byte more than a file may have: a longer one is not whole
        head, beyond = bytearray(HEAD_BYTES), bytearray(1)
        try:
            with open(full, "rb", buffering=0, opener=_without_links) as file:
                num_read = _read(file.fileno(), [head, into.data, beyond])
            with contextlib.suppress(OSError):
                os.utime(full)  # the order of use survives the process
        except FileNotFoundError:  # another engine has made room
            self._forget(path)
            return None
        except OSError:
            self._forget(path)
            raise
        checksum = self._checksum_in(head, key, into)
        is_whole = num_read == HEAD_BYTES + into.nbytes and checksum is not None
        if not is_whole or content_sum(into) != checksum:
            self._delete(path)
            raise OSError(errno.EIO, "a file of K/V is damaged", str(full))
        with self._lock:
            if path in self._files:
                self._files.move_to_end(path)
        return checksum

    def put(
        self,
        key: BlockKey,
        content: Bytes,
        checksum: bytes,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> list[BlockKey]:
        """Write a content, which has this checksum; returns the keys of this root that made room
        for it. Nothing is kept if it is larger than the bound, or is not wanted any more when it is
        whole: it was forgotten meanwhile. Raises OSError if it cannot be written; then nothing is
        left of it.
        """
        path = self._path(key)
        size = HEAD_BYTES + content.nbytes
        if size > self._max_bytes:
            return []
        evicted = self._make_room(size)
        # in the same folder, since a file system renames at once only within itself
        part = self.folder / f"{secrets.token_hex(8)}{_HALF_WRITTEN}"
        (self._top / path).parent.mkdir(mode=self._modes[0], exist_ok=True)
        _write_file(part, self._head(key, content, checksum), content, self._modes[1])
        try:
            with self._commit:
                # question and name under one lock: a `clear` between them would leave a file behind
                if not is_wanted():
                    part.unlink()
                    return evicted
                os.replace(part, self._top / path)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
        with self._lock:
            self._bytes += size - self._files.pop(path, 0)
            self._files[path] = size
            if self._changes is not None:
                self._changes[path] = size
            self._until_look -= size
            looks = self._until_look < 0 and self._changes is None
        # outside of the lock, as a folder of many files takes long to read
        if looks:
            self._look()
        return evicted

    def clear(self) -> None:
        """Delete all contents of this root."""
        with self._commit:  # what is not wanted any more gets no name from now on
            for file in self.folder.rglob("*.kv"):
                self._delete(os.path.relpath(file, self._top))

    def _head(self, key: BlockKey, content: Bytes, checksum: bytes) -> bytes:
        """The beginning of a file: what it is, of which content, and the checksums."""
        digest, group = key
        head = _HEAD.pack(MAGIC, digest, group, content.nbytes, checksum)
        if self._mac_key is None:
            seal = hashlib.blake2b(head, digest_size=_SEAL_BYTES).digest()
        else:
            mac = hashlib.blake2b(key=self._mac_key, digest_size=_SEAL_BYTES)
            mac.update(self.folder.name.encode() + b"\0" + head)
            mac.update(content.data)
            seal = mac.digest()
        return (head + seal).ljust(HEAD_BYTES, b"\0")

    def _checksum_in(self, head: bytearray, key: BlockKey, content: Bytes) -> bytes | None:
        """The checksum of the content, if this is the head of a file of it."""
        checksum: bytes = _HEAD.unpack_from(head)[-1]
        wanted = self._head(key, content, checksum)
        # in constant time: how long it takes must not tell how much of a MAC is right
        return checksum if hmac.compare_digest(bytes(head), wanted) else None

    def _path(self, key: BlockKey) -> str:
        name = key[0].hex()
        return os.path.join(self.folder.name, name[:2], f"{name}_g{key[1]}.kv")

    def _make_room(self, size: int) -> list[BlockKey]:
        oldest = []
        with self._lock:
            while self._files and self._bytes + size > self._max_bytes:
                path = next(iter(self._files))
                self._drop(path)
                oldest.append(path)
        evicted = []
        # outside of the lock: other threads need not wait for the disk
        for path in oldest:
            with contextlib.suppress(OSError):
                (self._top / path).unlink()
            name = _NAME.fullmatch(os.path.basename(path))
            if name is not None and path.startswith(self.folder.name + os.sep):
                evicted.append((bytes.fromhex(name[1]), int(name[2])))
        return evicted

    def _delete(self, path: str) -> None:
        with contextlib.suppress(OSError):
            (self._top / path).unlink()
        self._forget(path)

    def _forget(self, path: str) -> None:
        with self._lock:
            self._drop(path)

    def _drop(self, path: str) -> None:
        """Take a file out of those that are known; under the lock."""
        self._bytes -= self._files.pop(path, 0)
        if self._changes is not None:
            self._changes[path] = None

    def _look(self) -> None:
        """Read the folder: all roots' files, oldest use first. Abandoned half-files are deleted."""
        with self._lock:
            if self._changes is not None:
                return  # another thread reads it
            self._changes = {}
        found: list[tuple[int, str, int]] = []
        try:
            found = sorted(self._found())
        finally:
            with self._lock:
                self._files = OrderedDict((path, size) for _, path, size in found)
                for changed, new_size in self._changes.items():
                    self._files.pop(changed, None)
                    if new_size is not None:
                        self._files[changed] = new_size
                self._changes = None
                self._bytes = sum(self._files.values())
                self._until_look = self._max_bytes // _LOOKS_AGAIN

    def _found(self) -> Iterator[tuple[int, str, int]]:
        """The files of all roots: when each was used, its path below the top folder, its bytes."""
        now = time.time()
        for folder, _, names in os.walk(self._top):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    # a link counts as what it is, and is neither read nor deleted
                    about = os.stat(path, follow_symlinks=False)
                except OSError:
                    continue
                if _NAME.fullmatch(name) and stat.S_ISREG(about.st_mode):
                    yield about.st_mtime_ns, os.path.relpath(path, self._top), about.st_size
                elif name.endswith(_HALF_WRITTEN) and now - about.st_mtime > _ABANDONED_S:
                    with contextlib.suppress(OSError):
                        os.unlink(path)


def _read(descriptor: int, buffers: Sequence[Any]) -> int:
    """Fill the buffers, as far as the file goes; returns the bytes that were read."""
    total, left = 0, [memoryview(buffer) for buffer in buffers]
    while left:
        count = os.readv(descriptor, left)
        total += count
        if not count:
            break
        left = _after(left, count)
    return total


def _write_file(path: Path, head: bytes, content: Bytes, mode: int) -> None:
    """Write a new file. Pages go from the content to the disk without a copy
    where that is possible, as host memory is the cache of what is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    if content.ctypes.data % _PAGE or content.nbytes % _PAGE:
        _write_as(path, flags, mode, [head, content.data])
        return
    with mmap.mmap(-1, HEAD_BYTES) as page:
        page[:] = head
        try:
            _write_as(path, flags | _DIRECT, mode, [page, content.data])
        except OSError as error:
            if error.errno != errno.EINVAL or not _DIRECT:
                raise
            # a file system that has no direct writes; some refuse once they have made the file
            path.unlink(missing_ok=True)
            _write_as(path, flags, mode, [head, content.data])


def _write_as(path: Path, flags: int, mode: int, buffers: Sequence[Any]) -> None:
    """Write a new file; nothing is left of one that cannot be written."""
    descriptor = os.open(path, flags, mode)
    left = [memoryview(buffer) for buffer in buffers]
    try:
        while left:
            left = _after(left, os.writev(descriptor, left))
    except BaseException:
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    finally:
        os.close(descriptor)
        for buffer in left:
            buffer.release()


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """The rest of buffers after `count` bytes; those before are released."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers[0])
        buffers.pop(0).release()
    if buffers and count:
        whole = buffers[0]
        buffers[0] = whole[count:]
        whole.release()
    return buffers


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def _make_folder(folder: Path, mode: int, *, is_shared: bool) -> None:
    where = "root_dir"
    try:
        folder.mkdir(mode=mode, parents=True, exist_ok=True)
        about = folder.stat()
    except OSError as error:
        raise InvalidParameter(where, str(folder), f"a folder ({error.strerror})") from error
    if not is_shared and (about.st_uid != os.getuid() or about.st_mode & 0o022):
        allowed = "a folder of this user that no one else can write to: its blocks become answers"
        hint = "chmod 700 it, name another, or give a mac_key_file."
        raise InvalidParameter(where, str(folder), allowed, hint)
