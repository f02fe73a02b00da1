"""Names for the content of full blocks, so that equal prefixes are found.

A block's key is a SHA-256 digest chained over everything before it, so equal keys mean equal
prefixes; the first link holds what else decides the content (salt and adapter; the weight version
when it exists), each part with its length in front.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from quire.scheduling.request import Request


def root_key(cache_salt: str | None, adapter: int = 0) -> bytes:
    """The link before a request's first block: what it must share with another besides tokens."""
    digest = hashlib.sha256(b"quire block key 2")
    salt = b"" if cache_salt is None else b"\x01" + cache_salt.encode()
    digest.update(len(salt).to_bytes(8, "little") + salt)
    digest.update(adapter.to_bytes(8, "little"))
    return digest.digest()


def next_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block with these tokens after the block `parent`.

    Token counts are equal within a cache and the parent has 32 bytes, so the concatenation is
    unambiguous.
    """
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()


def extend_keys(request: Request, block_size: int, num_blocks: int) -> None:
    """Compute the request's keys up to `num_blocks` blocks, each once in its life (the tokens must
    be known).
    """
    keys = request.keys
    while len(keys) < num_blocks:
        start = len(keys) * block_size
        parent = keys[-1] if keys else root_key(request.cache_salt, request.adapter)
        keys.append(next_key(parent, request.token_ids(start, start + block_size)))
