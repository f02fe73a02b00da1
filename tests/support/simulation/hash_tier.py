"""A tier for the hash model: it keeps contents of blocks by their keys, and its copies are late."""

from __future__ import annotations

import random
from collections.abc import Sequence

from quire.step.plan import BlockTransfer, StepPlan
from quire.step.transfers import BlockKey
from tests.support.simulation.hash_model import HashRunner


class HashTier:
    """Copies begin with a plan and happen some steps later: who frees the blocks before, or reads
    them, gets wrong text. Some loads fail, and leave nothing of use in their blocks.
    """

    def __init__(self, runner: HashRunner, pick: random.Random) -> None:
        self._runner = runner
        self._random = pick
        self.pressure = pick.choice((0.0, 0.3, 0.8))
        """How likely all that is cached is evicted in a step."""
        self._share = pick.choice((0.5, 1.0, 1.0))
        """How likely a content is wanted."""
        self._failing = pick.choice((0.1, 0.3, 0.6))
        self._slowest = pick.choice((1, 3, 10))
        self._capacity = pick.choice((3, 30, 1000))
        self._contents: dict[BlockKey, list[int]] = {}
        self._storing: set[BlockKey] = set()
        self._pending: list[tuple[int, bool, list[BlockTransfer]]] = []
        """Steps until it happens, whether it is a load, and its blocks."""
        self.num_loaded = self.num_failed = self.num_stored = 0

    # What the scheduler asks

    def has(self, key: BlockKey) -> bool:
        return key in self._contents

    def wants(self, key: BlockKey) -> bool:
        is_known = key in self._contents or key in self._storing
        return not is_known and self._random.random() < self._share

    def stored(self, key: BlockKey) -> None:
        assert key in self._contents or len(self._contents) >= self._capacity

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("the scheduler never blocks")

    # Copies

    @property
    def is_busy(self) -> bool:
        """Whether a transfer has not ended."""
        return bool(self._pending)

    def begin(self, plan: StepPlan) -> None:
        """The plan's transfers begin."""
        by_number: dict[int, list[BlockTransfer]] = {}
        for load in plan.loads:
            by_number.setdefault(load.number, []).append(load)
        for loads in by_number.values():
            self._pending.append((self._random.randrange(self._slowest), True, loads))
        for store in plan.stores:
            self._storing.add((store.key, store.group))
            self._pending.append((self._random.randrange(self._slowest), False, [store]))

    def step(self) -> tuple[list[int], list[int]]:
        """Time passes: the numbers of transfers that have ended, and of those that have failed."""
        done, failed, pending = [], [], []
        for steps, is_load, blocks in self._pending:
            if steps > 0:
                pending.append((steps - 1, is_load, blocks))
            else:
                is_done = self._load(blocks) if is_load else self._store(blocks[0])
                (done if is_done else failed).append(blocks[0].number)
        self._pending = pending
        return done, failed

    def _load(self, blocks: Sequence[BlockTransfer]) -> bool:
        is_done = self._random.random() >= self._failing
        for each in blocks:
            content = self._contents.get((each.key, each.group))
            is_done = is_done and content is not None
            self._runner.fill(each.block, content if is_done else None)
        self.num_loaded += is_done
        self.num_failed += not is_done
        return is_done

    def _store(self, each: BlockTransfer) -> bool:
        key = each.key, each.group
        self._storing.discard(key)
        if self._random.random() < self._failing:
            return False
        self._contents[key] = self._runner.content(each.block)
        while len(self._contents) > self._capacity:
            del self._contents[self._random.choice(list(self._contents))]
        self.num_stored += 1
        return True
