"""Encoders of the hash model that fail, and whose rows come some steps late."""

from __future__ import annotations

import random

from quire.step.media import MediaItem
from quire.step.plan import StepPlan
from tests.support.simulation.hash_model import HashEncoder, encode


class FailingEncoder(HashEncoder):
    """Cannot encode some items, now and then."""

    def __init__(self, num_rows: int, pick: random.Random, depth: int) -> None:
        """depth: how many steps are planned before the result of the first one is known."""
        super().__init__(num_rows)
        self._random = pick
        self._depth = depth
        self._step_id = 0
        self._failed_at: dict[bytes, int] = {}
        self._failing = pick.choice((0.0, 0.0, 0.1, 0.3))
        self.num_encoded = self.num_failed = self.num_dropped = 0

    def change(self, plan: StepPlan, weights: int) -> None:
        """Drop and encode what a plan says."""
        self._step_id = plan.step_id
        self.num_dropped += len(plan.dropped_outputs)
        super().change(plan, weights)
        self._failed_at |= dict.fromkeys(self.failed_in_step(plan), plan.step_id)

    def rows(self, digest: bytes) -> list[int] | None:
        """The rows of an item; None if the scheduler may not know yet that they were not made."""
        rows = super().rows(digest)
        since = self._step_id - self._failed_at.get(digest, 0)
        assert rows is not None or since < self._depth, "rows are used that failed"
        return rows

    @property
    def is_busy(self) -> bool:
        """Whether rows are on their way."""
        return False

    def step(self) -> tuple[list[bytes], dict[bytes, str]]:
        """Time passes: what is there now, and what could not be made."""
        return [], {}

    def _encode(self, item: MediaItem, weights: int) -> list[int] | None:
        fails = self._random.random() < self._failing
        self.num_encoded += 1
        self.num_failed += fails
        return None if fails else encode(item, weights)


class LateEncoder(FailingEncoder):
    """Begins with a plan, and has the rows some steps later."""

    def __init__(self, num_rows: int, pick: random.Random, depth: int) -> None:
        super().__init__(num_rows, pick, depth)
        self._slowest = pick.choice((1, 3, 10))
        self._pending: list[tuple[int, MediaItem, int]] = []
        """Steps until an item is encoded, and the number of the weights."""

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def change(self, plan: StepPlan, weights: int) -> None:
        """Drop what the plan says, and begin."""
        self.num_dropped += len(plan.dropped_outputs)
        self._step_id = plan.step_id
        for digest in plan.dropped_outputs:
            self._outputs.pop(digest, None)  # it may have failed
        for item in plan.encodings:
            on_its_way = [pending.digest for _, pending, _ in self._pending]
            assert item.digest not in [*on_its_way, *self._outputs], "rows are made twice"
            self._pending.append((self._random.randrange(self._slowest), item, weights))
        rows = [len(rows) for rows in self._outputs.values() if rows is not None]
        rows += [item.num_rows for _, item, _ in self._pending]
        assert sum(rows) <= self._num_rows, "more rows are kept than there is room for"

    def failed_in_step(self, plan: StepPlan) -> list[bytes]:
        """None: failures come as late as rows do."""
        return []

    def step(self) -> tuple[list[bytes], dict[bytes, str]]:
        done, failed, pending = [], {}, []
        for steps, item, weights in self._pending:
            if steps > 0:
                pending.append((steps - 1, item, weights))
                continue
            rows = self._encode(item, weights)
            if rows is None:
                failed[item.digest] = self.FAILURE
            else:
                self._outputs[item.digest] = rows
                done.append(item.digest)
        self._pending = pending
        return done, failed
