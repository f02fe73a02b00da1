"""Ids, log-probabilities, texts and ends are those without drafts, bit for bit, whoever drafts."""

from functools import partial

import numpy as np
import pytest

from quire import LLM, AdapterLogitsProcessor, SamplingParams
from quire.hardware.native import find_native
from tests.speculation.crowd import ELSEWHERE, MARKS, REPORTS, VARIANTS, answers, crowd, params_of
from tests.speculation.drafters import Failing, Lying, Recorder, Replay, Wild, install

NATIVE, REASON = find_native()
pytestmark = pytest.mark.skipif(NATIVE is None, reason=REASON)

ENGINE = {"max_model_len": 128, "max_num_seqs": 32, "reasoning_config": MARKS, "block_size": 8}
ALWAYS = {"num_speculative_tokens_per_batch_size": [[1, 99, 7]]}
NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 2}


@pytest.fixture(scope="module")
def right():
    """The answers of an engine without drafts."""
    with LLM(**ENGINE) as llm:
        return answers(llm.generate(*crowd(), use_tqdm=False))


@pytest.fixture(scope="module")
def drafting():
    with LLM(**ENGINE, speculative_config=NGRAM) as llm:
        yield llm


@pytest.fixture(scope="module")
def recorded(drafting, right):
    """The ids by prompt and seed, of an engine that could verify drafts but gets none."""
    recorder = Recorder()
    install(drafting, recorder, 7)
    assert answers(drafting.generate(*crowd(), use_tqdm=False)) == right
    assert recorder.num_drafted == 0
    return recorder.answers


def test_the_crowd_has_every_parameter():
    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    used = {"seed"}.union(*VARIANTS)
    assert used.isdisjoint(ELSEWHERE) and used | ELSEWHERE.keys() == fields
    forms = [
        variant["structured_outputs"] for variant in VARIANTS if "structured_outputs" in variant
    ]
    kinds = {"json", "regex", "choice", "grammar", "json_object", "structural_tag"}
    assert {form.kind for form in forms} == kinds
    assert any(form.starts_after for form in forms)


def test_every_parameter_of_the_crowd_changes_an_answer(drafting):
    """Else nobody would see what drafts make of it."""

    alone = [(place, each) for place, each in enumerate(VARIANTS) if "n" not in each]
    lacking = [
        (place, key, {name: value for name, value in each.items() if name != key})
        for place, each in alone
        for key in each
    ]
    right = dict(zip([place for place, _ in alone], texts(drafting, alone), strict=True))
    found = texts(drafting, [(place, each) for place, _, each in lacking])
    changed = {
        key for (place, key, _), text in zip(lacking, found, strict=True) if text != right[place]
    }
    assert changed == set().union(*VARIANTS) - REPORTS


def texts(llm, chosen):
    """Ids, texts and ends of the requests in some places of the crowd, with these parameters."""
    prompts = crowd()[0]
    params = [params_of(each, seed=place) for place, each in chosen]
    outputs = llm.generate([prompts[place] for place, _ in chosen], params, use_tqdm=False)
    ones = [output.outputs[0] for output in outputs]
    return [(list(one.token_ids), one.text, one.finish_reason, one.stop_reason) for one in ones]


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_with_guesses_from_the_tokens(right, method):
    config = NGRAM if method == "ngram" else {"method": method}
    with LLM(**ENGINE, speculative_config=config) as llm:
        for _ in range(2):  # the second time the outputs are known
            assert answers(llm.generate(*crowd(), use_tqdm=False)) == right


@pytest.mark.parametrize(
    ("make", "num_tokens", "is_right"),
    [
        (lambda known: Replay(known), 7, True),
        (lambda known: Replay(known, spoiled=0.3), 3, True),
        (lambda known: Replay(known, spoiled=1.0), 1, False),
        (lambda known: Wild(known, spoiled=0.2), 7, True),
        (lambda known: Wild(known, spoiled=1.0), 3, False),
        (lambda known: Failing(known, spoiled=0.1), 3, True),
        (lambda known: Lying(known), 3, False),
    ],
    ids=["right", "spoiled", "wrong", "wild", "wild-and-wrong", "failing", "lying"],
)
def test_with_any_drafter(drafting, right, recorded, make, num_tokens, is_right):
    drafter = make(recorded)
    install(drafting, drafter, num_tokens)
    drafting.reset_prefix_cache()
    assert answers(drafting.generate(*crowd(), use_tqdm=False)) == right
    assert (drafter.num_accepted > 0) == is_right
    if num_tokens == 7 and is_right:
        long = {key for key, ids in recorded.items() if len(ids) > 3}
        assert drafter.accepted >= long, "no parameter keeps drafts from being right"


@pytest.mark.parametrize(
    "args",
    [
        {"num_gpu_blocks_override": 40, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 40, "max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"max_num_seqs": 1},
        {"async_scheduling": True, "num_gpu_blocks_override": 60},
        {"scheduling_policy": "priority", "num_gpu_blocks_override": 50, "enforce_eager": True},
    ],
    ids=["preempted", "chunked", "alone", "two-steps", "priorities"],
)
def test_in_any_engine(right, recorded, args):
    with LLM(**ENGINE | args, speculative_config=NGRAM) as llm:
        for chance in (0.1, 1.0):
            drafter = Replay(recorded, spoiled=chance)
            install(llm, drafter, 7)
            order = {"priority": list(range(len(crowd()[0])))[::-1]} if len(args) > 2 else {}
            assert answers(llm.generate(*crowd(), use_tqdm=False, **order)) == right
            assert drafter.num_accepted > 0 or chance == 1


class Steer(AdapterLogitsProcessor):
    """Makes a request avoid tokens that depend on all of its output."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        step = (params.extra_args or {}).get("avoid")
        return None if step is None else partial(avoid, step)


def avoid(step, output_ids, logits):
    if step == 13 and len(output_ids) == 9:
        raise ValueError("not after nine tokens")
    logits[sum(output_ids) % step :: step] -= 5.0
    return logits


class Wide(Steer):
    """Looks at the batch as a whole."""

    def apply(self, logits):
        return super().apply(logits)


def steered():
    prompts, params = crowd(12)
    for i, each in enumerate(params):
        if i % 3:
            each.extra_args = {"avoid": (7, 13, 5)[i % 3 - 1]}
    return prompts, params


def outcomes(llm):
    return answers(llm.generate(*steered(), use_tqdm=False))


def test_callables_of_requests_see_the_drafts_before_each_position():
    with LLM(**ENGINE, logits_processors=[Steer]) as llm:
        right = outcomes(llm)
        together = answers(llm.generate(*crowd(), use_tqdm=False))
    assert "error" in [each[3] for each in right if isinstance(each, tuple)]
    with LLM(**ENGINE, logits_processors=[Steer], speculative_config=NGRAM) as llm:
        recorder = Recorder()
        install(llm, recorder, 7)
        assert outcomes(llm) == right
        for chance in (0.0, 0.4):
            drafter = Replay(recorder.answers, spoiled=chance)
            install(llm, drafter, 7)
            assert outcomes(llm) == right
            assert drafter.num_accepted > 0
            assert answers(llm.generate(*crowd(), use_tqdm=False)) == together


def test_a_processor_of_whole_batches_gets_no_drafts(caplog):
    with LLM(**ENGINE, logits_processors=[Wide]) as llm:
        right = outcomes(llm)
    with LLM(**ENGINE, logits_processors=[Wide], speculative_config=NGRAM) as llm:
        assert outcomes(llm) == right
    said = [r for r in caplog.records if "no tokens are drafted" in r.getMessage()]
    assert len(said) == 1


class Hostile:
    """A user's class that does one thing after the other with what it is given."""

    num_calls = 0

    def __init__(self, plan):
        self.plan = plan

    def propose(self, token_ids, num_tokens):
        Hostile.num_calls += 1
        last = token_ids[-1]
        kind = Hostile.num_calls % 11
        if kind == 0:
            raise RuntimeError("no drafts today")
        token_ids.clear()  # it is a copy
        return (
            [last] * num_tokens, np.array([last, 2**40]), [-1], ["many"], None, range(10**6),
            [float("nan")], iter([last]), [2**70], [last, 3000], (3, 2),
        )[kind]  # fmt: skip


def test_a_hostile_class_of_the_users_costs_drafts_only(right):
    config = {"method": "custom_class", "model": f"{__name__}.Hostile", "num_speculative_tokens": 3}
    Hostile.num_calls = 0
    with LLM(**ENGINE, speculative_config=config | ALWAYS) as llm:
        assert answers(llm.generate(*crowd(), use_tqdm=False)) == right
    assert Hostile.num_calls > 20
