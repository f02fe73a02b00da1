"""From validated inputs to request outputs: the core, its clients, and the ends of a request's
path.

The names below are the engine's public interface; each is imported when it is first used, so that a
process that only serves does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "AsyncEngineCoreClient": "quire.engine.client.client",
    "AsyncLLM": "quire.engine.async_llm",
    "AsyncMPClient": "quire.engine.client.multiprocess",
    "CoreStatus": "quire.engine.client.client",
    "DPCoordinator": "quire.engine.data_parallel.coordinator_client",
    "DPCoordinatorProc": "quire.engine.data_parallel.coordinator",
    "DPEngineCoreActor": "quire.engine.data_parallel.core_actor",
    "DPEngineCoreProc": "quire.engine.process.lockstep_server",
    "ENGINE_CORE_DEAD": "quire.engine.wire.messages",
    "EngineCore": "quire.engine.core.documented_core",
    "EngineCoreClient": "quire.engine.client.client",
    "EngineCoreEvent": "quire.engine.wire.output_parts",
    "EngineCoreEventType": "quire.engine.wire.output_parts",
    "EngineCoreOutput": "quire.engine.wire.core_output",
    "EngineCoreOutputs": "quire.engine.wire.documented",
    "EngineCoreProc": "quire.engine.process.core_server",
    "EngineCoreReadyResponse": "quire.engine.wire.messages",
    "EngineCoreRequest": "quire.engine.wire.documented",
    "EngineCoreRequestType": "quire.engine.wire.messages",
    "EngineDeadError": "quire.errors",
    "EngineGenerateError": "quire.errors",
    "EngineStatusType": "quire.engine.client.client",
    "EngineZmqAddresses": "quire.engine.wire.messages",
    "FINISH_REASON_STRINGS": "quire.engine.wire.output_parts",
    "FinishReason": "quire.engine.wire.output_parts",
    "HANDSHAKE_TIMEOUT_MINS": "quire.engine.data_parallel.handshake",
    "InprocClient": "quire.engine.client.inproc",
    "InputStreamError": "quire.errors",
    "LLMEngine": "quire.engine.llm_engine",
    "MPClient": "quire.engine.client.multiprocess",
    "PROTOCOL_VERSION": "quire.engine.wire.messages",
    "PauseMode": "quire.engine.wire.control_calls",
    "QueueLimits": "quire.engine.frontend.admission",
    "ReconfigureDistributedRequest": "quire.engine.wire.messages",
    "ReconfigureRankType": "quire.engine.wire.messages",
    "RequestOutputCollector": "quire.engine.frontend.output_stream",
    "SchedulerStats": "quire.engine.wire.messages",
    "StreamingInput": "quire.engine.frontend.streaming_input",
    "SyncMPClient": "quire.engine.client.multiprocess",
    "UtilityOutput": "quire.engine.wire.messages",
    "UtilityRequest": "quire.engine.wire.messages",
}

if TYPE_CHECKING:
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.client.client import (
        AsyncEngineCoreClient,
        CoreStatus,
        EngineCoreClient,
        EngineStatusType,
    )
    from quire.engine.client.inproc import InprocClient
    from quire.engine.client.multiprocess import AsyncMPClient, MPClient, SyncMPClient
    from quire.engine.core.documented_core import EngineCore
    from quire.engine.data_parallel.coordinator import DPCoordinatorProc
    from quire.engine.data_parallel.coordinator_client import DPCoordinator
    from quire.engine.data_parallel.core_actor import DPEngineCoreActor
    from quire.engine.data_parallel.handshake import HANDSHAKE_TIMEOUT_MINS
    from quire.engine.frontend.admission import QueueLimits
    from quire.engine.frontend.output_stream import RequestOutputCollector
    from quire.engine.frontend.streaming_input import StreamingInput
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.process.core_server import EngineCoreProc
    from quire.engine.process.lockstep_server import DPEngineCoreProc
    from quire.engine.wire.control_calls import PauseMode
    from quire.engine.wire.core_output import EngineCoreOutput
    from quire.engine.wire.documented import EngineCoreOutputs, EngineCoreRequest
    from quire.engine.wire.messages import (
        ENGINE_CORE_DEAD,
        PROTOCOL_VERSION,
        EngineCoreReadyResponse,
        EngineCoreRequestType,
        EngineZmqAddresses,
        ReconfigureDistributedRequest,
        ReconfigureRankType,
        SchedulerStats,
        UtilityOutput,
        UtilityRequest,
    )
    from quire.engine.wire.output_parts import (
        FINISH_REASON_STRINGS,
        EngineCoreEvent,
        EngineCoreEventType,
        FinishReason,
    )
    from quire.errors import EngineDeadError, EngineGenerateError, InputStreamError

__all__ = [
    "AsyncEngineCoreClient",
    "AsyncLLM",
    "AsyncMPClient",
    "CoreStatus",
    "DPCoordinator",
    "DPCoordinatorProc",
    "DPEngineCoreActor",
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
    "FINISH_REASON_STRINGS",
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
