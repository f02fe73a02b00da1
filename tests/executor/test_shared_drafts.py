"""Drafts, grammars and preemption with a model that workers share: the bits of one worker."""

import numpy as np
import pytest

from quire import EngineArgs, SamplingParams, StructuredOutputsParams
from quire.engine.core.builder import core_over, worker_config
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.executor.uniproc import open_uniproc
from quire.testing import make_checkpoint
from tests.executor.worker_cores import KINDS, open_core, same_bits, serve
from tests.support.needs import needs_native

pytestmark = needs_native
CROWDED = {"num_gpu_blocks_override": 20, "max_model_len": 48}
ALWAYS = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 99, 3]]}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, **ALWAYS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    shape |= {"hidden_size": 64, "intermediate_size": 128}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen3", dtype="float32")


def cycling(count=6, max_tokens=16):
    """Prompts that repeat themselves, so that their own tokens are good guesses."""
    draw = np.random.default_rng(7)
    for handle in range(count):
        cycle = draw.integers(10, 200, 3).tolist()
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **KINDS[handle % 5])
        yield EngineCoreRequest(handle, cycle * 4, params, seed=handle, arrival_time=0.0)


@pytest.fixture(scope="module")
def right(folder):
    """The answers of one worker without drafts."""
    core = open_core(folder, 1)
    found = serve(core, cycling())
    core.shutdown()
    return found


def by_itself(folder):
    """The model drafts for itself."""
    return {"method": "draft_model", "model": str(folder), **ALWAYS}


@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [lambda _: NGRAM, by_itself], ids=["ngram", "draft_model"])
def test_drafts_on_several_workers(folder, right, drafts, depth, num_workers):
    wishes = {"speculative_config": drafts(folder), "async_scheduling": depth == 2}
    core = open_core(folder, num_workers, **wishes)
    found = serve(core, cycling())
    core.shutdown()
    assert same_bits(found, right)
    assert found.num_accepted >= (40 if drafts is by_itself else 5)


@pytest.mark.parametrize("config", [None, NGRAM, by_itself], ids=["none", "ngram", "draft_model"])
@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_lose_their_rows(folder, config, depth):
    wishes = CROWDED | {"async_scheduling": depth == 2}
    if config is not None:
        wishes |= {"speculative_config": config(folder) if callable(config) else config}
    answers = []
    for num_workers in (1, 2):
        core = open_core(folder, num_workers, **wishes)
        answers.append(serve(core, cycling(max_tokens=30)))
        core.shutdown()
    one, two = answers
    assert same_bits(one, two)
    assert one.num_preemptions > 0 and two.num_preemptions > 0


def test_drafts_of_a_request_that_fails_on_one_worker(folder, right):
    """The others go on with their drafts; both workers know of the failure."""
    core = open_core(folder, 2, speculative_config=by_itself(folder))
    worker = core.executor.workers[1]
    launch = worker.launch

    def failing(plan, **given):
        rows = worker.model_runner.rows
        launched = launch(plan, **given)
        planned = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        if any(rows.handles[row] == 2 and rows.num_tokens[row] > 17 for row in planned):
            raise RuntimeError("unnamed")
        return launched

    worker.launch = failing
    found = serve(core, cycling())
    core.shutdown()
    failed = {handle for handle, end in found.ends.items() if end.reason is FinishReason.ERROR}
    cut = found.tokens.pop(2)
    assert failed == {2} and 0 < len(cut) < len(right.tokens[2])
    assert cut == right.tokens[2][: len(cut)]
    assert found.tokens == {h: ids for h, ids in right.tokens.items() if h != 2}


def grammars():
    for handle, choices in enumerate((["yes", "no"], ["maybe so", "maybe not"], None)):
        params = SamplingParams(
            temperature=0.7,
            max_tokens=12,
            logprobs=1,
            structured_outputs=None if choices is None else StructuredOutputsParams(choice=choices),
        )
        yield EngineCoreRequest(handle, [60 + handle] * 9, params, seed=handle, arrival_time=0.0)


@pytest.mark.parametrize("config", [None, NGRAM], ids=["plain", "ngram"])
def test_grammars_on_several_workers(config):
    found = []
    for num_workers in (1, 2):
        plan = EngineArgs(
            device="cpu", max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128,
            num_gpu_blocks_override=40, speculative_config=config,
        ).create_engine_config()  # fmt: skip
        core = core_over(plan, open_uniproc(worker_config(plan), num_workers=num_workers))
        found.append(serve(core, grammars()))
        core.shutdown()
    assert same_bits(*found)
    assert len(found[0].tokens) == 3
