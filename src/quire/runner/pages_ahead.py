"""Pages of KV memory, given before blocks are written for the first time.

Memory of a new engine has no pages. Layers have equally large blocks, so all of them come to a new
huge page in one step, which would wait for the kernel to clear as many pages as there are layers;
in a virtual machine, whose host has to find the memory, for a sixth of a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from quire.hardware.native import find_native

_PAGE = 2 << 20


class PagesAhead:
    """Keeps about a huge page of each part of the memory ready behind the highest block that was
    used; a thread touches it, slowly. Blocks are used in the order of their numbers the first time.
    """

    def __init__(self, parts: Sequence[Tensor]) -> None:
        """`parts`: views [N, ...] of the blocks; those of a device have their pages."""
        sizes = {}
        for part in parts:
            if part.device.type == "cpu":
                size = part.stride(0) * part.element_size()
                # parts of the same blocks count once, from where the first block begins
                skip = part.storage_offset() * part.element_size() % size
                sizes[part.data_ptr() - skip] = len(part), size
        large = {at: (count, size) for at, (count, size) in sizes.items() if count * size > _PAGE}
        self._block_bytes = {at: size for at, (_, size) in large.items()}
        self._num_blocks = min((count for count, _ in large.values()), default=0)
        self._lead = -(-_PAGE // min(self._block_bytes.values(), default=_PAGE))
        self._touched = 0
        """Blocks below it have pages, or will soon."""
        native, _ = find_native() if large else (None, "")
        self._thread: Any = native and native.TouchAhead(parts)
        self.due: float = math.inf if self._thread is None else 0
        """`expect` has something to do from this block on."""

    def expect(self, block: int) -> None:
        """Have pages given to what comes behind `block`, which a request has now."""
        if block < self.due:
            return
        first = max(self._touched, block + 1)
        self._touched = min(block + 1 + 2 * self._lead, self._num_blocks)
        self.due = math.inf if self._touched == self._num_blocks else self._touched - self._lead
        for start, size in self._block_bytes.items():
            self._thread.touch(start + first * size, max(0, self._touched - first) * size)
