"""The feature of a core whose K/V is kept outside of the pool, too: the index of what is there."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from quire.engine.core.features import CoreFeature
from quire.engine.wire.messages import SchedulerStats
from quire.executor.abstract import Executor
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import Pause
from quire.step.transfers import BlockKey, TransferReport

logger = logging.getLogger(__name__)

_POLLS_BETWEEN = 256
"""Steps between two polls for changes that come without a transfer."""


class SharedIndex:
    """The contents that every worker has, as `Tier` for the scheduler.

    It may lag behind the workers: a load of what is gone meanwhile fails, which costs only time.
    """

    def __init__(self, executor: Executor, threshold: int = 1, most_seen: int = 64_000) -> None:
        """threshold: the computation of a content at which it is stored. most_seen: contents whose
        computations are counted.
        """
        self._executor = executor
        self._by_worker: list[set[BlockKey]] = []
        self._threshold, self._most_seen = threshold, most_seen
        self._seen: OrderedDict[BlockKey, int] = OrderedDict()

    def has(self, key: BlockKey) -> bool:
        return bool(self._by_worker) and all(key in known for known in self._by_worker)

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
        """Take in the changes that the workers report."""
        if not self._by_worker:
            self._by_worker = [set() for _ in reports]
        for known, report in zip(self._by_worker, reports, strict=True):
            for change in report.changes:
                key = change.key, change.group
                if change.is_there:
                    known.add(key)
                else:
                    known.discard(key)


class KVTier(CoreFeature):
    """Takes in the ends of loads and stores, between steps."""

    def __init__(self, scheduler: Scheduler, executor: Executor, index: SharedIndex) -> None:
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
        return ()

    def is_busy(self) -> bool:
        if self._scheduler.pause is Pause.ALL:
            return False
        return bool(self._transfers.num_under_way or self._transfers.has_changes)

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
            for number in (*report.done, *report.failed):
                ended = self._num_ended.pop(number, 0) + 1
                if ended < len(reports):
                    self._num_ended[number] = ended
                elif number in self._failed:
                    self._failed.discard(number)
                    failed.append(number)
                else:
                    done.append(number)
        if done or failed:
            self._scheduler.end_transfers(done, failed)
