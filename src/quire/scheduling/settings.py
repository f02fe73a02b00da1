"""The scheduler's configuration and pause modes."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec


class KVGroupSpec(msgspec.Struct, frozen=True):
    """Contents of the blocks of one KV group in the shared pool.

    - `full`: keys and values of every token;
    - `sliding`: those of the last `window` tokens, the query's own included;
    - `state`: one recurrent state per request, whatever its length;
    - `source`: those of the request's second content, whatever the number of its tokens;
    - `none`: nothing (attention over the step's own tokens).

    `block_size`: tokens in a block of this group, a multiple of those of a key (None: the same).
    Raises ValueError for a window that does not fit the kind.
    """

    kind: Literal["full", "sliding", "state", "source", "none"] = "full"
    window: int | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if (self.kind == "sliding") != (self.window is not None):
            raise ValueError(f"a group of kind {self.kind!r} cannot have the window {self.window}")


class StepsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a step. `max_stall_s`: how long a stream may wait for the step of other prompts,
    in seconds; None: any time.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    max_stall_s: float | None = None
    scheduling_policy: str = "fcfs"
    max_steps_in_flight: int = 1

    @property
    def crowd(self) -> int:
        """Number of one caller's requests that keeps steps full: twice the rows, half of which
        wait.
        """
        return 2 * self.max_num_seqs


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of `steps`, and the memory, adapters and drafts that they share. Counts are in tokens
    unless stated otherwise. `groups` are the KV groups of the model; `num_drafts` is the most
    drafts that a request verifies in a step, `max_drafts` the most of all requests (None: any);
    `reports_drafts` puts what became of each one's into the outputs. A key names `key_size` tokens;
    requests that begin alike have the same blocks where it `shares_blocks`. Snapshots of recurrent
    states are made of prompts about every `snapshot_interval` tokens and at their last block
    border; all of them together have at most `num_snapshot_blocks` blocks (None: any). A request
    whose LoRA adapter has none of the slots is passed over at most `max_adapter_passes` times
    before a slot is drained for it. `encoder_rows`: how many rows encoders make in a step, and how
    many are kept (0: there are no encoders); `defers_encodings`: they are there once
    `Scheduler.end_encodings` says so. `micro_batches`: equal parts of the requests, of which a step
    has one, so that as many steps in flight find work.
    """

    steps: StepsPlan
    max_len: int
    key_size: int
    num_blocks: int
    groups: tuple[KVGroupSpec, ...] = (KVGroupSpec(),)
    shares_blocks: bool = True
    num_drafts: int = 0
    max_drafts: int | None = None
    reports_drafts: bool = False
    snapshot_interval: int = 1024
    num_snapshot_blocks: int | None = None
    num_adapter_slots: int = 0
    max_adapter_passes: int = 64
    encoder_rows: int = 0
    defers_encodings: bool = False
    micro_batches: int = 1


class Pause(enum.IntEnum):
    """Whether new requests may enter rows (NEW: no) and whether anything runs at all (ALL: no)."""

    NONE = 0
    NEW = 1
    ALL = 2
