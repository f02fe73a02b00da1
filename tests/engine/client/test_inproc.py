"""The client of a core in the same process: what it does after its end."""

import inspect

import pytest

from quire import LLM, SamplingParams
from quire.engine.client.inproc import InprocClient
from quire.engine.control_verbs import UTILITIES
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import EngineDeadError, InvalidParameter, InvalidType
from tests.engine.core.core_over_hashes import expected, make_core, request

CLOSED = r"^The engine was closed; make a new one\.$"


def ids_of(client, handle):
    ids = []
    while client.engine_core.has_work:
        for output in client.get_output():
            ids += output.new_token_ids if output.request_id == str(handle) else []
    return ids


def valid(method):
    values = {"name": "a", "lora_id": 1, "folder": "/a", "path": "x", "method": "check_health"}
    values |= {"init_info": {}, "update_info": {}, "reason": "r", "weight_version": "v"}
    values |= {"handles": [1]}
    parameters = list(inspect.signature(getattr(make_core(), method)).parameters.values())
    return tuple(values[each.name] for each in parameters if each.default is each.empty)


@pytest.mark.parametrize("method", UTILITIES)
def test_a_closed_engine_answers_no_call(method):
    client = InprocClient(make_core())
    assert client.core_status(0).is_running
    client.shutdown()
    with pytest.raises(EngineDeadError, match=CLOSED):
        client.call(Utility(method, valid(method)))
    assert not client.core_status(0).is_running


def test_a_closed_engine_takes_and_gives_nothing():
    client = InprocClient(make_core())
    client.add_request(request(0))
    client.shutdown()
    client.shutdown()
    with pytest.raises(EngineDeadError, match=CLOSED):
        client.add_request(request(1))
    with pytest.raises(EngineDeadError, match=CLOSED):
        client.get_output()
    client.abort_requests([0])


def test_every_face_of_a_closed_engine_says_so():
    llm = LLM(dtype="float32", num_gpu_blocks_override=20, max_model_len=64)
    llm.sleep(1)
    llm.close()
    llm.close()
    for call in (llm.wake_up, llm.is_sleeping, llm.reset_prefix_cache, llm.llm_engine.wake_up):
        with pytest.raises(EngineDeadError, match=CLOSED):
            call()
    with pytest.raises(EngineDeadError, match=CLOSED):
        llm.enqueue("a", use_tqdm=False)
    assert not llm.llm_engine.has_unfinished_requests()


def test_what_is_not_of_its_type_is_refused_and_the_others_go_on():
    client = InprocClient(make_core(policy="priority"))
    client.add_request(request(0))
    good = SamplingParams(max_tokens=3)
    for fields in ({"arrival_time": "x"}, {"arrival_time": [1]}, {"priority": 1.5}, {"seed": "x"}):
        with pytest.raises(InvalidType, match=f"^{next(iter(fields))}="):
            client.add_request(EngineCoreRequest(5, [1, 2], good, **fields))
    with pytest.raises(InvalidParameter, match="data_parallel_rank=1 .* the cores are 0"):
        client.add_request(EngineCoreRequest(5, [1, 2], good, data_parallel_rank=1))
    with pytest.raises(InvalidType, match="level='x'"):
        client.call(Utility("sleep", ("x",)))
    assert ids_of(client, 0) == expected(0)
    client.shutdown()
