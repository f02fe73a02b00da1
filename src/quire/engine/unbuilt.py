"""Documented methods that this release does not have: each is there and says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from quire.errors import NotBuiltYet

_SNAPSHOT = "Use sleep() and wake_up(), or shut the engine down and start a new one."
_CONNECTOR = "There is no KV connector: leave it out."


class Refused:
    """A method in name only. Calling it raises NotBuiltYet with what to do instead."""

    def __init__(self, hint: str) -> None:
        self.hint = hint
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Callable[..., NoReturn]:
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise NotBuiltYet("method", self._name, self.hint)

        refuse.__name__, refuse.__doc__ = self._name, f"Not implemented: {self.hint}"
        return refuse


class UnbuiltAsyncMethods:
    """Methods of `AsyncLLM` alone that are documented and not built."""

    checkpoint_prepare = Refused(_SNAPSHOT)
    checkpoint_restore = Refused(_SNAPSHOT)
    handle_fault = Refused("Cores that die are restarted without being asked: max_core_restarts.")
    get_status = Refused("Use is_alive(), is_ready(), check_health() and get_metrics().")
    notify_kv_transfer_request_rejected = Refused(_CONNECTOR)
    get_kv_event_sources = Refused(_CONNECTOR)


class UnbuiltCoreMethods:
    """Methods of `EngineCore` alone that are documented and not built."""

    save_tensorized_model = Refused("Use save_sharded_state().")


class UnbuiltProcMethods:
    """Methods of `EngineCoreProc` that are documented and not built."""

    run_engine_core = Refused("LLM, AsyncLLM and quire serve start cores, and --headless others.")


UNBUILT_NAMES = {
    "DPAsyncMPClient": "A client of one core that others balance is an AsyncMPClient.",
    "DPLBAsyncMPClient": "Every AsyncMPClient balances between its cores.",
    "EngineHandshakeMetadata": "A launcher elsewhere gets quire.engine.wire.messages.Welcome.",
    "POLLING_TIMEOUT_S": "A client is told by pipes and heartbeats; it does not poll.",
}
"""Documented names of `quire.engine` that are not there, and what stands in their place."""
