"""What `AsyncLLM` does to its engine as a whole: pause, sleep, reset, profile, ask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from quire.engine.unbuilt import UnbuiltAsyncMethods
from quire.engine.wire import control_calls
from quire.engine.wire.control_calls import PauseMode
from quire.errors import EngineError

T = TypeVar("T")


class AsyncControl(UnbuiltAsyncMethods, ABC):
    """The awaited twin of the utilities; `_call` sends one and waits for its answer."""

    @abstractmethod
    async def _call(self, call: control_calls.Utility[T]) -> T: ...

    @abstractmethod
    def _note_sleep(self, level: int | None) -> None: ...

    @abstractmethod
    async def _scale(self, num_cores: int, drain_timeout_s: float) -> None: ...

    async def pause_generation(
        self,
        mode: PauseMode | bool = "abort",
        clear_cache: bool = True,
        *,
        wait_for_inflight_requests: bool | None = None,
    ) -> None:
        """Schedule nothing more: requests there are end (abort), finish first (wait) or freeze
        (keep); new ones queue. Done when the device is idle.

        The older form is taken too: `wait_for_inflight_requests`, by name or first, is "wait" or
        "abort".
        """
        if wait_for_inflight_requests is not None:
            mode = wait_for_inflight_requests
        if isinstance(mode, bool):
            mode = "wait" if mode else "abort"
        await self._call(control_calls.pause_scheduler(mode, clear_cache))

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self._call(control_calls.resume_scheduler())

    async def is_paused(self) -> bool:
        """Whether nothing is scheduled."""
        return await self._call(control_calls.is_scheduler_paused())

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stop scheduling, and give memory back: the KV cache (1), the weights too (2)."""
        await self._call(control_calls.sleep(level, mode))
        self._note_sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take back "weights", "kv_cache" and "scheduling" (None: all); whether all is back."""
        is_awake = await self._call(control_calls.wake_up(tags))
        if is_awake:
            self._note_sleep(None)
        return is_awake

    async def is_sleeping(self) -> bool:
        """Whether `sleep` is in force, at any level."""
        return await self._call(control_calls.is_sleeping())

    async def release_kv_cache_memory(self) -> None:
        """Give back the KV cache alone, while paused."""
        await self._call(control_calls.release_kv_cache_memory())

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached blocks; False while requests use some."""
        return await self._call(
            control_calls.reset_prefix_cache(reset_running_requests, reset_connector)
        )

    async def reset_mm_cache(self) -> None:
        """Forget processed media; a text model has none, so nothing changes."""
        await self._call(control_calls.reset_mm_cache())

    async def reset_encoder_cache(self) -> None:
        """Forget encoders' outputs; a text model has none, so nothing changes."""
        await self._call(control_calls.reset_encoder_cache())

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name. Raises TimeoutError."""
        call = control_calls.collective_rpc(method, timeout, args, dict(kwargs or {}))
        return await self._call(call)

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin a trace of the steps; needs `profiler_config`."""
        await self._call(control_calls.profile(True, profile_prefix))

    async def stop_profile(self) -> list[str]:
        """End the trace; the files that were written."""
        files = await self._call(control_calls.profile(False))
        return [file for file in files if file is not None]

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What requests can be for."""
        tasks = await self._call(control_calls.get_supported_tasks())
        return tuple(tasks)

    async def scale_elastic_ep(
        self, new_data_parallel_size: int, drain_timeout: float = 300
    ) -> None:
        """Have so many data-parallel cores while requests run; nothing is lost.

        New cores get requests once they are ready. Those that go finish theirs first: TimeoutError
        when they do not within `drain_timeout` seconds, and all cores stay. Raises EngineError
        while the engine is paused or asleep, which a new core would not be.
        """
        if await self.is_paused() or await self.is_sleeping():
            raise EngineError("The engine is paused: resume_generation() or wake_up() first.")
        await self._scale(new_data_parallel_size, drain_timeout)

    async def get_weight_version(self) -> str:
        """That of the weights that the engine was started with; there are no others."""
        return await self._call(control_calls.get_weight_version())

    async def list_loras(self) -> set[int]:
        """No adapter is ever loaded."""
        return set()
