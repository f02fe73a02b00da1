"""Workers in processes of their own: the bits of one, failures that are those of a request, and the
end of all where one is lost.

One engine of two stages with two workers each serves most tests: each process takes a second of
imports.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from quire import SamplingParams
from quire.engine.core.builder import build_core
from quire.engine.wire.output_parts import FinishReason
from quire.errors import EngineDeadError, InvalidParameter, LoadError
from quire.step.plan import Chunk, NewRow, StepPlan
from quire.testing import make_checkpoint
from tests.executor.worker_cores import plan_of, requests, same_bits, serve
from tests.support.needs import needs_ranks

pytestmark = needs_ranks

SHAPE = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128,
    "intermediate_size": 384, "vocab_size": 384,
}  # fmt: skip
FOUR = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
EXTENSION = "tests.executor.rank_extension.RankExtension"
DRAFTS = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2,
    "num_speculative_tokens_per_batch_size": [(1, 64, 3)],
}  # fmt: skip


def repeating(count=6):
    """Prompts whose continuation drafts guess, with what the sampler can do and grammars."""
    for request in requests(count, max_tokens=12):
        request.prompt_token_ids = (request.prompt_token_ids[:3] * 8)[:24]
        yield request


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE, "llama", dtype="float32")


def answer_of_one(folder, given, **wishes):
    core = build_core(plan_of(folder, **wishes))
    found = serve(core, given)
    core.shutdown()
    return found


@pytest.fixture(scope="module")
def core(folder):
    """Two stages of two workers, with drafts and few blocks."""
    plan = plan_of(folder, worker_extension_cls=EXTENSION, speculative_config=DRAFTS, **FOUR)
    made = build_core(plan)
    yield made
    made.shutdown()


def process_names(executor):
    return [
        Path(f"/proc/{child.pid}/comm").read_text().strip()
        for child in executor._processes.children
    ]


def test_each_rank_is_a_process_with_its_title(core):
    pids = {child.pid for child in core.executor._processes.children}
    assert len(pids) == 4 and os.getpid() not in pids
    assert process_names(core.executor) == [f"QuireWorker-{rank}" for rank in range(4)]
    assert core.executor.collective_rpc("rank_and_pid", (), {}) == [
        [rank, child.pid] for rank, child in enumerate(core.executor._processes.children)
    ]
    assert core.executor.collective_rpc("known_of_the_engine", (), {}) == [
        [[rank, 4, 4, rank % 2 == 0], [64, "safetensors"], rank] for rank in range(4)
    ]


def test_drafts_chunks_and_all_kinds_of_sampling_have_the_bits_of_one(core, folder):
    given = [*requests(), *repeating()]
    for handle, request in enumerate(given):
        request.handle = handle
    right = answer_of_one(folder, given, speculative_config=DRAFTS)
    found = serve(core, given)
    assert right.num_accepted > 3 and right.logprobs and right.prompts
    assert same_bits(found, right) and found.num_accepted > 3
    assert {h: end.reason for h, end in found.ends.items()} == {
        h: end.reason for h, end in right.ends.items()
    }


def test_a_prefix_that_is_cached_is_read_on_all_ranks(core):
    queries = core.scheduler.counters.prefix_hits
    first = serve(core, list(requests(4)))
    again = serve(core, list(requests(4)))
    assert same_bits(first, again)
    assert core.scheduler.counters.prefix_hits > queries


@pytest.mark.parametrize("rank", range(4))
def test_a_request_that_fails_on_one_rank_ends_alone(core, rank):
    right = serve(core, list(requests(5)))
    core.executor.collective_rpc("fail_with", (rank, 299), {})
    given = list(requests(5))
    given[2].prompt_token_ids = [299, 299, *given[2].prompt_token_ids]
    found = serve(core, given)
    core.executor.collective_rpc("fail_with", (rank, None), {})
    assert found.ends[2].reason is FinishReason.ERROR
    others = [handle for handle in right.tokens if handle != 2]
    assert {h: found.tokens[h] for h in others} == {h: right.tokens[h] for h in others}


def test_a_call_that_fails_on_one_rank_fails_and_leaves_all_in_order(core):
    executor = core.executor
    with pytest.raises(ValueError, match="rank 2 does not want to"):
        executor.collective_rpc("refuse_on", (2,), {})
    with pytest.raises(InvalidParameter, match=r"a worker has the methods .*rank_and_pid"):
        executor.collective_rpc("no_such_method", (), {})
    with pytest.raises(InvalidParameter, match="QUIRE_ALLOW_INSECURE_SERIALIZATION"):
        executor.collective_rpc(lambda worker: worker.rank, (), {})
    executor.check_health()
    assert executor.collective_rpc("kv_cache_bytes", (), {})[0] > 0


def test_a_step_that_is_not_sampled_is_given_up(core):
    blocks = tuple([1] for _ in core.executor.facts.kv_groups)
    new = NewRow(0, 9, [5, 6, 7], 3, 0, blocks, SamplingParams(), 0)
    core.executor.launch(StepPlan(10**9, [], [new], [], [], [Chunk(0, 3, True)]))
    core.executor.launch(StepPlan(10**9 + 1, [0], [], [], [], [])).sample()
    assert serve(core, list(requests(2))).ends[0].reason is FinishReason.LENGTH


def test_a_rank_that_is_lost_ends_the_others_and_is_told_without_a_step(folder, tmp_path):
    core = build_core(plan_of(folder, tensor_parallel_size=2))
    executor, told = core.executor, []
    children = list(executor._processes.children)
    told_of = threading.Event()
    executor.register_failure_callback(lambda reason: [told.append(reason), told_of.set()])
    os.kill(children[1].pid, signal.SIGKILL)
    assert told_of.wait(20)
    assert told == ["QuireWorker-1 was killed by SIGKILL."]
    with pytest.raises(EngineDeadError, match="QuireWorker-1 was killed by SIGKILL"):
        core.add_request(next(iter(requests(1))))
    core.shutdown()
    assert not any(child.is_running for child in children)


@pytest.mark.full
def test_what_keeps_a_rank_from_starting_is_the_error_of_the_start(folder, tmp_path):
    broken = make_checkpoint(tmp_path, SHAPE, "llama", dtype="float32")
    plan = plan_of(broken, tensor_parallel_size=2)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(LoadError, match="safetensors"):
        build_core(plan)
