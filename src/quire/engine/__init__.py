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
    "ENGINE_CORE_DEAD": "quire.engine.protocol",
    "EngineCore": "quire.engine.core",
    "EngineCoreClient": "quire.engine.client",
    "EngineCoreOutput": "quire.engine.protocol",
    "EngineCoreOutputs": "quire.engine.protocol",
    "EngineCoreProc": "quire.engine.core_proc",
    "EngineCoreReadyResponse": "quire.engine.protocol",
    "EngineCoreRequest": "quire.engine.protocol",
    "EngineCoreRequestType": "quire.engine.protocol",
    "EngineZmqAddresses": "quire.engine.protocol",
    "FinishReason": "quire.engine.protocol",
    "InprocClient": "quire.engine.inproc_client",
    "LLMEngine": "quire.engine.llm_engine",
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
    from quire.engine.client import AsyncEngineCoreClient, CoreStatus, EngineCoreClient
    from quire.engine.core import EngineCore
    from quire.engine.core_proc import EngineCoreProc
    from quire.engine.inproc_client import InprocClient
    from quire.engine.input_stream import StreamingInput
    from quire.engine.llm_engine import LLMEngine
    from quire.engine.output_collector import RequestOutputCollector
    from quire.engine.protocol import (
        ENGINE_CORE_DEAD,
        PROTOCOL_VERSION,
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

__all__ = [
    "AsyncEngineCoreClient",
    "AsyncLLM",
    "AsyncMPClient",
    "CoreStatus",
    "ENGINE_CORE_DEAD",
    "EngineCore",
    "EngineCoreClient",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreProc",
    "EngineCoreReadyResponse",
    "EngineCoreRequest",
    "EngineCoreRequestType",
    "EngineZmqAddresses",
    "FinishReason",
    "InprocClient",
    "LLMEngine",
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
        raise AttributeError(f"module 'quire.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return __all__
