"""From validated inputs to request outputs: the core, its clients, and the ends of a request's
path.

The names below are the engine's public interface; each is imported when it is first used, so that a
process that only serves does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "AsyncEngineCoreClient": "quire.engine.client",
    "AsyncLLM": "quire.engine.async_llm",
    "AsyncMPClient": "quire.engine.async_mp_client",
    "CoreStatus": "quire.engine.client",
    "DPCoordinator": "quire.engine.dp_coordinator",
    "DPCoordinatorProc": "quire.engine.coordinator",
    "DPEngineCoreProc": "quire.engine.dp_core_proc",
    "ENGINE_CORE_DEAD": "quire.engine.protocol",
    "EngineCore": "quire.engine.core",
    "EngineCoreClient": "quire.engine.client",
    "EngineCoreEvent": "quire.engine.protocol",
    "EngineCoreEventType": "quire.engine.protocol",
    "EngineCoreOutput": "quire.engine.protocol",
    "EngineCoreOutputs": "quire.engine.protocol",
    "EngineCoreProc": "quire.engine.core_proc",
    "EngineCoreReadyResponse": "quire.engine.protocol",
    "EngineCoreRequest": "quire.engine.protocol",
    "EngineCoreRequestType": "quire.engine.protocol",
    "EngineDeadError": "quire.errors",
    "EngineGenerateError": "quire.errors",
    "EngineStatusType": "quire.engine.client",
    "EngineZmqAddresses": "quire.engine.protocol",
    "FinishReason": "quire.engine.protocol",
    "HANDSHAKE_TIMEOUT_MINS": "quire.engine.handshake",
    "InprocClient": "quire.engine.inproc_client",
    "InputStreamError": "quire.errors",
    "LLMEngine": "quire.engine.llm_engine",
    "MPClient": "quire.engine.mp_client",
    "PROTOCOL_VERSION": "quire.engine.protocol",
    "PauseMode": "quire.engine.utility",
    "QueueLimits": "quire.engine.admission",
    "ReconfigureDistributedRequest": "quire.engine.protocol",
    "ReconfigureRankType": "quire.engine.protocol",
    "RequestOutputCollector": "quire.engine.output_collector",
    "SchedulerStats": "quire.engine.protocol",
    "StreamingInput": "quire.engine.input_stream",
    "SyncMPClient": "quire.engine.sync_mp_client",
    "UtilityOutput": "quire.engine.protocol",
    "UtilityRequest": "quire.engine.protocol",
}

if TYPE_CHECKING:
    from quire.engine.admission import QueueLimits
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.async_mp_client import AsyncMPClient
    from quire.engine.client import (
        AsyncEngineCoreClient,
        CoreStatus,
        EngineCoreClient,
        EngineStatusType,
    )
    from quire.engine.coordinator import DPCoordinatorProc
    from quire.engine.core import EngineCore
    from quire.engine.core_proc import EngineCoreProc
    from quire.engine.dp_coordinator import DPCoordinator
    from quire.engine.dp_core_proc import DPEngineCoreProc
    from quire.engine.handshake import HANDSHAKE_TIMEOUT_MINS
    from quire.engine.inproc_client import InprocClient
    from quire.engine.input_stream import StreamingInput
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.mp_client import MPClient
    from quire.engine.output_collector import RequestOutputCollector
    from quire.engine.protocol import (
        ENGINE_CORE_DEAD,
        PROTOCOL_VERSION,
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreReadyResponse,
        EngineCoreRequest,
        EngineCoreRequestType,
        EngineZmqAddresses,
        FinishReason,
        ReconfigureDistributedRequest,
        ReconfigureRankType,
        SchedulerStats,
        UtilityOutput,
        UtilityRequest,
    )
    from quire.engine.sync_mp_client import SyncMPClient
    from quire.engine.utility import PauseMode
    from quire.errors import EngineDeadError, EngineGenerateError, InputStreamError

__all__ = [
    "AsyncEngineCoreClient",
    "AsyncLLM",
    "AsyncMPClient",
    "CoreStatus",
    "DPCoordinator",
    "DPCoordinatorProc",
    "DPEngineCoreProc",
    "ENGINE_CORE_DEAD",
    "EngineCore",
    "EngineCoreClient",
    "EngineCoreEvent",
    "EngineCoreEventType",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreProc",
    "EngineCoreReadyResponse",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineDeadError",
    "EngineGenerateError",
    "EngineStatusType",
    "EngineZmqAddresses",
    "FinishReason",
    "HANDSHAKE_TIMEOUT_MINS",
    "InprocClient",
    "InputStreamError",
    "LLMEngine",
    "MPClient",
    "PROTOCOL_VERSION",
    "PauseMode",
    "QueueLimits",
    "ReconfigureDistributedRequest",
    "ReconfigureRankType",
    "RequestOutputCollector",
    "SchedulerStats",
    "StreamingInput",
    "SyncMPClient",
    "UtilityOutput",
    "UtilityRequest",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        from quire.engine.unbuilt import UNBUILT_NAMES

        hint = UNBUILT_NAMES.get(name)
        why = "" if hint is None else f": this release does not implement it. {hint}"
        raise AttributeError(f"module 'quire.engine' has no attribute {name!r}{why}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
