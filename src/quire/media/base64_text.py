"""Base64 of media, which may be megabytes."""

from __future__ import annotations

import binascii

_PIECE = 2**18
"""Characters decoded at once; other threads, which write streams, wait for as long."""
_GROUP = 4


class NotBase64(ValueError):
    """A text that encodes nothing."""


def decode_base64(text: str | bytes) -> bytes:
    """The bytes that `text` encodes, with or without white space. Raises NotBase64."""
    parts: list[bytes] = []
    rest: str | bytes = text[:0]
    has_ended = False
    for start in range(0, len(text), _PIECE):
        piece = rest + _without_space(text[start : start + _PIECE])  # type: ignore[operator]
        if has_ended and piece:
            raise NotBase64
        whole = len(piece) - len(piece) % _GROUP
        parts.append(_decoded(piece[:whole]))
        has_ended = len(parts[-1]) * _GROUP != whole * 3  # it was padded
        rest = piece[whole:]
    if rest:
        raise NotBase64
    return b"".join(parts)


def _without_space(piece: str | bytes) -> str | bytes:
    return "".join(piece.split()) if isinstance(piece, str) else b"".join(piece.split())


def _decoded(piece: str | bytes) -> bytes:
    try:
        # strict: by default foreign characters are skipped without a word
        return binascii.a2b_base64(piece, strict_mode=True)
    except ValueError:
        raise NotBase64 from None
