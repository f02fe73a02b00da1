"""A step as messages: a worker in another process gives the bits of one here, and a recorded run
is played again.
"""

from __future__ import annotations

import pytest

from quire import EngineArgs, SamplingParams, StructuredOutputsParams
from quire.engine.core.builder import build_core, core_over
from quire.engine.wire.messages import EngineCoreRequest
from quire.step.columns import PromptLogprobs
from tests.executor.remote_executor import RemoteExecutor
from tests.support.output_parts import of_kind

PROMPTS = ([60, 61, 62, 63, 64, 65] * 4, [70, 71], [80], [90, 91, 92, 93] * 6)
GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
KINDS = (
    SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=8,
                   structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    SamplingParams(**GREEDY, repetition_penalty=1.3, logit_bias={40: 2.0}),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    wishes = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 128}
    return EngineArgs(device="cpu", num_gpu_blocks_override=20, block_size=16, **wishes,
                      ).create_engine_config()  # fmt: skip


def requests():
    for handle, (prompt, params) in enumerate(zip(PROMPTS, KINDS, strict=True)):
        yield EngineCoreRequest(handle, prompt, params, seed=handle, arrival_time=0.0)


def answers(core):
    """What each request gets: ids, why it ended, and bits of its log-probabilities. Which requests
    share a step depends on when a grammar is ready.
    """
    found = [{"ids": [], "end": None, "columns": [], "prompt": b""} for _ in PROMPTS]
    for request in requests():
        core.add_request(request)
    while core.has_work:
        out = core.step()
        for place, (handle, token) in enumerate(zip(out.handles, out.token_ids, strict=True)):
            found[handle]["ids"].append(token)
            if out.logprobs is not None and place in out.logprobs.index:
                entry = out.logprobs.index.index(place)
                found[handle]["columns"].append(out.logprobs.values[entry].tobytes())
        for prompt in of_kind(PromptLogprobs, out):
            found[prompt.handle]["prompt"] += prompt.values.tobytes()
        for end in out.finished:
            found[end.handle]["end"] = end.reason
    return found


class Built(RemoteExecutor):
    """With the facts that a built executor states."""

    def __init__(self, plan, facts):
        super().__init__(plan)
        self.facts = facts


def test_a_worker_in_another_process_gives_the_same_and_its_steps_can_be_played_again(plan):
    here = build_core(plan)
    right = answers(here)
    facts = here.executor.facts
    here.shutdown()
    remote = Built(plan, facts)
    core = core_over(plan, remote)
    assert answers(core) == right
    core.shutdown()
    again = RemoteExecutor(plan)
    for sent, reply in remote.recorded:
        assert again.send(sent) == reply
    again.shutdown()
    assert len(remote.recorded) > 30
