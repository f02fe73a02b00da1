"""The table of control verbs: what may be asked of an engine as a whole, besides requests.

An entry is one verb: its arguments and docstring, as users see them, the call that it sends to
every core, how the cores' answers are combined, whether the call may be repeated after a core has
died, and whether it is replayed in a restarted core. From it follow the method of `LLM` and
`LLMEngine`, which blocks, that of `AsyncLLM`, which is awaited, and the remote call.

To add a verb, write its entry here and its method in `CoreControl` (engine/core/control.py). A verb
that HTTP clients may use has a row in server/admin.py, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from quire.engine.unbuilt import UnbuiltAsyncMethods
from quire.engine.weight_methods import (
    SPOILED,
    UPDATED,
    AwaitedWeightMethods,
    BlockingWeightMethods,
    WeightVerbs,
)
from quire.engine.wire.control_calls import (
    CoreMethod,
    PauseMode,
    Utility,
    Verb,
    first,
    joined,
    united,
    verb,
)
from quire.engine.wire.declared_types import argument_types
from quire.engine.wire.handover import Origin
from quire.engine.wire.messages import AdapterRef
from quire.errors import InvalidParameter, InvalidType
from quire.lora.request import LoRARequest

_LOADED, _FOLDER, _FORMAT = "weights", "folder of weights", "format of weights"
"""Names of the last calls that have loaded weights, and that have said where they are read from:
their folder, and the format of its files alone.
"""


def _place_of_weights(
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Hashable | None:
    """A fresh core has the weights of its folder, and not those that it was told to load since."""
    if method == "finish_weight_update":
        return UPDATED
    if method == "update_config":
        return _FOLDER if _names_folder(args, kwargs) else _FORMAT
    is_told = method == "reload_weights" and (args or kwargs)
    return _LOADED if is_told else None


def _replayed(
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """A fresh core reads weights again from where they were, but has not got those of an update."""
    told = {"finish_weight_update": {"is_lost": True}, "update_config": {"is_restored": True}}
    more = told.get(method, {}) if isinstance(method, str) else {}
    return method, timeout, args, {**(kwargs or {}), **more}


def _forgotten(
    method: str | Callable[..., Any],
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Hashable, ...]:
    """Weights that are read from files are no longer those of an update. A call that names files
    takes the place of earlier ones, and comes after those that it goes on from.
    """
    if method == "reload_weights":
        path = args[1] if len(args) > 1 else (kwargs or {}).get("weights_path")
        files = () if path is None else (_FOLDER, _FORMAT)
        return UPDATED, SPOILED, *files, *((_LOADED,) if args or kwargs else ())
    if method == "update_config":
        return (_FOLDER, _FORMAT, _LOADED) if _names_folder(args, kwargs) else (_FORMAT,)
    return (SPOILED,) if method == "finish_weight_update" else ()


def _names_folder(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether the overrides of `update_config`, which has succeeded, name a folder."""
    return "model_config" in (args[0] if args else (kwargs or {})["overrides"])


class WorkerVerbs:
    """Verbs for workers, also of clients that block (`engine_core.save_sharded_state`)."""

    @verb(
        combine=joined,
        is_repeatable=False,
        keeps=_place_of_weights,
        drops=_forgotten,
        replay=_replayed,
    )
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Utility[list[Any]]:
        """Call a method of every worker by name, or a function with each worker as first argument;
        one result for each worker. Functions go to workers in other processes only where
        QUIRE_ALLOW_INSECURE_SERIALIZATION=1 allows it.

        Raises TimeoutError after `timeout` seconds. The call itself is not ended: a core in another
        process, or whoever uses one in this process next, goes on when it is done. Raises
        InvalidParameter for a method, such as "sleep", by which the core itself changes what
        workers have: call the engine's.
        """
        return Utility("collective_rpc", (method, None, list(args), dict(kwargs or {})), timeout)

    @verb()
    def save_sharded_state(
        self,
        path: str | os.PathLike[str],
        pattern: str | None = None,
        max_size: int | None = None,
    ) -> Utility[list[str]]:
        """Write each worker's part of the weights into files in `path`, for
        load_format="sharded_state", and return their names; config.json and the tokenizer's files
        are the caller's to copy. `max_size`: bytes of a file at most.

        Raises InvalidParameter for a `pattern` other than None or the one that is looked for.
        """
        return Utility("save_sharded_state", (os.fspath(path), pattern, max_size))


class ControlVerbs(WorkerVerbs):
    """The verbs of every face."""

    @verb(combine=all)
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> Utility[bool]:
        """Forget all cached blocks. Returns False (and changes nothing) while requests use some.

        With `reset_running_requests` these are preempted first and compute their blocks again.
        `reset_connector`: also forget what is kept outside of the pool, in host memory and in files
        of this model.
        """
        return Utility("reset_prefix_cache", (reset_running_requests, reset_connector))

    @verb()
    def reset_mm_cache(self) -> Utility[None]:
        """Forget processed media that are kept for prompts. A model of text has none."""
        return Utility("reset_mm_cache")

    @verb()
    def reset_encoder_cache(self) -> Utility[None]:
        """Forget encoders' outputs; what is needed is made again. A model of text has none."""
        return Utility("reset_encoder_cache")

    # "keep" in a restarted core: the requests that it gets again had outlived the call
    @verb(begins="asleep", replay=lambda level=1, *_: (level, "keep"))
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> Utility[None]:
        """Stop scheduling and forget cached blocks. Level 0 keeps all memory; level 1 gives the KV
        cache back, and on a GPU the weights' memory, which move to the host's; level 2 gives back
        the weights altogether. Requests can still be added and wait for `wake_up`.

        `mode` "abort" ends the requests there are, "wait" finishes those that run first, "keep"
        leaves them to go on after `wake_up`. Done when the device is idle. A second call ends none
        of those that were added since the first.
        """
        return Utility("sleep", (level, mode))

    @verb(combine=all, ends="asleep")
    def wake_up(self, tags: list[str] | None = None) -> Utility[bool]:
        """Take back "weights", "kv_cache" and "scheduling" (None: all); whether the engine is now
        fully awake. Weights that were given up are loaded again as they were at the start.
        """
        return Utility("wake_up", (None if tags is None else list(tags),))

    @verb(combine=all)
    def is_sleeping(self) -> Utility[bool]:
        """Whether `sleep` is in force, at any level."""
        return Utility("is_sleeping")

    @verb(begins="asleep")
    def release_kv_cache_memory(self) -> Utility[None]:
        """Give back the KV cache alone. Raises EngineError unless paused, as by sleep(level=0)."""
        return Utility("release_kv_cache_memory")

    @verb("profile", combine=joined, is_repeatable=False, convert=lambda files: None)
    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> Utility[None]:
        """Begin a trace of the steps, in a file of `profiler_config`'s folder whose name starts
        with `profile_prefix`, after `delay_iterations` steps and of `max_iterations` at most (None:
        as configured).

        Raises InvalidParameter without `profiler_config`, ProfilerAlreadyActive.
        """
        return Utility("profile", (True, profile_prefix, delay_iterations, max_iterations))

    @verb(
        "profile", combine=joined, is_repeatable=False, convert=lambda files: [*filter(None, files)]
    )
    def stop_profile(self) -> Utility[list[str]]:
        """End the trace; the files that were written, one for each worker."""
        return Utility("profile", (False,))

    @verb(convert=tuple)
    def get_supported_tasks(self) -> Utility[tuple[str, ...]]:
        """The kinds of requests that the model supports."""
        return Utility("get_supported_tasks")

    @verb()
    def check_lora(self, lora_request: LoRARequest) -> Utility[None]:
        """Raise RequestError for an adapter that cannot be used, as far as its config and the names
        and shapes of its tensors say so; nothing is loaded. `LLM.generate` and the like ask this
        first.
        """
        return Utility("check_lora", (AdapterRef.of(lora_request).folder,))

    @verb(
        combine=all,
        keeps=lambda name, lora_id, *_: ("loaded", lora_id),
        # not `load_inplace`: a restarted core has to read it anyway
        replay=lambda name, lora_id, folder, *_: (name, lora_id, folder, False),
    )
    def add_lora(self, lora_request: LoRARequest) -> Utility[bool]:
        """Read an adapter into the engine's memory, so that its first request need not wait; with
        `load_inplace` also where its files look the same. Raises RequestError for an adapter that
        cannot be used, and for an engine without adapters.
        """
        asked = AdapterRef.of(lora_request)
        again = lora_request.load_inplace
        return Utility("add_lora", (asked.name, asked.id, asked.folder, again))

    @verb(combine=any, drops=lambda lora_id: (("loaded", lora_id), ("pinned", lora_id)))
    def remove_lora(self, lora_id: int) -> Utility[bool]:
        """Forget an adapter; False if none with this id is in memory. Requests that have it end as
        usual, and one that names it again reads it again.
        """
        return Utility("remove_lora", (lora_id,))

    @verb(combine=all, keeps=lambda lora_id: ("pinned", lora_id))
    def pin_lora(self, lora_id: int) -> Utility[bool]:
        """Keep an adapter in memory, and in its slot as soon as it has one, until it is removed.
        Raises RequestError for an id that is not in memory, and if all slots are pinned.
        """
        return Utility("pin_lora", (lora_id,))

    @verb(convert=set, combine=united)
    def list_loras(self) -> Utility[set[int]]:
        """The ids of the adapters that are in memory."""
        return Utility("list_loras")


class BlockingControl(ControlVerbs, BlockingWeightMethods):
    """The verbs of `LLM` and `LLMEngine`: each blocks until it is done."""

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Call `func` with the model of every worker. It goes to a core in another process only
        where QUIRE_ALLOW_INSECURE_SERIALIZATION=1 allows it. Raises InvalidType for what cannot be
        called.
        """
        if not callable(func):
            raise InvalidType("func", func, "it must be a function")
        return self.collective_rpc("apply_model", args=(func,))


class AwaitedControl(ControlVerbs, UnbuiltAsyncMethods, AwaitedWeightMethods):
    """The verbs of `AsyncLLM`: each is awaited."""

    @verb("pause_scheduler", begins="paused", replay=lambda *_: ("keep", False))
    def pause_generation(
        self,
        mode: PauseMode | bool = "abort",
        clear_cache: bool = True,
        *,
        wait_for_inflight_requests: bool | None = None,
    ) -> Utility[None]:
        """Schedule nothing more: requests there end (abort), finish first (wait) or freeze (keep);
        new ones queue, and a second call ends none of them. Done when the device is idle.

        The older form is taken too: `wait_for_inflight_requests`, by name or first, is "wait" or
        "abort".
        """
        if wait_for_inflight_requests is not None:
            mode = wait_for_inflight_requests
        if isinstance(mode, bool):
            mode = "wait" if mode else "abort"
        return Utility("pause_scheduler", (mode, clear_cache))

    @verb("resume_scheduler", ends="paused")
    def resume_generation(self) -> Utility[None]:
        """Go on after `pause_generation`."""
        return Utility("resume_scheduler")

    @verb("is_scheduler_paused", combine=all)
    def is_paused(self) -> Utility[bool]:
        """Whether nothing is scheduled."""
        return Utility("is_scheduler_paused")

    @verb(convert=lambda names: Origin(*names))
    def get_origin(self) -> Utility[Origin]:
        """Name what the engine's tokens depend on, for another one that would go on with its
        streams. The files of the model are read where their digests are not known.
        """
        return Utility("get_origin")

    @verb(combine=joined, is_repeatable=False)
    def hand_over(self, handles: Sequence[int]) -> Utility[list[Any]]:
        """Drop requests that another engine goes on with. Returns pairs of a request and the
        `kv_transfer_params` by which that one can pull its K/V, where a connector serves it.
        """
        return Utility("hand_over", (list(handles),))


UTILITIES: dict[str, CoreMethod] = {
    entry.core.name: entry.core
    for face in (WorkerVerbs, WeightVerbs, ControlVerbs, AwaitedControl)
    for entry in vars(face).values()
    if isinstance(entry, Verb)
}
"""The methods of a core that may be called from outside."""


def perform(core: object, method: str, args: Sequence[Any]) -> Any:
    """Call one of the core's utilities; a `concurrent.futures.Future` where the answer comes with a
    later step. Raises InvalidParameter for any other name, InvalidType for an argument of another
    type than the method declares, else what the utility raises.
    """
    if method not in UTILITIES:
        raise InvalidParameter("method", method, f"a core has {', '.join(sorted(UTILITIES))}")
    argument_types(getattr(type(core), method)).check(core, *args)
    return getattr(core, method)(*args)


def combined(utility: Utility[Any], answers: Sequence[Any]) -> Any:
    """The one answer of several cores, in the order of their indices."""
    method = UTILITIES.get(utility.method)
    return first(answers) if method is None else method.combine(answers)
