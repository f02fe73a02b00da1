"""Pictures that are in the URL itself, or in a file of this machine."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote

from quire.errors import RequestError
from quire.media.base64_text import NotBase64, decode_base64
from quire.media.faults import MediaFault

_NOT_FOUND = "is a file that is not there or cannot be read"


def data_url_bytes(url: str) -> int:
    """The most bytes that a data URL holds, without decoding it."""
    size = len(url) - url.find(",") - 1
    return size * 3 // 4 - url.endswith("=") - url.endswith("==")


def read_data_url(url: str) -> bytes:
    """The bytes of a data URL in base64, whose media type is not trusted."""
    head, comma, text = url.partition(",")
    if not comma:
        raise MediaFault("has a data URL without a comma")
    if head.rpartition(";")[2].strip().lower() != "base64":
        raise OnlyBase64("has a data URL, and only base64 data URLs are supported for now")
    try:
        return decode_base64(unquote(text) if "%" in text else text)
    except NotBase64:
        raise MediaFault("has data that is not base64") from None


class OnlyBase64(MediaFault):
    """A data URL in another encoding (HTTP 501)."""

    http_status = 501

    def of(self, label: str) -> OnlyBase64:
        """The same of another item."""
        return OnlyBase64(self.words, label=label)


def open_file_url(url: str, root: str | None, max_bytes: int) -> tuple[BinaryIO, int]:
    """The file of a file URL, which lies below `root` however it is linked, and its bytes, which
    are at most `max_bytes`. Raises RequestError where no folder is allowed, MediaFault for what
    cannot be read.
    """
    if not root:
        raise RequestError(
            "Cannot load local files without --allowed-local-media-path; give the folder that "
            "requests may read.",
            parameter="image",
        )
    rest = url[len("file:") :]
    if rest.startswith("//"):
        # file://localhost/path is this machine's (RFC 8089, 2)
        host, slash, path = rest[2:].partition("/")
        if host not in ("", "localhost"):
            raise MediaFault("has a file URL of another host")
        rest = slash + path
    path = unquote(rest.partition("?")[0].partition("#")[0])
    if "\0" in path:
        raise MediaFault(_NOT_FOUND)
    allowed = Path(root).resolve()
    try:
        # What lies outside is refused whether it exists or not. The folders are then opened one
        # after the other without following links: nothing that is put in place of one meanwhile
        # leads elsewhere.
        resolved = Path(path).resolve()
        if not resolved.is_relative_to(allowed):
            raise MediaFault("is a file outside of --allowed-local-media-path")
        return _open_below(allowed, resolved.relative_to(allowed), max_bytes)
    except MediaFault:
        raise
    except (OSError, ValueError, RuntimeError):
        raise MediaFault(_NOT_FOUND) from None


def read_file(file: BinaryIO, num_bytes: int) -> bytes:
    """Contents of an open file, which is closed. Raises MediaFault where it has grown."""
    try:
        with file:
            data = file.read(num_bytes + 1)
    except OSError:
        raise MediaFault(_NOT_FOUND) from None
    if len(data) > num_bytes:
        raise MediaFault("is a file that grows while it is read")
    return data


def _open_below(root: Path, path: Path, max_bytes: int) -> tuple[BinaryIO, int]:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path.parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            deeper = os.open(name, flags, dir_fd=folder)
            os.close(folder)
            folder = deeper
        # Without O_NONBLOCK a pipe in the folder would hold this thread up for good.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path.name or ".", flags, dir_fd=folder)
    finally:
        os.close(folder)
    file = os.fdopen(fd, "rb")
    try:
        about = os.fstat(fd)
        # looked at after opening: what is asked by name may be another file by then
        if not stat.S_ISREG(about.st_mode):
            raise MediaFault("is not a regular file")
        if about.st_size > max_bytes:
            raise MediaFault(f"has more than {max_bytes} bytes")
    except BaseException:
        file.close()
        raise
    return file, about.st_size
