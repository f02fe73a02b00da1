"""What became of the drafts of each completion, as its drafter and its deltas tell."""

import pytest

from quire import LLM, EngineArgs, SamplingParams
from quire.engine.stats.request_drafts import RequestSpecDecodeMetrics
from quire.errors import InvalidParameter
from quire.params import RequestOutputKind

CODE = "for i in range(10):\n    print(i)\n" * 3
PROMPTS = [CODE, "def add(a, b):\n    return a + b\n" * 4, "The number of", CODE[5:]]
PLAN = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [(1, 8, 3)]}
NGRAM = {"method": "ngram", "prompt_lookup_min": 1, **PLAN}
ENGINE = {"max_model_len": 160, "max_num_seqs": 8}


class Stubborn:
    """Drafts the same three tokens always; `asked` are the numbers that it was asked for."""

    asked: list[int] = []

    def __init__(self, plan):
        pass

    def propose(self, token_ids, num_tokens):
        self.asked.append(num_tokens)
        return [11, 12, 13][:num_tokens]


def by_delta(engine, prompts, params):
    """Lengths of each request's deltas, and its last output."""
    for number, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
        each.output_kind = RequestOutputKind.DELTA
        engine.add_request(str(number), prompt, each)
    lengths, last = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            [completion] = output.outputs
            lengths.setdefault(output.request_id, []).append(len(completion.token_ids))
            if output.finished:
                last[output.request_id] = completion
            else:
                assert completion.spec_decode_metrics is None
    return lengths, last


def greedy(**more):
    return SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, **more)


@pytest.mark.parametrize("multiprocessing", [False, True])
def test_accepted_drafts_are_those_of_the_deltas(multiprocessing):
    with LLM(
        **ENGINE, speculative_config=NGRAM, per_request_spec_decode_metrics="detailed",
        enable_multiprocessing=multiprocessing,
    ) as llm:  # fmt: skip
        lengths, last = by_delta(llm.llm_engine, PROMPTS, [greedy() for _ in PROMPTS])
    for name, found in lengths.items():
        metrics = last[name].spec_decode_metrics
        accepted, drafted = metrics.per_step_accepted, metrics.per_step_drafted
        # A step without a right draft gives one token, as a step without drafts does.
        assert [n for n in accepted if n] == [n - 1 for n in found if n > 1]
        assert len(accepted) == len(drafted) <= len(found)
        steps = zip(accepted, drafted, strict=True)
        assert all(0 <= right <= tried and 1 <= tried <= 3 for right, tried in steps)
        assert metrics.num_draft_tokens == sum(drafted)
        assert metrics.histogram == [accepted.count(n) for n in range(4)]
    assert sum(last["0"].spec_decode_metrics.per_step_accepted) > 0


def test_drafts_are_those_that_were_made():
    config = {"method": "custom_class", "model": f"{__name__}.Stubborn", **PLAN}
    Stubborn.asked.clear()
    with LLM(
        **ENGINE, speculative_config=config, per_request_spec_decode_metrics="summary",
        async_scheduling=False,
    ) as llm:  # fmt: skip
        [output] = llm.generate([PROMPTS[2]], greedy(), use_tqdm=False)
    metrics = output.outputs[0].spec_decode_metrics
    # The last ones were not needed any more, and those before the end were cut.
    assert 0 < metrics.num_draft_tokens <= sum(Stubborn.asked)
    assert sum(metrics.histogram) >= 50 and metrics.per_step_accepted == []
    assert metrics.num_draft_tokens > 2 * sum(metrics.histogram)


def test_they_add_up_to_the_counters_of_the_engine():
    with LLM(
        **ENGINE, speculative_config=NGRAM, per_request_spec_decode_metrics="summary",
        disable_log_stats=False,
    ) as llm:  # fmt: skip
        params = [greedy(), SamplingParams(temperature=0.8, n=3, max_tokens=40), greedy(), greedy()]
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        counters = {each.name: each for each in llm.get_metrics()}
        [once] = llm.generate([CODE], SamplingParams(max_tokens=1), use_tqdm=False)
        stopped = greedy(stop=["print"])
        [ended] = llm.generate([CODE], stopped, use_tqdm=False)
    found = [each.spec_decode_metrics for output in outputs for each in output.outputs]
    assert len(found) == 6 and len({id(each) for each in found}) == 6
    sums = {
        "drafts": sum(sum(each.histogram) for each in found),
        "draft_tokens": sum(each.num_draft_tokens for each in found),
        "accepted_tokens": sum(each.to_dict()["num_accepted_draft_tokens"] for each in found),
    }
    for name, value in sums.items():
        assert counters[f"vllm:spec_decode_num_{name}"].value == value > 0
    assert once.outputs[0].spec_decode_metrics == RequestSpecDecodeMetrics(3, [0, 0, 0, 0])
    assert ended.outputs[0].stop_reason == "print"
    assert ended.outputs[0].spec_decode_metrics is not None


def test_without_being_asked_nothing_is_counted():
    with LLM(**ENGINE, speculative_config=NGRAM) as llm:
        [output] = llm.generate([CODE], greedy(), use_tqdm=False)
    assert output.outputs[0].spec_decode_metrics is None


def test_a_summary_has_the_names_and_the_arithmetic_of_the_reference():
    metrics = RequestSpecDecodeMetrics.new(3)
    empty = metrics.to_dict()
    assert empty["mean_acceptance_length"] == 1.0 and empty["draft_acceptance_rate"] == 0.0
    for drafts, right in ((3, 2), (2, 0), (1, 1)):
        metrics.observe(drafts, right, detailed=True)
    assert metrics.to_dict() == {
        "mean_acceptance_length": 2.0, "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [1, 1, 1, 0], "num_spec_steps": 3, "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 6, "num_spec_tokens": 3,
        "per_step_accepted": [2, 0, 1], "per_step_drafted": [3, 2, 1],
    }  # fmt: skip


@pytest.mark.parametrize("level", ["summary", "detailed"])
def test_it_is_refused_where_nothing_is_drafted(level):
    with pytest.raises(InvalidParameter, match="nothing is drafted") as caught:
        EngineArgs(per_request_spec_decode_metrics=level).create_engine_config()
    assert caught.value.parameter == "per_request_spec_decode_metrics"
    EngineArgs(per_request_spec_decode_metrics="none").create_engine_config()
