"""What a scheduler is told once, and how it is paused."""

from __future__ import annotations

import enum

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True):
    """The scheduler's facts. Counts are in tokens unless said; `windows` has one entry per KV
    group (None: reads all).
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    windows: tuple[int | None, ...] = (None,)
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0


class Pause(enum.IntEnum):
    """Whether new requests may enter rows (NEW: no) and whether anything runs at all (ALL: no)."""

    NONE = 0
    NEW = 1
    ALL = 2
