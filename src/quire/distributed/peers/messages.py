"""The messages between an engine that pulls blocks and the one that has them, as msgpack.

The one that pulls says `PullHello`, reads blocks of a lease, tells that it still wants leases, and
that it does not any more. An answer with a block has its content as a second frame.
"""

from __future__ import annotations

import hashlib

import msgspec

VERSION = 1
MOST_BLOCKS = 64
"""Blocks of a `Read`."""
NO_READ = -1
"""The number of a `Gone` that is about a whole connection: who pulls was not welcomed."""
_DIGEST_BYTES = 16


class Message(msgspec.Struct, tag=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """The base class of all messages."""


class PullHello(Message):
    """The first message of a connection: what the K/V of the one that pulls depends on."""

    version: int
    root: str


class Read(Message):
    """Blocks of a lease, each by the name of its content and its KV group."""

    number: int
    lease: str
    blocks: list[tuple[bytes, int]]


class Beat(Message):
    """Leases that are still wanted."""

    leases: list[str]


class Done(Message):
    """A lease that is not wanted any more."""

    lease: str


class PullWelcome(Message):
    """The answer to `PullHello`: who answers, and the bytes of a block of each KV group; or why
    there will be no blocks.
    """

    engine_id: str
    sizes: list[int]
    refusal: str = ""


class PulledBlock(Message):
    """A block of a read, and the digest of its content."""

    number: int
    key: bytes
    group: int
    digest: bytes


class Gone(Message):
    """A read that cannot be answered, and why."""

    number: int
    reason: str


FromPuller = PullHello | Read | Beat | Done
FromServer = PullWelcome | PulledBlock | Gone


def digest_of(key: bytes, group: int, content: bytes | memoryview) -> bytes:
    """The digest of a block's content under its name."""
    found = hashlib.blake2b(key, digest_size=_DIGEST_BYTES, salt=group.to_bytes(8, "little"))
    found.update(content)
    return found.digest()
