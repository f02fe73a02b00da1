"""One offline caller's requests: many prompts in, outputs in order; its thread makes the steps."""

from __future__ import annotations

import copy
import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, Self, TypeVar

from quire.engine.frontend.output_processor import AnyOutput, failure_of
from quire.engine.llm_engine import LLMEngine
from quire.engine.progress import Progress
from quire.errors import EngineDeadError, EngineError, InvalidParameter
from quire.lora.request import LoRARequest
from quire.params import PoolingParams, RequestOutputKind, RequestParams, SamplingParams
from quire.request_options import BatchOptions, RequestOptions

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def one_at_a_time(method: Callable[P, T]) -> Callable[P, T]:
    """Have other threads' calls wait for the method; its own may use `self`, but not in a step."""

    @wraps(method)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        llm: Any = args[0]
        with llm._lock:
            llm._requests.require_idle()
            return method(*args, **kwargs)

    return alone


class OfflineRequests:
    """Queues prompts under consecutive ids, and waits for their outputs.

    Invariant: `_queued` has the ids whose outputs have not been fetched, in order, with the
    engine's own ids; the finished ones among them are the keys of `_finished`. A call that raises
    leaves none of its own behind, and those of earlier calls as they were. Ctrl-C acts between two
    prompts and between two steps, where the engine is whole.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._next_id = 0
        self._queued: dict[str, str] = {}
        self._finished: dict[str, AnyOutput] = {}
        self._is_busy = False

    def require_idle(self) -> None:
        """Raises EngineError while another call works: in a step nothing else can be done."""
        if self._is_busy:
            raise EngineError(
                "A logits processor, a progress bar or a signal handler called this LLM while a "
                "call of the same thread was running. Call it after that call has returned."
            )

    def run(self, batch: OfflineBatch, use_tqdm: bool | Callable[..., Any]) -> list[Any]:
        """Queue prompts, wait for their outputs and return them in order."""
        with self._working() as work:
            self._add(batch, work, False)
            return self._outputs(work.ids, work.interrupt, use_tqdm)

    def enqueue(
        self, batch: OfflineBatch, use_tqdm: bool | Callable[..., Any] = False
    ) -> list[str]:
        """Queue prompts and return their ids; an error in one removes those before it."""
        with self._working() as work:
            self._add(batch, work, use_tqdm)
        return work.ids

    def wait(self, use_tqdm: bool | Callable[..., Any]) -> list[Any]:
        """Wait for the outputs of all that is queued and return them in order. If this fails, by
        Ctrl-C too, nothing stays queued, unless the engine is asleep.
        """
        self._require_awake(len(self._queued.keys() - self._finished.keys()))
        with self._working() as work:
            work.ids += self._queued
            return self._outputs(work.ids, work.interrupt, use_tqdm)

    def forget(self) -> None:
        """Drop what is queued, and outputs that have not been fetched."""
        self._queued.clear()
        self._finished.clear()

    @contextmanager
    def _working(self) -> Iterator[_Work]:
        """While a call works; where it raises, its requests are aborted and forgotten."""
        work = _Work()
        try:
            with DeferredInterrupt() as work.interrupt:
                self._is_busy = True
                try:
                    yield work
                finally:
                    self._is_busy = False
        except BaseException:
            self._drop(work.ids)
            raise

    def _drop(self, ids: Iterable[str]) -> None:
        own = [self._queued.pop(request_id, None) for request_id in ids]
        self._engine.discard_requests(filter(None, own), internal=True)
        for request_id in ids:
            self._finished.pop(request_id, None)

    def _add(self, batch: OfflineBatch, work: _Work, use_tqdm: bool | Callable[..., Any]) -> None:
        each = batch.each()
        # before anything is queued: an adapter that cannot be used is the fault of the whole call
        for adapter in batch.adapters():
            self._engine.check_lora(adapter)
        with (
            Progress(use_tqdm, batch.total, "Adding requests")
            if use_tqdm and batch.total
            else nullcontext() as bar
        ):
            for prompt, params, options in each:
                request_id = str(self._next_id)
                self._next_id += 1
                work.ids.append(request_id)
                group = self._engine.front_end.add(request_id, prompt, params, options)
                self._queued[request_id] = group.internal_id
                if bar is not None:
                    bar.tick()
                work.interrupt.check()

    def _outputs(
        self, ids: Sequence[str], interrupt: DeferredInterrupt, use_tqdm: bool | Callable[..., Any]
    ) -> list[Any]:
        with (
            Progress(use_tqdm, len(ids), "Processed prompts")
            if use_tqdm and len(ids)
            else nullcontext() as bar
        ):
            self._complete(ids, bar, interrupt)
        for request_id in ids:
            self._queued.pop(request_id, None)
        outputs = [self._finished.pop(request_id) for request_id in ids]
        _warn_of_failures(outputs)
        return outputs

    def _complete(
        self, wanted: Collection[str], bar: Progress | None, interrupt: DeferredInterrupt
    ) -> None:
        """Step the engine until every request id in `wanted` is in `_finished`.

        Raises EngineError while the engine is asleep, because the wait would never end.
        """
        missing = set(wanted) - self._finished.keys()
        self._require_awake(len(missing))
        while missing:
            outputs = self._step()
            _require_outputs(self._engine, outputs, len(missing))
            for output in filter(lambda output: output.finished, outputs):
                self._finished[output.request_id] = output
                if output.request_id in missing:
                    missing.remove(output.request_id)
                    if bar is not None:
                        bar.note(output, is_failed=failure_of(output) is not None)
            interrupt.check()

    def _step(self) -> list[AnyOutput]:
        """One step. After one that was broken off, by a second Ctrl-C too, nobody knows how far it
        came: then all requests are aborted, so that the engine is clean.
        """
        try:
            return self._engine.step()
        except EngineDeadError:
            # nothing is left of its requests that could be aborted
            raise
        except BaseException:
            self._engine.discard_all()
            self.forget()
            raise

    def _require_awake(self, num_missing: int) -> None:
        if num_missing and self._engine.front_end.is_asleep:
            raise EngineError(
                f"{num_missing} requests wait, but the engine is asleep. "
                f'Call wake_up(tags=["scheduling"]) first.'
            )


class _Work:
    """A call that works: the ids of its requests, and Ctrl-C meanwhile."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.interrupt = DeferredInterrupt()


def _warn_of_failures(outputs: Sequence[AnyOutput]) -> None:
    """Say once that requests of a batch have failed, which their outputs say one by one."""
    reasons = enumerate(map(failure_of, outputs))
    failed = [(place, reason) for place, reason in reasons if reason is not None]
    if failed:
        place, reason = failed[0]
        logger.warning(
            "%d of %d requests failed; `error` in their outputs says why. The first, number %d: %s",
            *(len(failed), len(outputs), place, reason),
        )


@dataclass(slots=True, kw_only=True)
class OfflineBatch:
    """The prompts of a call, `total` in number, and one value for all or for each."""

    prompts: Iterable[object]
    total: int
    params: RequestParams | Sequence[RequestParams]
    options: BatchOptions

    def each(self) -> Iterable[tuple[object, Any, RequestOptions]]:
        """(prompt, parameters, options) of each. Raises InvalidParameter for a wrong length."""
        params = self.params
        one = params[0] if isinstance(params, Sequence) and params else params
        name = "pooling_params" if isinstance(one, PoolingParams) else "sampling_params"
        each_params = [_final_only(own) for own in _one_each(name, params, self.total)]
        return zip(
            self.prompts, each_params, options_of_each(self.options, self.total), strict=True
        )

    def adapters(self) -> list[LoRARequest]:
        return _distinct(_one_each("lora_request", self.options.lora_request, self.total))


def _require_outputs(engine: LLMEngine, outputs: list[AnyOutput], num_missing: int) -> None:
    if not outputs and not engine.has_unfinished_requests():
        raise EngineError(
            f"{num_missing} requests have ended, but not in this call: "
            f"somebody else stepped the engine."
        )


class DeferredInterrupt:
    """A context in which Ctrl-C is deferred to the next `check()`, at the latest to the end; a
    second Ctrl-C acts at once.

    A step that is interrupted half-way would leave the scheduler and the runner with different
    views of the same requests, and a message that was received but not counted would be missed.
    Outside the main thread, or where the program has installed its own handler, this does nothing.
    """

    def __init__(self) -> None:
        self._is_due = False
        self._before: Any = None

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        # a program's own handler stays; others than the main thread have none
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None
        # a Ctrl-C must not hide the error
        if kind is None:
            self.check()

    def check(self) -> None:
        """Raise the deferred KeyboardInterrupt, if there was one."""
        if self._is_due:
            self._is_due = False
            raise KeyboardInterrupt

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self._is_due:
            signal.default_int_handler(signum, frame)
        self._is_due = True


def options_of_each(options: BatchOptions, total: int) -> list[RequestOptions]:
    """Options of each of `total` prompts. Raises InvalidParameter for a list of another length."""
    given = 0 if options.priority is None else options.priority
    priorities = _one_each("priority", given, total)
    adapters = _one_each("lora_request", options.lora_request, total)
    kwargs = options.tokenization_kwargs
    return [
        RequestOptions(priority=number, lora_request=adapter, tokenization_kwargs=kwargs)
        for number, adapter in zip(priorities, adapters, strict=True)
    ]


def _one_each(name: str, given: Any, total: int) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * total
    if len(given) != total:
        allowed = f"it must be one value for all, or one for each of the {total} prompts"
        raise InvalidParameter(name, f"<{len(given)} items>", allowed)
    return list(given)


def _distinct(adapters: Iterable[Any]) -> list[LoRARequest]:
    """Each folder's adapter once; what is not an adapter is refused with its prompt."""
    asked = [adapter for adapter in adapters if isinstance(adapter, LoRARequest)]
    return list({adapter.lora_path: adapter for adapter in asked}.values())


def _final_only(params: Any) -> Any:
    """A copy of the parameters that asks for one output at the end."""
    if not isinstance(params, SamplingParams):
        return params
    own = copy.copy(params)
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own
