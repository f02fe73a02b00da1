"""The feature of a core whose K/V is kept outside of the pool, too: the index of what is there."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from quire.engine.core.features import CoreFeature
from quire.engine.wire.messages import SchedulerStats
from quire.executor.abstract import Executor
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import Pause
from quire.step.transfers import CPU, STORAGE, BlockKey, TransferReport

logger = logging.getLogger(__name__)

LOAD_FAILED = "its K/V could not be loaded (kv_load_failure_policy: fail)"
"""The error of a request that is not computed instead."""
_POLLS_BETWEEN = 256
"""Steps between two polls for changes that come without a transfer."""


class TierListener(Protocol):
    """Is told of contents of the tier that all workers have."""

    def tier_changed(self, medium: str, key: BlockKey, *, is_there: bool) -> None:
        """A content has come to a medium, or has gone from it."""
        ...


class SharedIndex:
    """The contents that every worker has, as `Tier` for the scheduler.

    It may lag behind the workers: a load of what is gone meanwhile fails, which costs only time.
    """

    def __init__(self, executor: Executor, threshold: int = 1, most_seen: int = 64_000) -> None:
        """threshold: computations of a content before it is stored. most_seen: contents counted."""
        self._executor = executor
        self._by_worker: list[dict[str, set[BlockKey]]] = []
        self.listeners: list[TierListener] = []
        self._threshold, self._most_seen = threshold, most_seen
        self._seen: OrderedDict[BlockKey, int] = OrderedDict()

    def has(self, key: BlockKey) -> bool:
        if not self._by_worker:
            return False
        return all(any(key in kept for kept in media.values()) for media in self._by_worker)

    def all_have(self, medium: str, key: BlockKey) -> bool:
        return all(key in media[medium] for media in self._by_worker)

    def contents(self) -> Iterator[tuple[str, BlockKey]]:
        """The media, and the contents that every worker has there."""
        for medium, kept in self._by_worker[0].items() if self._by_worker else ():
            yield from ((medium, key) for key in kept if self.all_have(medium, key))

    def wants(self, key: BlockKey) -> bool:
        if self.has(key):
            return False
        if self._threshold == 1:
            return True
        count = self._seen.pop(key, 0) + 1
        self._seen[key] = count
        if len(self._seen) > self._most_seen:
            self._seen.popitem(last=False)
        return count >= self._threshold

    def stored(self, key: BlockKey) -> None:
        """Do nothing: the workers report the content itself."""

    def wait(self, timeout_s: float) -> None:
        self._executor.collective_rpc("wait_for_transfers", (timeout_s,), {})

    def note(self, reports: Sequence[TransferReport]) -> None:
        if not self._by_worker:
            self._by_worker = [{CPU: set(), STORAGE: set()} for _ in reports]
        for media, report in zip(self._by_worker, reports, strict=True):
            for change in report.changes:
                key, kept = (change.key, change.group), media[change.medium]
                if change.is_there == (key in kept):
                    continue
                was_there = self.all_have(change.medium, key)
                (kept.add if change.is_there else kept.discard)(key)
                if was_there != (is_there := self.all_have(change.medium, key)):
                    for listener in self.listeners:
                        listener.tier_changed(change.medium, key, is_there=is_there)


class KVTier(CoreFeature):
    """Takes in the ends of loads and stores, between steps."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, index: SharedIndex, *, fails: bool = False
    ) -> None:
        """fails: a request ends with an error where what is stored for it cannot be read."""
        self._fails = fails
        self._ends: list[tuple[int, str]] = []
        self._broken: set[int] = set()
        self._scheduler, self._executor, self._index = scheduler, executor, index
        assert scheduler.transfers is not None, "a scheduler with a tier"
        self._transfers = scheduler.transfers
        self._num_ended: dict[int, int] = {}
        """Transfers that some workers have ended -> how many."""
        self._failed: set[int] = set()
        self.is_opening = True
        """Whether the workers have yet to open their folders."""
        self._has_own_weights = False
        self._polls_left = 0
        self.loaded_bytes = self.stored_bytes = 0

    def poll(self) -> Sequence[tuple[int, str]]:
        self._polls_left -= 1
        if self._transfers.num_under_way or self.is_opening or self._polls_left < 0:
            self._take()
        ends, self._ends = self._ends, []
        return [end for end in ends if self._scheduler.abort(end[0])]

    def is_busy(self) -> bool:
        if self._scheduler.pause is Pause.ALL:
            return False
        return bool(self._ends or self._transfers.num_under_way or self._transfers.has_changes)

    def wait(self, timeout_s: float) -> None:
        if self._transfers.num_under_way:
            self._index.wait(timeout_s)

    def settle(self) -> None:
        if self._has_own_weights:  # what was computed while they changed is of both
            self._forget(keeps_files=True)
        else:
            self._end_transfers()

    def forget_contents(self) -> None:
        self._forget(keeps_files=False)

    def weights_may_differ(self) -> None:
        if not self._has_own_weights:
            self._has_own_weights = True
            logger.warning(
                "The weights may not be those of the checkpoint any more: K/V is stored in memory "
                "alone from now on, and what was stored before is not used."
            )
        self._forget(keeps_files=True)

    def report(self, stats: SchedulerStats) -> None:
        stats.kv_offload_load_bytes, self.loaded_bytes = self.loaded_bytes, 0
        stats.kv_offload_store_bytes, self.stored_bytes = self.stored_bytes, 0

    def _end_transfers(self) -> None:
        if self._transfers.num_under_way:
            self._executor.collective_rpc("settle_transfers", (), {})
            self._take()

    def _forget(self, *, keeps_files: bool) -> None:
        self._end_transfers()
        self._executor.collective_rpc("forget_tier", (keeps_files,), {})
        # at once: the scheduler must not be told any more of what is gone
        self._take()

    def _take(self) -> None:
        """Take in what the workers report; a transfer has ended when it has on all of them."""
        self._polls_left = _POLLS_BETWEEN
        answers = self._executor.collective_rpc("take_transfers", (), {})
        # from processes of ranks they come as plain values
        reports = [msgspec.convert(answer, TransferReport) for answer in answers]
        self._index.note(reports)
        self.is_opening = any(report.is_opening for report in reports)
        done, failed = [], []
        for report in reports:
            self.loaded_bytes += report.loaded_bytes
            self.stored_bytes += report.stored_bytes
            self._failed.update(report.failed)
            self._broken.update(report.broken)
            for number in (*report.done, *report.failed):
                ended = self._num_ended.pop(number, 0) + 1
                if ended < len(reports):
                    self._num_ended[number] = ended
                elif number in self._failed:
                    self._failed.discard(number)
                    failed.append(number)
                else:
                    done.append(number)
        for number in failed:
            if number in self._broken:
                self._broken.discard(number)
                self._end_request_of(number)
        if done or failed:
            self._scheduler.end_transfers(done, failed)

    def _end_request_of(self, number: int) -> None:
        """End the request whose load could not be read, under the policy "fail"."""
        handle = self._transfers.loads_for(number) if self._fails else None
        if handle is not None:
            self._ends.append((handle, LOAD_FAILED))
