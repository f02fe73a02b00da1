"""The arithmetic of the KV pool: how many blocks a request needs, how many memory holds, which
length fits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.config.facts import KVGroupFacts


class PoolShape(msgspec.Struct, frozen=True):
    """Blocks of `block_size` tokens of `token_bytes` each.

    With `is_chunked`, a step may bring as little as one token of a prompt.
    """

    block_size: int
    token_bytes: int
    groups: tuple[KVGroupFacts, ...]
    is_chunked: bool = True

    @property
    def block_bytes(self) -> int:
        """Memory of one block."""
        return self.block_size * self.token_bytes

    def request_blocks(self, length: int, chunk: int | None = None) -> int:
        """Blocks that one request of `length` tokens holds at most.

        Steps bring up to `chunk` of its tokens; None: as few as they can.
        """
        if chunk is None:
            chunk = 1 if self.is_chunked else length
        return sum(self._group_blocks(group.window, length, chunk) for group in self.groups)

    def enough(self, num_seqs: int, length: int, step: int) -> int:
        """Blocks with which `num_seqs` requests of `length` tokens never want, the null block
        included; steps have up to `step` tokens.
        """
        return 1 + num_seqs * self.request_blocks(length, min(step, length))

    def _group_blocks(self, window: int | None, length: int, chunk: int) -> int:
        whole = -(-length // self.block_size)
        if window is None:
            return whole
        # Window and chunk may begin and end inside a block.
        return min(whole, -(-(window - 1 + chunk) // self.block_size) + 1)

    def longest(self, num_blocks: int, limit: int) -> int:
        """The longest request, at most `limit`, for which a pool of `num_blocks` is enough; 0 if
        none.
        """
        usable = num_blocks - 1  # the null block is never handed out
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.request_blocks(middle) <= usable:
                low = middle
            else:
                high = middle - 1
        return low


class MeasuredMemory(msgspec.Struct, frozen=True):
    """A device's free bytes before the engine took any, and with its weights, graphs and the
    workspace of its largest step in place; `share` of the former is the engine's.
    """

    free_at_start: int
    free_now: int
    share: float

    @property
    def room(self) -> int:
        """What is left for the KV cache: of the share, and of what is there."""
        taken = max(0, self.free_at_start - self.free_now)
        return max(0, min(int(self.free_at_start * self.share) - taken, self.free_now))

    def num_blocks(self, block_bytes: int, most: int) -> int:
        """Blocks that fit, the null block included, up to as many as can be of use."""
        return min(most, self.room // block_bytes)


def gib(num_bytes: float) -> str:
    """Bytes for people, in binary units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes:.0f} bytes"


def describe_groups(groups: Sequence[KVGroupFacts]) -> str:
    """The groups in a few words, such as `1 full group of 28 layers`."""
    return ", ".join(
        f"{g.num_layers} layers " + ("full" if g.window is None else f"window {g.window}")
        for g in groups
    )
