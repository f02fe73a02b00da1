"""The messages between a core and the machines that have some of its ranks."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

PROTOCOL_VERSION = 1

BEAT_S = 0.5
"""Seconds between two signs of life, of each side."""
SILENT_S = 10.0
"""Seconds without a sign after which a machine is gone."""


class NodeBeat(msgspec.Struct, tag=True, frozen=True):
    """A machine is there: number `node` of `num_nodes`. `life` is drawn anew each time that its
    program starts.
    """

    protocol_version: int
    node: int
    num_nodes: int
    life: str


class RankEnded(msgspec.Struct, tag=True, frozen=True):
    """A rank of the machine has ended: its exit code, the same in words, and its last words."""

    rank: int
    code: int
    words: str
    last_words: tuple[str, str] | None


class CoreBeat(msgspec.Struct, tag=True, frozen=True):
    """The core is there, in this `life`, which may be over; or it refuses the machine."""

    life: str
    refusal: str = ""
    is_over: bool = False


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """Start a rank: the module of its program, and its encoded start message."""

    rank: int
    program: str
    start: bytes


class KillRank(msgspec.Struct, tag=True, frozen=True):
    """End a rank at once."""

    rank: int


def node_identity(node: int, life: str) -> bytes:
    """The routing id of a machine's socket, in one life of its program."""
    return f"node{node}-{life}".encode()


FromNode: TypeAlias = NodeBeat | RankEnded
FromCore: TypeAlias = CoreBeat | StartRank | KillRank
