"""Control of a core apart from requests: pause, sleep, reset, profile, query.

The methods serve the verbs of engine/control_verbs.py. Those that wait for the device to be idle
return a `Future` that is done when the steps in flight have been read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from quire.engine.core.adapter_verbs import AdapterVerbs
from quire.engine.core.features import CoreFeature
from quire.engine.core.weight_verbs import BY_NAME, CoreWeights, call_by_name
from quire.engine.unbuilt import UnbuiltCoreMethods
from quire.engine.wire.messages import FIRST_VERSION
from quire.errors import EngineError, InvalidParameter, WeightUpdateError
from quire.executor.abstract import Executor
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import Pause

PAUSE_MODES = ("abort", "wait", "keep")
_LARGEST_LEVEL = 2
WAKE_TAGS = ("weights", "kv_cache", "scheduling")

OF_THE_CORE = {
    "sleep": "Call sleep(), or release_kv_cache_memory(), of the engine.",
    "wake_up": "Call wake_up() of the engine.",
    "close": "Call close() or shutdown() of the engine.",
    "read_adapter": "Call add_lora() of the engine.",
    "keep_adapter": "Call add_lora() of the engine.",
    "drop_adapter": "Call remove_lora() of the engine.",
    **dict.fromkeys(("open_connector", "call_connector"), "Give kv_transfer_config to the engine."),
    "forget_tier": "Call reset_prefix_cache(reset_connector=True) of the engine.",
    "settle_transfers": "Call reset_prefix_cache() of the engine.",
    **dict.fromkeys(("take_transfers", "wait_for_transfers"), "Read the engine's metrics."),
    "connect_trainer": "Call init_weight_transfer_engine() of the engine.",
    "disconnect_trainer": "Call shutdown_weight_transfer_engine() of the engine.",
    "begin_update": "Call start_weight_update() of the engine.",
    "receive_weights": "Call update_weights() of the engine.",
    "finish_receiving": "Call finish_weight_update() of the engine.",
    "commit_update": "Call finish_weight_update() of the engine.",
    "abandon_update": "Call finish_weight_update() of the engine.",
    "spoil_weights": "Call finish_weight_update() of the engine.",
    "restore_update": "The engine restores an update itself after the death of a core.",
    "idle_round": "Cores that share experts make their rounds themselves.",
}
"""Methods of workers that the core alone calls, and what to do instead."""

LEAVE_WEIGHTS = frozenset(
    (
        *("check_health", "get_supported_tasks", "kv_cache_bytes", "profile", "run_first_steps"),
        *(
            "save_sharded_state",
            "check_adapter",
            "compute_weight_checksums",
            "count_weight_changes",
        ),
    )
)
"""Methods after which the weights are surely as before; a user's own may do anything."""


class CoreControl(AdapterVerbs, CoreWeights, UnbuiltCoreMethods, ABC):
    """The control methods of `EngineCore`, and the state that they change: paused, asleep, awake.

    `keeps_weights`: other cores share its experts and compute with its weights while it sleeps.
    `has_own_memory`: the device has memory of its own, from which light sleep moves the weights to
    the host's. Invariants: nothing is scheduled while a tag is in `_asleep`; memory is released
    only when no step is in flight.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        *,
        keeps_weights: bool = False,
        has_own_memory: bool = False,
        features: Sequence[CoreFeature] = (),
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self._keeps_weights = keeps_weights
        self._has_own_memory = has_own_memory
        self.features = features
        self._is_paused = False
        self._waiting: list[tuple[Future[None], Callable[[], None]]] = []
        self._asleep: set[str] = set()
        self._last_before_stop = -1
        """The order of the last request that had come when scheduling was stopped. Those that came
        later wait for its end, whatever stops it again meanwhile.
        """

    @abstractmethod
    def _abort_up_to(self, order: int) -> None:
        """Abort the requests up to this one, with the finish reason "abort"."""

    # pausing

    def pause_scheduler(self, mode: str = "keep", clear_cache: bool = False) -> Future[None]:
        """Stop scheduling: requests are aborted (abort), finished first while new ones queue
        (wait), or frozen (keep). Requests that come later queue, also where scheduling is stopped
        again. Done when the device is idle and, with `clear_cache`, the caches are empty.
        """
        self._is_paused = True
        return self._stop(mode, self._forget_cached if clear_cache else lambda: None)

    def resume_scheduler(self) -> None:
        """Undo `pause_scheduler`; while memory is released, scheduling resumes with `wake_up`."""
        self._is_paused = False
        if self._held():
            return  # the end of the update goes on
        self._abandon_waiting()
        self._go_on()

    def _go_on(self) -> None:
        """Schedule again, unless something else still keeps steps from running."""
        if not self._asleep and not self._is_paused and not self._held():
            self.scheduler.pause = Pause.NONE

    @property
    def has_weights(self) -> bool:
        return "weights" not in self._asleep

    def is_scheduler_paused(self) -> bool:
        """Whether new requests wait, for any reason."""
        return self.scheduler.pause is not Pause.NONE

    def _settle(self) -> None:
        """Complete the calls that waited for an idle device; called after every step."""
        if self._waiting and not self.scheduler.has_work:
            self.scheduler.pause = Pause.ALL
            waiting, self._waiting = self._waiting, []
            for future, then in waiting:
                _complete(future, then)

    def _stop(self, mode: str, then: Callable[[], None]) -> Future[None]:
        if mode not in PAUSE_MODES:
            raise InvalidParameter("mode", mode, f"the modes are {', '.join(PAUSE_MODES)}")
        if self.scheduler.pause is Pause.NONE:
            orders = (request.order for request in self.scheduler.requests.values())
            self._last_before_stop = max(orders, default=-1)
        if mode == "abort":
            self._abort_up_to(self._last_before_stop)
        is_frozen = self.scheduler.pause is Pause.ALL
        # a pause that has frozen everything is not loosened by a later one that would let requests
        # finish
        self.scheduler.pause = Pause.NEW if mode == "wait" and not is_frozen else Pause.ALL
        future: Future[None] = Future()
        self._waiting.append((future, then))
        self._settle()
        return future

    def _abandon_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future, _ in waiting:
            future.set_exception(EngineError("The pause was ended before it was complete."))
        if waiting:
            self._go_on()

    # sleeping

    def sleep(self, level: int = 1, mode: str = "abort") -> Future[None]:
        """Pause and forget cached blocks, then release memory: at level 1 the KV cache, and the
        device memory of the weights, which move to host memory; at level 2 the weights altogether.
        Requests that `mode` keeps compute their K/V again after `wake_up`.
        """
        if not 0 <= level <= _LARGEST_LEVEL:
            raise InvalidParameter("level", level, "the levels are 0, 1 and 2")
        if level == 2 and self._keeps_weights:
            raise InvalidParameter(
                "level", level, "other cores compute with the experts of this one", "Use level 1."
            )
        tags: tuple[str, ...] = ("kv_cache",) if level else ()
        if level == _LARGEST_LEVEL or (level and self._has_own_memory):
            tags = ("weights", *tags)
        if "weights" in tags and self._held():
            raise WeightUpdateError("The weights are being updated: finish the update first.")
        return self._stop(mode, lambda: self._release(tags, keep_weights=level < _LARGEST_LEVEL))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Restore what `sleep` released (None: all); scheduling resumes once everything is
        restored. Discarded weights are loaded again from the checkpoint. Returns whether the core
        is awake now.
        """
        wanted = WAKE_TAGS if tags is None else tuple(tags)
        for tag in wanted:
            if tag not in WAKE_TAGS:
                raise InvalidParameter("tags", tags, f"the tags are {', '.join(WAKE_TAGS)}")
        if not self._held():
            self._abandon_waiting()
        memory = [tag for tag in wanted if tag in self._asleep and tag != "scheduling"]
        if memory:
            self.executor.collective_rpc("wake_up", (memory,), {})
            self._asleep.difference_update(memory)
        if self._asleep == {"scheduling"} and (memory or "scheduling" in wanted):
            self._asleep.clear()
            self._go_on()
        return not self._asleep

    def is_sleeping(self) -> bool:
        """Whether `sleep` is in force, at any level."""
        return bool(self._asleep)

    def release_kv_cache_memory(self) -> None:
        """Release only the KV cache. Raises EngineError unless the core is paused."""
        if self.scheduler.pause is not Pause.ALL or self.scheduler.has_work:
            raise EngineError("KV memory can go only while paused: call sleep(level=0) first.")
        self._release(("kv_cache",))

    def _release(self, tags: tuple[str, ...], *, keep_weights: bool = False) -> None:
        # before the memory goes: transfers may still read and write it
        self._forget_cached()
        if tags:
            if "weights" in tags:
                for feature in self.features:
                    feature.forget_weights()
                if not keep_weights:
                    self._weights_may_differ()
            self.executor.collective_rpc("sleep", (list(tags), keep_weights), {})
        self._asleep.update(tags, ("scheduling",))

    # caches

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached blocks. Returns False while requests hold blocks, unless those may be
        preempted. `reset_connector`: forget what is kept outside of the pool, too.
        """
        # first: the leases of transfers would make blocks look as if requests used them
        for feature in self.features:
            feature.settle()
            if reset_connector:
                feature.forget_contents()
        return self.scheduler.reset_prefix_cache(reset_running_requests=reset_running_requests)

    def reset_mm_cache(self) -> None:
        """Do nothing: a text model has no cache of media."""

    def reset_encoder_cache(self) -> None:
        """Forget the outputs of encoders; what a request still needs is made again."""
        self.scheduler.reset_encoder_cache()

    def _forget_cached(self) -> None:
        for feature in self.features:
            feature.settle()
        self.scheduler.reset_encoder_cache()
        forgotten = self.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert forgotten, "nothing holds blocks when every request was preempted"

    # streams that go on elsewhere

    def get_origin(self) -> list[str]:
        """The K/V's root and the model's name, "" where weights have changed: they are unknown."""
        if self.weight_version != FIRST_VERSION or self._has_changed:
            return ["", ""]
        names = self.executor.collective_rpc("name_origin", (), {})
        return [";".join(name[0] for name in names), names[0][1]]

    def hand_over(self, handles: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """Drop requests that another engine goes on with; returns where the K/V of some is."""
        found = []
        for handle in handles:
            request = self.scheduler.requests.get(handle)
            if request is None:
                continue
            # before the abort, which gives the request's blocks back
            for feature in self.features:
                params = feature.hand_over(request)
                if params is not None:
                    found.append((handle, params))
            self.scheduler.abort(handle)
        return found

    # workers

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The kinds of requests that the model supports."""
        tasks: tuple[str, ...] = self.executor.collective_rpc("get_supported_tasks", (), {})[0]
        return tasks

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any] | Future[list[Any]]:
        """Call a method of every worker by name, or a function with the worker as first argument;
        they are in this process, so `timeout` must be None. Raises InvalidParameter for a method
        by which the core itself changes what workers have.
        """
        if timeout is not None:
            raise ValueError("A worker in this process cannot be given up: leave timeout out.")
        if method in OF_THE_CORE:
            allowed = "the core has to know of it, or it would go on as if nothing had happened"
            raise InvalidParameter("method", method, allowed, OF_THE_CORE[str(method)])
        if method in BY_NAME:
            return _as_list(call_by_name(self, str(method), args, kwargs))
        # each worker reads an iterator to its end
        given = {
            name: list(value) if isinstance(value, Iterator) else value
            for name, value in (kwargs or {}).items()
        }
        results = self.executor.collective_rpc(method, tuple(args), given)
        has_read = method == "update_config" and given.get("is_restored")
        if method == "reload_weights" or has_read:  # where it fails nothing changes
            self._reloaded()
        if method not in LEAVE_WEIGHTS:
            self._weights_may_differ()
            self._note_worker_changes()
        return results

    def profile(
        self,
        is_start: bool = True,
        profile_prefix: str | None = None,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> list[str | None]:
        """Begin or end a trace of every worker's steps; returns the files at the end."""
        given = (is_start, profile_prefix, delay_iterations, max_iterations)
        return self.executor.collective_rpc("profile", given, {})

    def save_sharded_state(
        self, path: str, pattern: str | None = None, max_size: int | None = None
    ) -> list[str]:
        """Write every worker's part of the weights into a folder; returns the files."""
        written = self.executor.collective_rpc("save_sharded_state", (path, pattern, max_size), {})
        return [file for files in written for file in files]


def _as_list(answer: Any) -> list[Any] | Future[list[Any]]:
    """The answer of a method of the core as one of workers."""
    if not isinstance(answer, Future):
        return [None]
    listed: Future[list[Any]] = Future()

    def done(found: Future[Any]) -> None:
        if (error := found.exception()) is not None:
            listed.set_exception(error)
        else:
            listed.set_result([None])

    answer.add_done_callback(done)
    return listed


def _complete(future: Future[None], then: Callable[[], None]) -> None:
    try:
        then()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
