"""The documented methods of a core that hand on to its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from quire.engine.core.control import CoreControl
from quire.engine.unbuilt import UnbuiltCoreMethods


class CoreFace(UnbuiltCoreMethods):
    """What `EngineCore` has beside requests and steps; `control` does it (control.py)."""

    control: CoreControl

    def pause_scheduler(self, mode: str = "keep", clear_cache: bool = False) -> Future[None]:
        """Schedule nothing more; done when the device is idle."""
        return self.control.pause_scheduler(mode, clear_cache)

    def resume_scheduler(self) -> None:
        """Go on."""
        self.control.resume_scheduler()

    def is_scheduler_paused(self) -> bool:
        """Whether nothing is scheduled."""
        return self.control.is_scheduler_paused()

    def sleep(self, level: int = 1, mode: str = "abort") -> Future[None]:
        """Pause and give memory back."""
        return self.control.sleep(level, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Take memory back and go on; whether the core is awake."""
        return self.control.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether `sleep` is in force."""
        return self.control.is_sleeping()

    def release_kv_cache_memory(self) -> None:
        """Give back the KV cache alone, while paused."""
        self.control.release_kv_cache_memory()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached blocks."""
        return self.control.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Forget media."""
        self.control.reset_mm_cache()

    def reset_encoder_cache(self) -> None:
        """Forget encoders' outputs."""
        self.control.reset_encoder_cache()

    def profile(self, is_start: bool = True, profile_prefix: str | None = None) -> list[str | None]:
        """Begin or end a trace."""
        return self.control.profile(is_start, profile_prefix)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker; they are in this process, so `timeout` must be None."""
        if timeout is not None:
            raise ValueError("A worker in this process cannot be given up: leave timeout out.")
        return self.control.collective_rpc(method, args, kwargs)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What requests can be for."""
        return self.control.get_supported_tasks()

    def get_weight_version(self) -> str:
        """That of the weights that the core was started with; there are no others."""
        return self.control.get_weight_version()

    def list_loras(self) -> set[int]:
        """No adapter is ever loaded."""
        return set()
