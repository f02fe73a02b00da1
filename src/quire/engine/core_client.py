"""Step 3 of 8 on a request's path: how a front end speaks to an engine core.

In: `EngineCoreRequest` from engine/input_processor.py. Out: `EngineCoreOutputs` for
engine/output_processor.py. Next: engine/core.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.engine.core import EngineCore
from quire.engine.protocol import EngineCoreOutputs, EngineCoreRequest


class EngineCoreClient(Protocol):
    """The interface of every client, in this process or across processes."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request; its outputs carry its handle."""
        ...

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Drop requests; nothing more comes of them."""
        ...

    def get_output(self) -> EngineCoreOutputs:
        """The next outputs; empty when there is nothing to do."""
        ...

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool: ...
    def pause_scheduler(self) -> None: ...
    def resume_scheduler(self) -> None: ...
    def is_scheduler_paused(self) -> bool: ...
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]: ...
    def shutdown(self) -> None: ...


class InprocClient:
    """The core in this process: `get_output` runs a step."""

    def __init__(self, core: EngineCore) -> None:
        self.engine_core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        self.engine_core.add_request(request)

    def abort_requests(self, handles: Sequence[int]) -> None:
        self.engine_core.abort_requests(handles)

    def get_output(self) -> EngineCoreOutputs:
        return self.engine_core.step()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """`reset_connector`: there is no connector, so there is nothing of it to reset."""
        return self.engine_core.reset_prefix_cache(reset_running_requests)

    def pause_scheduler(self) -> None:
        self.engine_core.pause_scheduler()

    def resume_scheduler(self) -> None:
        self.engine_core.resume_scheduler()

    def is_scheduler_paused(self) -> bool:
        return self.engine_core.is_paused

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """`timeout` cannot end a call in this process; the call returns when it is done."""
        return self.engine_core.executor.collective_rpc(method, args, kwargs or {})

    def shutdown(self) -> None:
        self.engine_core.shutdown()
