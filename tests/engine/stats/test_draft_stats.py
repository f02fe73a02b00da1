"""Drafts in the metrics and in the log: sums over steps, cores and positions."""

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire import LLM, SamplingParams
from quire.engine.stats.engine_stats import EngineStats
from quire.engine.stats.loggers import LoggingStatLogger, StatsOptions
from quire.engine.stats.step_stats import IterationStats
from quire.engine.wire.messages import SchedulerStats, SpecDecodingStats
from quire.observability.metrics import Vector
from quire.observability.prometheus import exposition, registry_of

STEPS = [
    SchedulerStats(num_draft_tokens=7, num_accepted=[1, 0, 1, 1]),
    SchedulerStats(),
    SchedulerStats(num_draft_tokens=3, num_accepted=[0, 1, 0, 0]),
]


def test_counts_by_length_become_counts_by_position():
    found = SpecDecodingStats.of(7, [1, 0, 1, 1])
    assert found == SpecDecodingStats(3, 3, 7, 5, [2, 2, 1])
    assert STEPS[0].spec_decoding_stats == found
    assert STEPS[1].spec_decoding_stats is None


def test_steps_add_up_in_the_metrics():
    stats = EngineStats("m", [1.0], options=StatsOptions((), False))
    assert not [metric for metric in stats.metrics() if "spec_decode" in metric.name]
    for step in STEPS:
        stats.record(step, IterationStats(0.0), 0)
    drafts = [metric for metric in stats.metrics() if "spec_decode" in metric.name]
    counts, [vector] = drafts[:-1], drafts[-1:]
    values = {each.name.removeprefix("vllm:spec_decode_num_"): each.value for each in counts}
    assert values == {"drafts": 4, "draft_tokens": 10, "accepted_tokens": 6}
    assert isinstance(vector, Vector) and vector.values == [3, 2, 1]
    assert vector.labels == counts[0].labels
    text, _ = exposition(registry_of(stats.collector("vllm:")))
    [family] = [
        each for each in text_string_to_metric_families(text.decode())
        if each.name == "vllm:spec_decode_num_accepted_tokens_per_pos"
    ]  # fmt: skip
    values = {s.labels["position"]: s.value for s in family.samples if s.name.endswith("_total")}
    assert family.type == "counter" and values == {"0": 3, "1": 2, "2": 1}


def test_a_line_says_what_became_of_drafts(caplog):
    now = [0.0]
    line = LoggingStatLogger(None, clock=lambda: now[0])
    with caplog.at_level(logging.INFO):
        for step in STEPS:
            line.record(step, IterationStats(0.0, num_generation_tokens=4))
        now[0] = 2.0
        line.log()
        text = caplog.messages[-1]
        assert "mean acceptance length 2.50" in text and "6 of 10 tokens (60.0 %)" in text
        assert "accepted 3.0 tokens/s, drafted 5.0 tokens/s" in text
        assert "by position 0.75, 0.50, 0.25" in text
        line.record(SchedulerStats(), IterationStats(0.0, num_generation_tokens=1))
        now[0] = 4.0
        line.log()
    assert "drafts" not in caplog.messages[-1]


@pytest.mark.parametrize("multiprocessing", [False, True])
def test_an_engine_counts_its_drafts(multiprocessing):
    config = {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
        "num_speculative_tokens_per_batch_size": [(1, 8, 3)],  # not what steps happen to take
    }  # fmt: skip
    with LLM(
        max_model_len=128,
        max_num_seqs=8,
        speculative_config=config,
        disable_log_stats=False,
        enable_multiprocessing=multiprocessing,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        llm.generate(["for i in range(10):\n    print(i)\n" * 3], params, use_tqdm=False)
        values = {metric.name: metric for metric in llm.get_metrics() if "spec" in metric.name}
        by_place = values["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        assert sum(by_place) == values["vllm:spec_decode_num_accepted_tokens"].value
        drafted = values["vllm:spec_decode_num_draft_tokens"].value
        assert drafted >= values["vllm:spec_decode_num_accepted_tokens"].value > 0
