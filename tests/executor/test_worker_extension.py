"""Methods of the user's own on workers, called by name in this process and in another."""

import os

import pytest

from quire import LLM, SamplingParams
from quire.errors import EngineError, InvalidParameter

NOTES = "tests.executor.worker_notes.Notes"
ARGS = {"dtype": "float32", "num_gpu_blocks_override": 60, "max_model_len": 64}


@pytest.mark.parametrize("is_apart", [False, True], ids=["here", "in a process of its own"])
def test_methods_are_called_by_their_names(is_apart):
    with LLM(**ARGS, worker_extension_cls=NOTES, enable_multiprocessing=is_apart) as llm:
        [found] = llm.collective_rpc("note", args=("ab",), kwargs={"times": 2})
        assert found[:3] == ["abab", 0, "cpu"] and (found[3] != os.getpid()) == is_apart
        with pytest.raises((LookupError, EngineError), match="abab stays"):
            llm.collective_rpc("forget")
        with pytest.raises(SystemExit if not is_apart else EngineError, match="no more notes"):
            llm.collective_rpc("leave")
        with pytest.raises(InvalidParameter if not is_apart else EngineError, match="note"):
            llm.collective_rpc("no_such_method")
        assert llm.llm_engine.engine_core.core_status(0).incarnation <= 1, "its only life"
        [output] = llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        assert output.finished
        assert llm.llm_engine.vllm_config.parallel_config.worker_extension_cls == NOTES


@pytest.mark.parametrize("is_apart", [False, True], ids=["here", "in a process of its own"])
def test_workers_can_be_of_a_class_of_ones_own(is_apart):
    own = "tests.executor.worker_notes.OwnWorker"
    with LLM(
        **ARGS, worker_cls=own, worker_extension_cls=NOTES, enable_multiprocessing=is_apart
    ) as llm:
        assert llm.collective_rpc("get_supported_tasks") == [["generate", "own"]]
        assert llm.collective_rpc("note", args=("a",))[0][0] == "a"


@pytest.mark.parametrize("name", ["tests.executor.worker_notes.Notes", "no_such_module.Worker"])
def test_anything_but_a_worker_is_refused(name):
    with pytest.raises(InvalidParameter) as caught:
        LLM(**ARGS, worker_cls=name)
    assert caught.value.parameter == "worker_cls"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.executor.worker_notes.Taken", "workers have sleep already"),
        ("tests.executor.worker_notes.TakenByInstances", "workers have facts, launch already"),
        ("builtins.bool", "workers cannot be of it"),
        ("tests.executor.worker_notes.not_a_class", "name of a class"),
        ("tests.executor.worker_notes.Nowhere", "cannot be imported"),
        ("no_such_module.Notes", "cannot be imported"),
        ("Notes", "cannot be imported"),
    ],
)
def test_anything_but_an_extension_is_refused(name, words):
    with pytest.raises(InvalidParameter, match=words) as caught:
        LLM(**ARGS, worker_extension_cls=name)
    assert caught.value.parameter == "worker_extension_cls"
