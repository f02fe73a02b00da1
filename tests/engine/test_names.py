"""`quire.engine` exports the names that people know, without loading torch for those that a front
end uses.
"""

import subprocess
import sys

import pytest

import quire.engine

DOCUMENTED = [
    *("EngineCoreRequest", "EngineCoreOutput", "EngineCoreOutputs", "EngineCoreRequestType"),
    *("FinishReason", "UtilityOutput", "ReconfigureDistributedRequest", "ReconfigureRankType"),
    *("EngineCoreReadyResponse", "EngineCore", "EngineCoreProc", "ENGINE_CORE_DEAD"),
    *("AsyncLLM", "LLMEngine", "InprocClient", "SyncMPClient", "AsyncMPClient", "PauseMode"),
    *("RequestOutputCollector", "StreamingInput"),
]
"""Of the reference's `v1.engine`: the wire types, the cores, the clients, the faces."""


@pytest.mark.parametrize("name", [*quire.engine.__all__, *DOCUMENTED])
def test_the_engine_exports(name):
    assert getattr(quire.engine, name) is not None
    assert name in dir(quire.engine)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = quire.engine.no_such_name


def test_wire_constants_are_those_of_the_reference():
    kinds = quire.engine.EngineCoreRequestType
    wire = [kinds.ADD, kinds.ABORT, kinds.START_DP_WAVE, kinds.UTILITY, kinds.EXECUTOR_FAILED]
    assert [kind.value for kind in [*wire, kinds.WAKEUP]] == [bytes([n]) for n in range(6)]
    reasons = [str(quire.engine.FinishReason(number)) for number in range(5)]
    assert reasons == ["stop", "length", "abort", "error", "repetition"]
    assert quire.engine.ReconfigureRankType.KEEP_CURRENT_RANK == -1
    assert quire.engine.ReconfigureRankType.SHUTDOWN_CURRENT_RANK == -2
    assert quire.engine.ENGINE_CORE_DEAD == b"ENGINE_CORE_DEAD"


def test_a_process_that_serves_never_loads_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from quire.engine import AsyncLLM, AsyncMPClient, EngineCoreOutputs, StreamingInput\n"
        "from quire.engine.launcher import launch_async_front_end, launch_front_end\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
