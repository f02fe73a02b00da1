"""The loads and stores of plans: blocks are copied between KV memory, host memory and files by
threads, and no step waits for them.

One thread copies between KV memory and host memory, in the order of the plans; it alone uses the
host store. Files are read and written by others, so that a slow disk delays only what comes from
there. What is stored goes to host memory at once, and from there to a file as soon as the disk has
time; what host memory gives up before has none.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from quire.runner.devices.block_copies import BlockCopies, Mark
from quire.step.plan import BlockTransfer, StepPlan
from quire.step.transfers import CPU, ROWS_GROUP, STORAGE, BlockKey, TierChange, TransferReport
from quire.tiers.checksum import content_sum
from quire.tiers.disk_store import DiskStore
from quire.tiers.host_store import HostStore, StoredContent
from quire.tiers.plan import DiskTierPlan
from quire.tiers.slot_table import SlotTable

logger = logging.getLogger(__name__)

_WAITING_BYTES = 64 << 20
"""Most bytes of contents that are held in host memory until they are written to files."""
_FLUSH_S = 5.0
"""Seconds that an engine that ends waits for these."""
_RETRY_S = 30.0
"""Seconds for which the disk is left alone after it has refused a file or was too slow."""
_PATIENCE_S = 5.0
"""Seconds that loads wait for the next file."""


class OpenDisk(Protocol):
    """Opens the folder of the disk tier, which may take time: the weights' files are read for its
    name. None: it cannot be used.
    """

    def __call__(self) -> DiskStore | None: ...


@dataclass(slots=True, eq=False)
class _Load:
    """A load of blocks, `num_left` of which are not there yet."""

    number: int
    num_left: int
    has_failed: bool = False
    is_broken: bool = False
    """Whether it has failed for another reason than that a content is gone."""

    def fail(self, *, is_broken: bool) -> None:
        """A block of it does not come."""
        self.has_failed, self.is_broken = True, self.is_broken or is_broken


class _Answer:
    """A content that another thread waits for."""

    def __init__(self, key: BlockKey, into: Tensor) -> None:
        self.key, self.into = key, into
        self.has_come = threading.Event()
        self.is_found = False

    def end(self, *, is_found: bool) -> None:
        """It is in its memory, or does not come."""
        self.is_found = is_found
        self.has_come.set()


class BlockTransfers:
    """The tier's side of a worker: `begin` and `take_report` are called by the thread of its steps.

    Invariant: a transfer is reported exactly once, and its blocks are not touched afterwards.
    """

    def __init__(
        self,
        copies: BlockCopies,
        slots: Sequence[Tensor],
        table: SlotTable,
        content_bytes: Sequence[int],
        disk: DiskTierPlan | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """slots: host memory, one for each block, whose `table` may have contents of a process
        before this one. content_bytes: of a block of each KV group. disk: files are kept, too,
        once the folder is opened.
        """
        self._copies = copies
        self._host = HostStore(slots, table)
        self._content_bytes = content_bytes
        self._disk: DiskStore | None = None
        self._lock = threading.Lock()
        self._report = TransferReport([], [], [], is_opening=disk is not None, broken=[])
        self._report.changes += [
            TierChange(*key, True) for key in self._host if key[1] != ROWS_GROUP
        ]
        self._has_news = threading.Event()
        self._reading: dict[int, _Load] = {}
        self._unwritten: dict[BlockKey, None] = {}
        """Contents for which there will be files once fewer wait, in their order."""
        self._waiting_bytes = 0
        self._all_written = threading.Event()
        self._all_written.set()
        self._generation = 0
        """Times that contents were forgotten: work that was begun before is dropped."""
        self._leaves_files = False
        """Whether files are for other engines alone."""
        self._refused_at: float | None = None
        self._clock = clock
        self._read_at, self._hangs_until = clock(), -math.inf
        """Time when a file was read last, or the first of those that are waited for was asked for;
        and time until which none is read.
        """
        self._copying = _Lane("kv copies", 1)
        self._reads = _Lane("kv reads", disk.num_readers) if disk is not None else None
        self._writes = _Lane("kv writes", disk.num_writers) if disk is not None else None

    def open(self, open_disk: OpenDisk, *, now: bool) -> None:
        """Open the folder; not `now`: while steps run, as it takes time."""
        assert self._writes is not None, "the plan has a folder"
        if now:
            self._open(open_disk, self._generation)
        else:
            self._writes.submit(partial(self._open, open_disk, self._generation))

    # The thread of steps

    def begin(self, plan: StepPlan) -> None:
        """Begin the transfers of a plan, when all that earlier steps have queued is done."""
        # taken now and waited for in the copying thread: on a device, steps that were queued before
        # may still write the blocks
        mark = self._copies.mark()
        for store in plan.stores:
            self._copying.submit(partial(self._store, store, mark))
        by_number: dict[int, list[BlockTransfer]] = {}
        for load in plan.loads:
            by_number.setdefault(load.number, []).append(load)
        for number, blocks in by_number.items():
            self._copying.submit(partial(self._load, _Load(number, len(blocks)), blocks, mark))

    def take_report(self) -> TransferReport:
        self._look_at_reads()
        with self._lock:
            report = self._report
            self._report = TransferReport([], [], [], is_opening=report.is_opening, broken=[])
            self._has_news.clear()
        return report

    def _look_at_reads(self) -> None:
        """Give loads up that wait longer for files than computing would take; while the disk hangs,
        nothing is read from it.
        """
        if self._reading and self._clock() - self._read_at > _PATIENCE_S:
            self._hangs_until = self._clock() + _RETRY_S
            self._copying.submit(partial(self._give_up_reads, is_broken=True))
            self._read_at = self._clock()
            logger.warning("K/V is not read from files for %g s: the disk is too slow.", _RETRY_S)

    def wait(self, timeout_s: float) -> None:
        self._has_news.wait(timeout_s)

    def settle(self) -> None:
        """Return when no transfer is under way: copies are waited for, what is still to be read
        from files has failed.
        """
        is_done = threading.Event()
        self._copying.submit(partial(self._give_up_reads, is_broken=False))
        self._copying.submit(is_done.set)
        is_done.wait()

    def forget(self, *, keeps_files: bool) -> None:
        """Forget all contents; no transfer is under way. keeps_files: files stay for other engines,
        and this one uses them no more: its weights are not those of the start.
        """
        is_done = threading.Event()
        self._copying.submit(partial(self._forget, keeps_files, is_done))
        is_done.wait()

    def close(self) -> None:
        """End the threads; what waits to be written to files is, if the disk takes it soon."""
        end, is_done = time.monotonic() + _FLUSH_S, threading.Event()
        self._copying.submit(is_done.set)  # by then all that was stored is offered to the disk
        if is_done.wait(_FLUSH_S):
            self._all_written.wait(_left_until(end))
        for lane in (self._copying, self._reads, self._writes):
            if lane is not None:
                lane.close(_left_until(end))

    # Contents that are not blocks

    @property
    def slot_bytes(self) -> int:
        """The bytes of the largest content."""
        return max(self._content_bytes)

    def put(self, key: BlockKey, content: Tensor) -> None:
        """Store [B] uint8 of the host, which nobody writes any more."""
        self._copying.submit(partial(self._put, key, content, self._generation))

    def get(self, wanted: Sequence[tuple[BlockKey, Tensor]], timeout_s: float) -> bool:
        """Fill [B] uint8 of the host with contents. False: some are not there, or did not come in
        time; then memory that was given may be written later.
        """
        answers = [_Answer(key, into) for key, into in wanted]
        for answer in answers:
            self._copying.submit(partial(self._get, answer, self._generation))
        end = time.monotonic() + timeout_s
        for answer in answers:
            if not answer.has_come.wait(max(0.0, end - time.monotonic())):
                self._hangs_until = self._clock() + _RETRY_S
                return False
        return all(answer.is_found for answer in answers)

    # The thread of copies

    def _put(self, key: BlockKey, content: Tensor, generation: int) -> None:
        if generation != self._generation or key in self._host:
            return

        def fill(slot: Tensor) -> bytes:
            slot[: content.nbytes] = content
            return content_sum(slot[: content.nbytes].numpy())

        self._keep(key, content.nbytes, fill)

    def _get(self, answer: _Answer, generation: int) -> None:
        key, size = answer.key, answer.into.nbytes
        if generation != self._generation:
            answer.end(is_found=False)
            return
        content = self._host.get(key)
        if content is not None:
            answer.into[:] = content.slot[:size]
            is_right = content.num_bytes == size
            is_right = is_right and content_sum(answer.into.numpy()) == content.checksum
            if not is_right:
                self._host.drop(key)
            answer.end(is_found=is_right)
        elif self._reads is None or self._disk is None or self._hangs or not self._disk.has(key):
            answer.end(is_found=False)
        else:
            self._reads.submit(partial(self._get_file, self._disk, answer, generation))

    def _get_file(self, disk: DiskStore, answer: _Answer, generation: int) -> None:
        is_found = False
        try:
            is_found = disk.get(answer.key, answer.into.numpy()) is not None
        except OSError as error:
            logger.warning("A file of an encoder's rows was not read: %s", error)
        if is_found:
            self._copying.submit(partial(self._put, answer.key, answer.into, generation))
        answer.end(is_found=is_found and generation == self._generation)

    def _store(self, store: BlockTransfer, mark: Mark | None) -> None:
        key = store.key, store.group
        stored = 0
        try:
            # two requests may have published one content before the first store ended
            if key not in self._host:
                if mark is not None:
                    mark.wait()
                read = partial(self._copies.read, store.group, store.block)
                if not self._keep(key, self._content_bytes[store.group], read):
                    self._end(store.number, has_failed=True)  # files are written too slowly
                    return
                stored = self._content_bytes[store.group]
            self._end(store.number, has_failed=False, stored=stored)
        except Exception:
            logger.exception("A block of K/V could not be stored.")
            self._end(store.number, has_failed=True)

    def _keep(self, key: BlockKey, num_bytes: int, fill: Callable[[Tensor], bytes]) -> bool:
        """Store a content that is not in host memory, and offer it to the disk. False: there is no
        room. See `_fill_slot`.
        """
        if (place := self._make_room()) is None:
            return False
        self._fill_slot(place, key, num_bytes, fill)
        self._offer_to_disk(key)
        return True

    def _make_room(self) -> int | None:
        """A free slot of host memory; None: there is none."""
        found = self._host.make_room()
        if found is None:
            return None
        place, evicted = found
        if evicted is not None:
            # told before the slot is filled, so that the scheduler's index never names what is gone
            self._note(evicted, CPU, is_there=False)
        return place

    def _fill_slot(
        self, place: int, key: BlockKey, num_bytes: int, fill: Callable[[Tensor], bytes]
    ) -> None:
        """Store a content in host memory; `fill` returns its checksum."""
        try:
            checksum = fill(self._host.slot(place))
        except BaseException:
            self._host.give_back(place)
            raise
        # last: a process that dies before this leaves a slot without a commit mark, which is empty
        # for the next one
        self._host.commit(place, key, num_bytes, checksum)
        self._note(key, CPU, is_there=True)

    def _load(self, load: _Load, blocks: Sequence[BlockTransfer], mark: Mark | None) -> None:
        try:
            if mark is not None:
                mark.wait()
        except Exception:
            logger.exception("Blocks of K/V could not be loaded.")
            load.fail(is_broken=True)
        if not self._reading:
            self._read_at = self._clock()
        self._reading[load.number] = load
        # what is in host memory is used before files take slots of it
        for each in sorted(blocks, key=lambda each: (each.key, each.group) not in self._host):
            key = each.key, each.group
            content = self._host.get(key)
            if content is not None:
                self._fill(load, each, content.slot, content.checksum)
            elif self._disk is None or self._reads is None or not self._disk.has(key):
                self._miss(load, key)
            elif self._hangs:
                self._miss(load, key, is_broken=True)
            else:
                self._reads.submit(
                    partial(self._read, self._disk, load, each, self._make_room(), self._generation)
                )

    @property
    def _hangs(self) -> bool:
        return self._clock() <= self._hangs_until

    def _fill(self, load: _Load, each: BlockTransfer, slot: Tensor, checksum: bytes) -> None:
        key = each.key, each.group
        try:  # also where another block is missing: damage is noticed, so that it can be replaced
            is_right = self._copies.write(each.group, each.block, slot) == checksum
        except Exception:
            logger.exception("A block of K/V could not be loaded.")
            load.fail(is_broken=True)
            is_right = True
        if not is_right:
            logger.warning("A block of K/V in host memory is damaged: it is not used.")
            if key in self._host:
                self._host.drop(key)
                self._note(key, CPU, is_there=False)
            self._miss(load, key, is_broken=True)
            return
        self._count(load, self._content_bytes[each.group])

    def _arrived(
        self,
        load: _Load,
        each: BlockTransfer,
        place: int | None,
        found: tuple[Tensor, bytes] | None,
        generation: int,
        is_broken: bool,
    ) -> None:
        """A file was read for a load, which may have been given up meanwhile: `found` is its
        content, with the checksum, at a `place` of host memory that is its own (None: elsewhere).
        Without one the file is gone, or `is_broken`.
        """
        self._read_at = self._clock()
        key = each.key, each.group
        # what was forgotten may be of other weights; its load was given up before they changed
        if place is not None:
            if found is None or generation != self._generation or key in self._host:
                self._host.give_back(place)
            else:
                checksum = found[1]
                self._fill_slot(place, key, self._content_bytes[each.group], lambda slot: checksum)
        if generation != self._generation:
            return
        if found is None:
            self._miss(load, key, is_broken=is_broken)
        # given up meanwhile: its blocks may have other owners, but the content is kept in host
        # memory for the next request
        elif load.number in self._reading:
            self._fill(load, each, *found)

    def _miss(self, load: _Load, key: BlockKey, *, is_broken: bool = False) -> None:
        load.fail(is_broken=is_broken)
        if self._disk is None or not self._disk.has(key):
            self._note(key, STORAGE, is_there=False)
        if key not in self._host:
            self._note(key, CPU, is_there=False)
        self._count(load, 0)

    def _count(self, load: _Load, num_bytes: int) -> None:
        load.num_left -= 1
        if load.num_left == 0 and self._reading.pop(load.number, None) is not None:
            self._end(
                load.number,
                has_failed=load.has_failed,
                loaded=num_bytes,
                is_broken=load.is_broken,
            )
        else:
            with self._lock:
                self._report.loaded_bytes += num_bytes

    def _give_up_reads(self, *, is_broken: bool) -> None:
        for load in list(self._reading.values()):
            del self._reading[load.number]
            load.fail(is_broken=is_broken)
            self._end(load.number, has_failed=True, is_broken=is_broken)

    def _forget(self, keeps_files: bool, is_done: threading.Event) -> None:
        self._generation += 1
        disk = self._disk
        try:
            for key in self._host:
                self._note(key, CPU, is_there=False)
            for key in disk.contents() if disk is not None else ():
                self._note(key, STORAGE, is_there=False)
            self._host.clear()
            self._unwritten.clear()
            if keeps_files:
                self._host.disown()
                self._disk, self._leaves_files = None, True
            elif disk is not None:
                disk.clear()
        finally:
            is_done.set()

    # Files

    def _open(self, open_disk: OpenDisk, generation: int) -> None:
        disk = None
        try:
            disk = open_disk()
        except Exception:
            logger.exception("The folder for K/V cannot be used: K/V is kept in memory alone.")
        self._copying.submit(partial(self._opened, disk, generation))

    def _opened(self, disk: DiskStore | None, generation: int) -> None:
        """The folder can be used, unless the weights have changed since. What was forgotten while
        it was opened is deleted now.
        """
        try:
            if disk is not None and not self._leaves_files:
                if generation != self._generation:
                    disk.clear()
                self._disk = disk
                for key in disk.contents():
                    self._note(key, STORAGE, is_there=True)
                for key in list(self._host):
                    self._offer_to_disk(key)
        finally:
            with self._lock:
                self._report.is_opening = False
                self._has_news.set()

    def _read(
        self,
        disk: DiskStore,
        load: _Load,
        each: BlockTransfer,
        place: int | None,
        generation: int,
    ) -> None:
        key, found, is_broken = (each.key, each.group), None, False
        if load.number in self._reading:  # also where another block of the load is missing
            size = self._content_bytes[each.group]
            slot = torch.empty(size, dtype=torch.uint8) if place is None else self._host.slot(place)
            try:
                checksum = disk.get(key, slot[:size].numpy())
            except OSError as error:
                logger.warning("A file of K/V was not read: %s", error)
                checksum, is_broken = None, True
            if checksum is not None:
                found = slot, checksum
        arrived = partial(self._arrived, load, each, place, found, generation, is_broken)
        self._copying.submit(arrived)

    def _offer_to_disk(self, key: BlockKey) -> None:
        """Have a content of host memory written to a file, when the disk has time."""
        if self._disk is not None:
            self._unwritten[key] = None
            self._write_next()

    def _write_next(self) -> None:
        """Have contents written, as long as few wait."""
        while self._unwritten:
            key = next(iter(self._unwritten))
            content, disk = self._host.peek(key), self._disk
            if content is None or disk is None or disk.has(key) or self._is_refused:
                del self._unwritten[key]
                continue
            size = content.num_bytes
            with self._lock:
                # one of any size is always let through, or large blocks would never be written
                if self._waiting_bytes and self._waiting_bytes + size > _WAITING_BYTES:
                    break
                self._waiting_bytes += size
            del self._unwritten[key]
            # too many of the slots are held already: a copy, so that slow disks do not freeze host
            # memory
            if not self._host.hold(content):
                content = replace(content, slot=content.slot.clone(), num_holders=0)
            assert self._writes is not None, "there is a disk"
            self._writes.submit(partial(self._write, disk, key, content, self._generation))
        with self._lock:
            is_idle = not self._unwritten and not self._waiting_bytes
        (self._all_written.set if is_idle else self._all_written.clear)()

    @property
    def _is_refused(self) -> bool:
        return self._refused_at is not None and self._clock() - self._refused_at < _RETRY_S

    def _write(
        self, disk: DiskStore, key: BlockKey, content: StoredContent[Tensor], generation: int
    ) -> None:
        evicted: list[BlockKey] = []
        try:
            # checked again: it may have waited long
            if generation == self._generation and not self._is_refused:
                evicted = disk.put(
                    key,
                    content.slot[: content.num_bytes].numpy(),
                    content.checksum,
                    lambda: generation == self._generation,
                )
        except OSError as error:
            self._refused_at = self._clock()
            logger.warning(
                "K/V cannot be written to %s (%s): nothing is written for %g s.",
                *(disk.folder, error.strerror or error, _RETRY_S),
            )
        finally:
            with self._lock:
                self._waiting_bytes -= content.num_bytes
        self._copying.submit(partial(self._written, disk, key, content, evicted, generation))

    def _written(
        self,
        disk: DiskStore,
        key: BlockKey,
        content: StoredContent[Tensor],
        evicted: Sequence[BlockKey],
        generation: int,
    ) -> None:
        # before the generation is looked at: what was held and room for the next file come back in
        # any case
        if content.num_holders:
            self._host.release(key, content)
        self._write_next()
        if generation != self._generation:
            return
        for other in evicted:
            self._note(other, STORAGE, is_there=False)
        self._note(key, STORAGE, is_there=disk.has(key))

    # Reports

    def _note(self, key: BlockKey, medium: str, *, is_there: bool) -> None:
        if key[1] == ROWS_GROUP:
            return  # the scheduler looks for blocks
        with self._lock:
            self._report.changes.append(TierChange(*key, is_there, medium))
            self._has_news.set()

    def _end(
        self,
        number: int,
        *,
        has_failed: bool,
        loaded: int = 0,
        stored: int = 0,
        is_broken: bool = False,
    ) -> None:
        with self._lock:
            (self._report.failed if has_failed else self._report.done).append(number)
            if is_broken:
                self._report.broken.append(number)
            self._report.loaded_bytes += loaded
            self._report.stored_bytes += stored
            self._has_news.set()


def _left_until(end: float) -> float:
    return max(0.0, end - time.monotonic())


class _Lane:
    """Threads that call functions in the order in which they are submitted."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[[], object]) -> None:
        self._work.put(function)

    def close(self, timeout_s: float) -> None:
        """Let the threads end after what was submitted; those that a disk holds are left alone."""
        for _ in self._threads:
            self._work.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(_left_until(end))

    def _run(self) -> None:
        while (function := self._work.get()) is not None:
            try:
                function()
            except Exception:
                logger.exception("A transfer of K/V has failed.")
