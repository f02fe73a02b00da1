"""With a network that drafts, answers are those without, for every parameter of a request; one with
the model's own weights is right wherever there is no grammar.
"""

import pytest

from quire import LLM, SamplingParams, embedded
from quire.hardware.native import find_native
from quire.runner.drafting.pace import FixedPace
from tests.speculation.crowd import MARKS, answers, crowd

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

ENGINE = {"max_model_len": 128, "max_num_seqs": 32, "reasoning_config": MARKS, "block_size": 16}


@pytest.fixture(scope="module")
def right():
    with LLM(**ENGINE) as llm:
        return answers(llm.generate(*crowd(), use_tqdm=False))


class Counted:
    """A drafter, and how many of its drafts were right, of requests without a grammar."""

    def __init__(self, drafter):
        self.drafter = drafter
        self.constrained = set()
        self.num_drafts = self.num_right = 0
        self.propose_next = drafter.propose

    def add_row(self, new):
        self.drafter.add_row(new)
        has_grammar = new.params.structured_outputs or new.params.thinking_token_budget
        (self.constrained.add if has_grammar else self.constrained.discard)(new.row)

    def remove_row(self, row):
        self.drafter.remove_row(row)

    def propose(self, rows, step):
        for row, new, drafts in zip(step.sampled, step.new_tokens, step.drafts, strict=True):
            if row not in self.constrained:
                self.num_drafts += int(drafts)
                self.num_right += len(new) - 1
        return self.propose_next(rows, step)


def counted(llm, count=3):
    """The drafter of an engine, from now on counted and asked for `count` drafts each time."""
    found = []

    def put(worker):
        drafting = worker.model_runner.heads.of(SamplingParams()).drafting
        drafting.drafter = Counted(drafting.drafter)
        drafting.pace = FixedPace(count)
        found.append(drafting.drafter)

    llm.collective_rpc(put)
    return found[0]


def config(count=3, **keys):
    return {"num_speculative_tokens": count, "method": "draft_model", **keys}


@pytest.mark.parametrize(
    ("count", "args"),
    [
        (3, {}),
        (1, {"async_scheduling": True}),
        (7, {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 40}),
        pytest.param(3, {"enforce_eager": True, "max_num_seqs": 1}, marks=pytest.mark.full),
    ],
    ids=["plain", "two-steps", "preempted", "alone"],
)
def test_a_draft_that_is_the_model(right, count, args):
    own = config(count, model=str(embedded.path()))
    with LLM(**ENGINE | args, speculative_config=own) as llm:
        drafter = counted(llm, count)
        for _ in range(2):  # the second time prompts are cached
            assert answers(llm.generate(*crowd(), use_tqdm=False)) == right
    assert drafter.num_drafts > 300
    if "async_scheduling" not in args:  # plans made ahead ask for drafts that are not made
        assert drafter.num_right == drafter.num_drafts


def test_greedy_drafts_agree_less(right):
    own = config(model=str(embedded.path()), draft_sample_method="greedy")
    with LLM(**ENGINE, speculative_config=own) as llm:
        drafter = counted(llm)
        assert answers(llm.generate(*crowd(), use_tqdm=False)) == right
    assert 0 < drafter.num_right < drafter.num_drafts
