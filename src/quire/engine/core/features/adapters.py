"""The LoRA adapters of a core: which contents a request's folder has, and which are in memory.

Folders are read in a thread, while steps go on. An adapter's number follows from its contents, so a
folder with other contents is another adapter, whatever name or id the request gives it, and folders
of equal contents share weights and blocks. But what is read for a request is the folder that it
names, never another one that had the same contents once. The slots that the model computes with are
the scheduler's (scheduling/adapter_slots.py).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future

from quire.engine.core.adapter_folders import KnownFolders, read_unchanged, remember
from quire.engine.core.adapter_loading import AdapterLoading, FolderReader
from quire.engine.core.features import CoreFeature
from quire.engine.wire.messages import AdapterRef, EngineCoreRequest, SchedulerStats
from quire.errors import InvalidParameter, RequestError
from quire.executor.abstract import Executor
from quire.lora.request import ADAPTER_FAILED, ADAPTERS_ARE_OFF
from quire.scheduling.request import Request
from quire.scheduling.scheduler import Scheduler
from quire.step.plan import StepPlan

logger = logging.getLogger(__name__)

_CHANGED = "its files have changed since the request began"
_FEW = 64
"""Ended requests that may stay in `_asked` before they are looked for."""


class AdaptersOff(CoreFeature):
    """Refuses requests that have an adapter, in a core without adapters."""

    fields = ("adapter",)

    def prepare(self, request: Request, message: EngineCoreRequest) -> None:
        raise RequestError(ADAPTERS_ARE_OFF, parameter="lora_request")


class AdapterStore(CoreFeature):
    """Resolves the adapters of requests and keeps the most recently used in host memory.

    Invariants: at most `most_kept` adapters are kept, besides those that have just been read, and
    known by as many ids, besides those that are pinned;
    `scheduler.adapters.kept` are exactly these. Only the core's thread changes anything but the
    workers' memory.
    """

    fields = ("adapter",)

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Executor,
        most_kept: int,
        *,
        reads_aside: bool = True,
    ) -> None:
        """`reads_aside`: while steps run, in a thread; else steps wait."""
        assert scheduler.adapters is not None, "the scheduler has slots"
        self._scheduler = scheduler
        self._slots = scheduler.adapters
        self._workers = workers
        self._most_kept = most_kept
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._known = KnownFolders()
        self._ids: OrderedDict[int, AdapterRef] = OrderedDict()
        self._names: OrderedDict[int, str] = OrderedDict()
        self._asked: dict[int, AdapterRef] = {}
        """Adapter that each request asked for, by its handle; some ended requests are still there.
        """
        self._pins: dict[int, str] = {}
        """Pinned folders by adapter id. A pin is for the folder, whatever its contents become."""
        self._reader = FolderReader(workers.read_adapter, is_aside=reads_aside)
        self._failed: list[tuple[int, str]] = []

    # requests

    def prepare(self, request: Request, message: EngineCoreRequest) -> None:
        ref = message.adapter
        assert ref is not None, "the request concerns adapters"
        self._remember(request, ref)
        number = self._known.number(ref.folder, self._is_there)
        if number is None:
            loading = self._load(ref.folder)
            loading.requests.append((request, ref))
            request.prerequisites = [*request.prerequisites, loading]
            return
        self._check(ref, number)
        self._register(ref, number)
        request.adapter = number

    def asked_by(self, request: Request) -> AdapterRef | None:
        return self._asked.get(request.handle)

    def poll(self) -> list[tuple[int, str]]:
        """Take in what has been read; returns the requests that end by it, with the reason."""
        while (loading := self._reader.take()) is not None:
            self._finish(loading)
        self._reader.begin()
        failed, self._failed = self._failed, []
        return failed

    def planned(self, plan: StepPlan | None) -> None:
        """Begin to read what the last planned step lacked."""
        for number in self._slots.wanted:
            if number in self._kept:
                self._kept.move_to_end(number)
            elif not any(number in loading.wanted for loading in self._reader):
                for request in self._waiting_for(number)[:1]:
                    self._load(self._asked[request.handle].folder).wanted.add(number)
        self._reader.begin()

    def is_busy(self) -> bool:
        return bool(self._failed) or any(loading.calls for loading in self._reader)

    def wait(self, timeout_s: float) -> None:
        self._reader.wait(timeout_s)

    # calls

    def check(self, folder: str) -> None:
        """Raise RequestError for a folder whose adapter cannot be used, as far as that shows before
        its values are read. What has been read and is unchanged is not checked again.
        """

        def checked(folder: str) -> int:
            self._workers.check_adapter(folder)
            return 0

        if self._known.number(folder, self._is_there) is None:
            read_unchanged(checked, folder)

    def add(self, ref: AdapterRef, *, again: bool = False) -> Future[bool]:
        """Read and keep an adapter (`again`: even unchanged). The future may raise RequestError."""
        if again:
            self._known.forget(ref.folder)
        answer: Future[bool] = Future()
        number = self._known.number(ref.folder, self._is_there)
        if number is None or not self._is_there(number):
            self._load(ref.folder).calls.append((answer, ref))
        else:
            self._register(ref, number)
            answer.set_result(True)
        return answer

    def remove(self, adapter_id: int) -> bool:
        """Forget an adapter; False if its id is unknown. Requests that have it end as usual."""
        if adapter_id not in self.ids():
            return False
        number = self._number_of(self._ids.pop(adapter_id))
        self._pins.pop(adapter_id, None)
        self._apply_pins()
        if number is None or number in map(self._number_of, self._ids.values()):
            return True
        if all(request.adapter != number for request in self._scheduler.requests.values()):
            self._slots.forget([number])
            self._drop(number)
        return True

    def pin(self, adapter_id: int) -> None:
        """Keep an adapter in memory, and in a slot once it has one. Requests that can never run by
        it end. Raises RequestError.
        """
        # an `add` that is not answered yet: the pin is set when the weights are there
        for loading in self._reader:
            if any(ref.id == adapter_id for _, ref in loading.calls):
                loading.pins.add(adapter_id)
                return
        number = self._number_of(self._ids[adapter_id]) if adapter_id in self.ids() else None
        if number is None:
            allowed = "no adapter with this id is loaded"
            raise InvalidParameter("lora_id", adapter_id, allowed, "Add it before, with add_lora.")
        if self._slots.is_hopeless(number):
            allowed = f"all {self._slots.num_slots} slots (max_loras) are pinned"
            raise InvalidParameter("lora_id", adapter_id, allowed)
        self._pins[adapter_id] = self._ids[adapter_id].folder
        self._apply_pins()

    def ids(self) -> set[int]:
        """The ids of the adapters that are in memory."""
        return {i for i, ref in self._ids.items() if self._is_there(self._number_of(ref))}

    def report(self, stats: SchedulerStats) -> None:
        """Add the names of running requests' adapters, and of those that wait for a slot."""
        waiting = dict.fromkeys(r.adapter for r in self._scheduler.waiting if r.adapter)
        unread = [ref.name for each in self._reader for _, ref in each.requests]
        stats.running_adapters = self._names_of(self._slots.in_use)
        stats.waiting_adapters = [*self._names_of(waiting), *unread]

    def forget_weights(self) -> None:
        """The memory of the slots is released: fill them again where they are used."""
        self._slots.forget(self._slots.in_slots)

    def close(self) -> None:
        self._reader.close()

    # details

    def _apply_pins(self) -> None:
        """Pin what the pinned folders have now; where that is more than there are slots, those that
        were pinned first. Waiting requests that can never run by it end.
        """
        numbers = map(self._known.last_number, self._pins.values())
        distinct = dict.fromkeys(number for number in numbers if number is not None)
        pinned = set(list(distinct)[: self._slots.num_slots])
        if pinned == self._slots.pinned:
            return
        self._slots.pinned = pinned
        for request in list(self._scheduler.waiting):
            if request.adapter and self._slots.is_hopeless(request.adapter):
                self._end(request, _text(self._asked[request.handle], self._no_slot()))

    def _names_of(self, numbers: Iterable[int]) -> list[str]:
        return [self._names[number] for number in numbers if number in self._names]

    def _is_there(self, number: int | None) -> bool:
        return number in self._kept or number in self._slots.in_slots

    def _number_of(self, ref: AdapterRef) -> int | None:
        return self._known.last_number(ref.folder)

    def _check(self, ref: AdapterRef, number: int) -> None:
        """Raise RequestError unless a request may run with these contents."""
        if ref.number not in (0, number):
            raise RequestError(_text(ref, _CHANGED))
        if self._slots.is_hopeless(number):
            raise RequestError(_text(ref, self._no_slot()))

    def _no_slot(self) -> str:
        return f"all {self._slots.num_slots} slots (max_loras) are pinned for others"

    def _register(self, ref: AdapterRef, number: int) -> None:
        remember(self._ids, ref.id, ref)
        remember(self._names, number, ref.name)
        if number in self._kept:
            self._kept.move_to_end(number)
        if len(self._ids) > self._most_kept:
            self._forget_ids(ref.id)

    def _forget_ids(self, latest: int) -> None:
        """Forget ids until there are as many as adapters that may be kept: several may share one.
        What is pinned stays, and `latest`.
        """
        there = self.ids()
        others = [each for each in self._ids if each in there - {latest, *self._pins}]
        for adapter_id in others[: max(0, len(there) - self._most_kept)]:
            del self._ids[adapter_id]

    def _load(self, folder: str) -> AdapterLoading:
        """Have a folder read, or join those that wait for it. What has been read already may be
        outdated and is for them alone.
        """
        if (loading := self._reader.take(folder)) is not None:
            self._finish(loading)
        return self._reader.load(folder)

    def _finish(self, loading: AdapterLoading) -> None:
        assert loading.future is not None, "it has been read"
        loading.is_ready = True
        error = loading.future.exception()
        if error is not None:
            self._fail(loading, error)
            return
        read = loading.future.result()
        self._known.note(loading.folder, read)
        self._apply_pins()
        for number in set(read.others) - {read.number}:
            self._discard(number)
        if read.number in loading.dropped:  # before or after it was read: nobody knows
            self._discard(read.number)
        else:
            self._keep(read.number)
        for request, ref in loading.requests:
            if self._scheduler.requests.get(request.handle) is request:
                self._name(request, ref, read.number)
        for number in loading.wanted - {read.number}:
            self._replace(number, loading.folder, read.number)
        for answer, ref in loading.calls:
            self._register(ref, read.number)
            if ref.id in loading.pins and not self._slots.is_hopeless(read.number):
                self._pins[ref.id] = ref.folder
                self._apply_pins()
            _settle(answer, self._no_memory(read.number))

    def _no_memory(self, number: int) -> RequestError | None:
        """The reason why an adapter that was read could not stay in memory."""
        if self._is_there(number) or len(self._slots.pinned) < self._most_kept:
            return None
        return RequestError(f"all {self._most_kept} adapters in memory (max_cpu_loras) are pinned")

    def _name(self, request: Request, ref: AdapterRef, number: int) -> None:
        try:
            self._check(ref, number)
        except RequestError as error:
            self._end(request, str(error))
        else:
            self._register(ref, number)
            self._scheduler.name_adapter(request, number)

    def _replace(self, number: int, folder: str, new: int) -> None:
        """A folder has other contents by now: requests for it that have not begun take these."""
        for request in self._waiting_for(number, folder):
            if request.num_cached_tokens is None and not request.output_token_ids:
                self._scheduler.name_adapter(request, new)
            else:
                self._end(request, _text(self._asked[request.handle], _CHANGED))

    def _fail(self, loading: AdapterLoading, error: BaseException) -> None:
        if not isinstance(error, RequestError):
            logger.error("The adapter in %s was not read.", loading.folder, exc_info=error)
            error = RequestError(f"reading it failed ({type(error).__name__})")
        for request, ref in loading.requests:
            if self._scheduler.requests.get(request.handle) is request:
                self._end(request, _text(ref, str(error)))
        for number in loading.wanted:
            for request in self._waiting_for(number, loading.folder):
                self._end(request, _text(self._asked[request.handle], str(error)))
        for answer, _ in loading.calls:
            _settle(answer, error)

    def _waiting_for(self, number: int, folder: str | None = None) -> list[Request]:
        """The requests that wait for a slot with these weights; of a folder, those that name it."""
        waiting = [request for request in self._scheduler.waiting if request.adapter == number]
        if folder is None:
            return waiting
        return [each for each in waiting if self._asked[each.handle].folder == folder]

    def _remember(self, request: Request, ref: AdapterRef) -> None:
        self._asked[request.handle] = ref
        live = self._scheduler.requests
        if len(self._asked) > 2 * len(live) + _FEW:
            kept = {request.handle, *live}
            self._asked = {handle: ref for handle, ref in self._asked.items() if handle in kept}

    def _end(self, request: Request, text: str) -> None:
        self._scheduler.abort(request.handle)
        self._failed.append((request.handle, text))

    # host memory

    def _keep(self, number: int) -> None:
        """Note that an adapter is in host memory, and drop what has been used longest ago."""
        self._kept[number] = None
        self._kept.move_to_end(number)
        self._slots.kept.add(number)
        protected = {*self._slots.needed, *self._slots.pinned}
        spare = [n for n in self._kept if n not in protected]
        for victim in spare[: len(self._kept) - self._most_kept]:
            self._drop(victim)

    def _drop(self, number: int) -> None:
        if number in self._kept:
            del self._kept[number]
            self._slots.kept.remove(number)
            self._discard(number)

    def _discard(self, number: int) -> None:
        if number in self._kept:
            return
        for loading in self._reader:
            if loading.future is not None:
                loading.dropped.add(number)
        self._workers.drop_adapter(number)


def _text(ref: AdapterRef, reason: str) -> str:
    return f"{ADAPTER_FAILED} {ref.name[:80]!r}: {reason}"


def _settle(answer: Future[bool], error: BaseException | None) -> None:
    if not answer.set_running_or_notify_cancel():
        return
    if error is None:
        answer.set_result(True)
    else:
        answer.set_exception(error)
