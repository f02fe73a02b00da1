"""A picture as files and texts. Standard library only, since each client runs in an environment of
its own.
"""

import base64
import struct
import zlib

TOKENS = 16
"""Of one picture, with the model that these clients are pointed at."""


def _chunk(kind: bytes, data: bytes) -> bytes:
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def png(red: int, green: int, blue: int, side: int = 32) -> bytes:
    """A picture of one colour."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    rows = (b"\0" + bytes((red, green, blue)) * side) * side
    parts = (_chunk(b"IHDR", head), _chunk(b"IDAT", zlib.compress(rows)), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


RED, BLUE = png(250, 20, 10), png(10, 20, 250)


def as_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def as_url(data: bytes) -> str:
    return f"data:image/png;base64,{as_base64(data)}"
