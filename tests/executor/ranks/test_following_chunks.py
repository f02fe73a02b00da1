"""Steps in processes that follow others whose end is not known: chunks of a prompt through stages,
and with workers of one stage every step that is planned ahead. They have the bits of one worker,
and a step that fails ends its request alone, whatever followed it.
"""

from __future__ import annotations

import os

import pytest

from quire.engine.core.builder import build_core
from quire.engine.wire.output_parts import FinishReason
from quire.hardware.native import find_native
from quire.testing import make_checkpoint
from tests.executor.worker_cores import Served, plan_of, requests, same_bits, serve

pytestmark = [
    pytest.mark.skipif(find_native()[0] is None, reason="ranks exchange by native code"),
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="ranks share memory of Linux"),
]

SHAPE = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128,
    "intermediate_size": 384, "vocab_size": 384,
}  # fmt: skip
WISHES = {"long_prefill_token_threshold": 4, "enable_prefix_caching": False}
CULPRIT = 1
"""The handle of the request that fails."""


def prompts():
    """Three prompts of eight chunks, two in the first step and the third with a following one."""
    given = requests(3, max_tokens=4)
    for place, request in enumerate(given):
        request.prompt_token_ids = [40 + (7 * i + 31 * place) % 200 for i in range(32)]
    given[CULPRIT].prompt_token_ids[:2] = [299, 299]
    return given


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE, "llama", dtype="float32")


@pytest.fixture(scope="module")
def right(folder):
    core = build_core(plan_of(folder, **WISHES))
    found = serve_at_once(core)
    core.shutdown()
    return found


def opened(folder, **ranks):
    extension = "tests.executor.rank_extension.RankExtension"
    return build_core(plan_of(folder, worker_extension_cls=extension, **WISHES, **ranks))


@pytest.fixture(scope="module")
def staged(folder):
    made = opened(folder, pipeline_parallel_size=2)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def ahead(folder):
    made = opened(folder, tensor_parallel_size=2, async_scheduling=True)
    yield made
    made.shutdown()


@pytest.fixture(params=["staged", pytest.param("ahead", marks=pytest.mark.full)])
def core(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def followers(core, monkeypatch):
    """The steps that were launched where others in flight would leave rows."""
    found, send = [], core.executor._send_launch

    def noting(step):
        found.extend([step] if step.follows else [])
        send(step)

    monkeypatch.setattr(core.executor, "_send_launch", noting)
    return found


def serve_at_once(core):
    """All requests come before the first step, so that the culprit fails in steps with another one,
    which a step in flight goes on with.
    """
    for request in prompts():
        core.add_request(request)
    return serve(core, [])


def others(served):
    """What the requests got that are not at fault."""
    parts = [served.tokens, served.logprobs, served.prompts]
    return Served(*({h: got for h, got in part.items() if h != CULPRIT} for part in parts))


def test_steps_that_follow_have_the_bits_of_one_worker(core, right, followers):
    assert same_bits(serve_at_once(core), right)
    assert len(followers) >= 3


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("first", [4, 28, 33])
def test_a_step_that_fails_ends_its_request_alone(core, right, followers, rank, first):
    core.executor.collective_rpc("fail_with", (rank, 299, first), {})
    found = serve_at_once(core)
    core.executor.collective_rpc("fail_with", (rank, None), {})
    assert found.ends[CULPRIT].reason is FinishReason.ERROR
    assert same_bits(others(found), others(right))
    assert followers


def test_a_stage_that_does_not_go_back_after_a_failure_is_caught(staged, right):
    core = staged
    core.executor.collective_rpc("forget_failed_steps", (), {})
    core.executor.collective_rpc("fail_with", (1, 299, 16), {})
    found = serve_at_once(core)
    core.executor.collective_rpc("fail_with", (1, None), {})
    core.executor.collective_rpc("forget_failed_steps", (False,), {})
    assert not same_bits(others(found), others(right))
