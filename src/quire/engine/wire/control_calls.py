"""What a front end may ask of a core beside requests: one typed call for each question.

A call is a value. Clients have one method for all of them (`client.call(utility.is_sleeping())`),
synchronous or not, so that a client that wraps another, or speaks to several cores, handles each
call alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from quire.errors import InvalidParameter

T = TypeVar("T")

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of the requests there are: ended, finished first, or frozen."""


@dataclass(frozen=True, slots=True)
class Utility(Generic[T]):
    """A method of the core with its arguments, which gives a T. `timeout_s` is how long the caller
    waits (None: as long as it takes).
    """

    method: str
    args: tuple[Any, ...] = ()
    timeout_s: float | None = None


UTILITIES = frozenset(
    {
        *("reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache"),
        *("pause_scheduler", "resume_scheduler", "is_scheduler_paused"),
        *("sleep", "wake_up", "is_sleeping", "release_kv_cache_memory"),
        *("collective_rpc", "profile", "get_supported_tasks", "get_weight_version"),
    }
)
"""The methods of `CoreControl` that may be called from outside; each has its function below."""


class Controlled(Protocol):
    """A core with its control."""

    @property
    def control(self) -> object: ...


def perform(core: Controlled, method: str, args: Sequence[Any]) -> Any:
    """Call one of the core's utilities; a `concurrent.futures.Future` where the answer comes with a
    later step. Raises InvalidParameter for any other name, else what the utility raises.
    """
    if method not in UTILITIES:
        raise InvalidParameter("method", method, f"a core has {', '.join(sorted(UTILITIES))}")
    return getattr(core.control, method)(*args)


def combined(utility: Utility[Any], results: Sequence[Any]) -> Any:
    """The one answer of several cores, in the order of their indices."""
    if utility.method in ("reset_prefix_cache", "wake_up", "is_sleeping", "is_scheduler_paused"):
        return all(results)
    if utility.method in ("collective_rpc", "profile"):
        return [result for each in results for result in each]
    return results[0]


def reset_prefix_cache(
    reset_running_requests: bool = False, reset_connector: bool = False
) -> Utility[bool]:
    """Forget cached blocks; False while requests hold blocks."""
    return Utility("reset_prefix_cache", (reset_running_requests, reset_connector))


def reset_mm_cache() -> Utility[None]:
    """Forget media that were processed."""
    return Utility("reset_mm_cache")


def reset_encoder_cache() -> Utility[None]:
    """Forget what encoders made of media."""
    return Utility("reset_encoder_cache")


def pause_scheduler(mode: PauseMode = "keep", clear_cache: bool = False) -> Utility[None]:
    """Schedule nothing more. The answer comes when the device is idle."""
    return Utility("pause_scheduler", (mode, clear_cache))


def resume_scheduler() -> Utility[None]:
    """Go on where `pause_scheduler` stopped."""
    return Utility("resume_scheduler")


def is_scheduler_paused() -> Utility[bool]:
    """Whether nothing is scheduled."""
    return Utility("is_scheduler_paused")


def sleep(level: int = 1, mode: PauseMode = "abort") -> Utility[None]:
    """Stop scheduling and, from level 1 on, give memory back."""
    return Utility("sleep", (level, mode))


def wake_up(tags: Sequence[str] | None = None) -> Utility[bool]:
    """Take back what `sleep` gave (None: all of it); whether the core is awake now."""
    return Utility("wake_up", (None if tags is None else list(tags),))


def is_sleeping() -> Utility[bool]:
    """Whether `sleep` is in force."""
    return Utility("is_sleeping")


def release_kv_cache_memory() -> Utility[None]:
    """Give back the KV cache alone, while paused."""
    return Utility("release_kv_cache_memory")


def get_supported_tasks() -> Utility[tuple[str, ...]]:
    """What requests can be for."""
    return Utility("get_supported_tasks")


def get_weight_version() -> Utility[str]:
    """The name of the weights that compute."""
    return Utility("get_weight_version")


def collective_rpc(
    method: str | Callable[..., Any],
    timeout_s: float | None = None,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Utility[list[Any]]:
    """Call a method of every worker, by name. A function is for cores in this process only."""
    return Utility("collective_rpc", (method, list(args), kwargs or {}), timeout_s)


def profile(is_start: bool, prefix: str | None = None) -> Utility[list[str | None]]:
    """Begin or end a trace of the workers' steps; the files when it ends."""
    return Utility("profile", (is_start, prefix))
