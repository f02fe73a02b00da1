"""Every call of every fault point fails once: at most the request concerned is hit, the others are
bit-identical, nothing is held, and the next request is served.
"""

import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.frontend import output_processor
from quire.engine.frontend.input_processor import InputProcessor
from quire.engine.frontend.output_text import OutputText
from quire.engine.frontend.request_state import RequestState
from quire.engine.frontend.stop_strings import StopStringFinder
from quire.engine.llm_engine import LLMEngine
from quire.engine.outputs.logprobs import OutputLogprobs
from quire.engine.outputs.prompt_logprobs import PromptLogprobsBuilder
from quire.executor.uniproc import UniprocExecutor
from quire.models.decoder import DecoderModel
from quire.runner.batch import BatchBuilder
from quire.runner.prompt_logprobs import PromptLogprobsPart
from quire.runner.rows import Rows
from quire.runner.runner import ModelRunner
from quire.runner.sampling import Sampler
from quire.runner.sampling.custom import CustomProcessors
from quire.scheduling import scheduler
from quire.scheduling.block_tables import BlockTables
from quire.text.detokenizer import IncrementalDetokenizer
from quire.text.tokenizer import Tokenizer
from tests.support.nth_failure import FaultPoint, InjectedFailure, failing
from tests.support.simulation import invariants

SMALL = {
    "dtype": "float32",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 60,
    "max_model_len": 128,
    "enable_prefix_caching": False,
    "logits_processors": ["tests.support.poison:Poison"],
}
CASES = [
    ("def add(a, b):", {"temperature": 0.0, "logprobs": 1}),
    ("import os\n\nimport sys\n\nclass", {"seed": 5, "prompt_logprobs": 1}),
    ("x = [", {"seed": 9, "stop": ["zz", "\n"], "repetition_penalty": 1.2, "min_tokens": 3}),
    ("y = 1\nz", {"temperature": 0.0, "bad_words": ["self"], "extra_args": {"poison_at": 99}}),
]

POINTS = [
    FaultPoint(Tokenizer, "encode"),
    FaultPoint(InputProcessor, "process"),
    FaultPoint(UniprocExecutor, "needs_host_ids"),
    FaultPoint(scheduler, "stop_ids"),
    FaultPoint(BlockTables, "compute_keys"),
    FaultPoint(UniprocExecutor, "launch"),
    FaultPoint(Rows, "apply"),
    FaultPoint(Sampler, "add"),
    FaultPoint(BatchBuilder, "build"),
    FaultPoint(PromptLogprobsPart, "collect"),
    FaultPoint(DecoderModel, "logits"),
    FaultPoint(Sampler, "sample"),
    FaultPoint(CustomProcessors, "apply"),
    FaultPoint(Rows, "write"),
    FaultPoint(ModelRunner, "finish"),
    FaultPoint(scheduler, "find_stop"),
    FaultPoint(RequestState, "take_in"),
    FaultPoint(OutputText, "feed"),
    FaultPoint(IncrementalDetokenizer, "feed"),
    FaultPoint(StopStringFinder, "feed"),
    FaultPoint(OutputLogprobs, "add"),
    FaultPoint(PromptLogprobsBuilder, "add"),
    FaultPoint(RequestState, "partial"),
    FaultPoint(RequestState, "final"),
]


@pytest.fixture(scope="module")
def engine():
    found = LLMEngine.from_engine_args(EngineArgs(**SMALL))
    yield found
    found.close()


def serve(engine):
    """What became of each case; an exception where it was refused."""
    found = {}
    for index, (prompt, kind) in enumerate(CASES):
        params = SamplingParams(**{"max_tokens": 7, "ignore_eos": True, **kind})
        try:
            engine.add_request(str(index), prompt, params)
        except InjectedFailure as error:
            found[index] = error
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[int(output.request_id)] = output
    return found


def essence(output):
    one = output.outputs[0]
    return one.text, one.token_ids, one.logprobs, one.finish_reason, output.prompt_logprobs


def assert_sound(engine, found, expected):
    """Whose requests were hit."""
    hit = []
    for index, right in expected.items():
        output = found[index]
        if isinstance(output, InjectedFailure):
            hit.append(index)
        elif output.outputs[0].finish_reason == "error":
            hit.append(index)
            ids = output.outputs[0].token_ids
            assert ids == right[1][: len(ids)]
            assert "0x" not in (output.outputs[0].error or "no text")
        else:
            assert essence(output) == right, f"request {index} is not what it would have been"
    assert engine.front_end.outputs.num_unfinished == 0
    core = engine.front_end.client.engine_core
    while core.has_work:  # what the front end has ended may still be in a step
        core.step()
    invariants.check(core.scheduler)
    invariants.check_idle(core.scheduler)
    return hit


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_t15_the_nth_call_fails(engine, point):
    expected = {index: essence(output) for index, output in serve(engine).items()}
    with failing(point) as calls:
        assert {i: essence(o) for i, o in serve(engine).items()} == expected
    assert calls.count > 0, "the point was not met"
    for number in range(1, calls.count + 1):
        with failing(point, number) as met:
            found = serve(engine)
        assert met.failed == [number]
        hit = assert_sound(engine, found, expected)
        assert len(hit) <= 1, f"call {number} hit requests {hit}"
    assert {i: essence(o) for i, o in serve(engine).items()} == expected, "the next are served"


def test_a_failure_that_is_not_caught_is_noticed(engine, monkeypatch):
    def careless(self, state, *rest):
        state.take_in(rest[0], False, rest[2], rest[3])

    monkeypatch.setattr(output_processor.OutputProcessor, "_advance", careless)
    with pytest.raises(InjectedFailure), failing(FaultPoint(OutputText, "feed"), 1):
        serve(engine)
    monkeypatch.undo()
    engine.discard_all()
