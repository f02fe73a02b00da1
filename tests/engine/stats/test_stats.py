"""Statistics: the figures of steps, the totals in Prometheus' own eyes, stat loggers, the line."""

import functools
import logging
import random
from pathlib import Path

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.config.adapter_plan import AdapterPlan
from quire.config.args.engine_args import EngineArgs
from quire.config.histogram_buckets import FAMILIES, sizes_up_to
from quire.engine.frontend.output_processor import OutputProcessor
from quire.engine.frontend.request_state import RequestGroup
from quire.engine.shared_cores.broker_stats import ApiServerStats
from quire.engine.stats.catalog import DESCRIPTIONS, HISTOGRAMS
from quire.engine.stats.engine_stats import Buckets, EngineStats
from quire.engine.stats.loggers import (
    AggregatedLoggingStatLogger,
    AggregateStatLoggerBase,
    LoggingStatLogger,
    StatLoggerBase,
    StatsOptions,
    with_stat_loggers,
)
from quire.engine.stats.operations import noted
from quire.engine.stats.step_stats import FinishedRequestStats, IterationStats
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.errors import EngineDeadError, InvalidType
from quire.observability.metrics import Counter
from quire.observability.prometheus import exposition, registry_of
from quire.params import RequestOutputKind, SamplingParams
from quire.plugins import load_group
from tests.engine.frontend.async_engines import collect, looped, make_async
from tests.engine.frontend.scripted_engines import make_engine, run


@functools.cache
def make_plan():
    return EngineArgs(kv_cache_memory_bytes=2**25).create_engine_config()


class Recorder(StatLoggerBase):
    made: list = []

    def __init__(self, vllm_config, engine_index=0):
        self.heard = []
        self.engine_index = engine_index
        Recorder.made.append(self)

    def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0):
        self.heard.append((scheduler_stats, iteration_stats, engine_idx))

    def log_engine_initialized(self):
        self.heard.append("initialized")

    def record_sleep_state(self, is_awake, level):
        self.heard.append((is_awake, level))


def scrape(stats, prefix="vllm:"):
    text, content_type = exposition(registry_of(stats.collector(prefix)))
    assert content_type.startswith("text/plain")
    families = list(text_string_to_metric_families(text.decode()))
    return families, {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


def test_buckets_are_those_of_prometheus():
    chance = random.Random(5)
    bounds = (0.5, 1, 2.5, 40)
    mine, theirs = (
        Buckets(bounds),
        prometheus_client.Histogram("h", "", buckets=bounds, registry=None),
    )
    for _ in range(500):
        value = chance.choice([0, 0.5, 1, 1.0000001, 2.5, 40, 41, chance.uniform(0, 50)])
        times = chance.randint(1, 3)
        mine.add(value, times)
        for _ in range(times):
            theirs.observe(value)
    found = mine.histogram("h", {})
    [family] = theirs.collect()
    expected = {s.labels["le"]: s.value for s in family.samples if s.name == "h_bucket"}
    assert found.buckets == expected
    assert found.count == expected["+Inf"]
    assert found.sum == pytest.approx(theirs._sum.get())


def test_sizes_end_at_the_longest():
    assert sizes_up_to(99) == [1, 2, 5, 10, 20, 50]
    assert sizes_up_to(100)[-1] == 100
    assert sizes_up_to(1) == [1]


def run_two_cores(log_stats=True):
    """Two requests on core 1 and 2, a third that waits; steps at 10.0, 10.5 and 10.75 s."""
    outputs = OutputProcessor(None, log_stats=log_stats)
    recorded = []
    for handle, prompt in ((0, [4] * 7), (1, [5] * 3), (2, [6] * 2)):
        params = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)
        group = RequestGroup(
            f"{handle}",
            f"i{handle}",
            None,
            prompt,
            params.output_kind,
            range(handle, handle + 1),
            1,
        )
        outputs.add(group, [EngineCoreRequest(handle, prompt, params, 0, arrival_time=1e9)], 9.0)
    steps = [
        EngineCoreOutputs([0], [8], started=[Started(0, 4, 9.25)], timestamp=10.0, engine_index=1),
        EngineCoreOutputs([1], [8], started=[Started(1, 0, 9.75)], timestamp=10.0, engine_index=2),
        EngineCoreOutputs([0], [8], timestamp=10.5, engine_index=1),
        EngineCoreOutputs(
            [0], [8], timestamp=10.75, engine_index=1,
            finished=[Finished(0, FinishReason.LENGTH, num_preemptions=2)],
        ),
        EngineCoreOutputs(finished=[Finished(1, FinishReason.ERROR, None, "x")], engine_index=2),
    ]  # fmt: skip
    for step in steps:
        recorded.append(outputs.process(step).stats)
    recorded.append(outputs.abort(["2"]).stats)
    return recorded


def test_figures_of_steps():
    first, second, third, fourth, fifth, last = run_two_cores()
    assert [list(found) for found in (first, second, third, fourth, fifth)] == [
        [1],
        [2],
        [1],
        [1],
        [2],
    ]
    assert (first[1].num_prompt_tokens, first[1].num_cached_tokens) == (7, 4)
    assert len(first[1].time_to_first_tokens_iter) == 1
    assert third[1].inter_token_latencies_iter == [0.5]
    assert third[1].num_generation_tokens == 1 and not third[1].time_to_first_tokens_iter
    [ended] = fourth[1].finished_requests
    assert fourth[1].inter_token_latencies_iter == [0.25]
    assert (ended.finish_reason, ended.num_generation_tokens, ended.num_preemptions) == (
        FinishReason.LENGTH,
        3,
        2,
    )
    assert (ended.queued_time, ended.prefill_time) == (0.25, 0.75)
    assert (ended.decode_time, ended.inference_time) == (0.75, 1.5)
    assert ended.mean_time_per_output_token == 0.375
    assert (ended.num_prompt_tokens, ended.num_cached_tokens, ended.max_tokens_param) == (7, 4, 3)
    assert ended.e2e_latency > 0
    assert fourth[1].n_params_iter == [1] and fourth[1].max_num_generation_tokens_iter == [3]
    assert [e.finish_reason for e in fifth[2].finished_requests] == [FinishReason.ERROR]
    [never] = last[0].finished_requests
    assert (never.finish_reason, never.queued_time, never.prefill_time) == (
        FinishReason.ABORT,
        0,
        0,
    )
    assert (never.decode_time, never.inference_time) == (0, 0)


def test_without_statistics_nothing_is_kept():
    assert run_two_cores(log_stats=False) == [{}] * 6


def test_a_scrape_shows_every_core_by_the_names_of_dashboards():
    stats = EngineStats(
        "m", sizes_up_to(100), engine_indexes=(0, 1), options=StatsOptions((), False)
    )
    scheduler = SchedulerStats(3, 2, 0.5, 40, 24, 1, 2)
    for index, found in ((i, s) for step in run_two_cores() for i, s in step.items()):
        stats.record(scheduler if index == 1 else None, found, index)
    stats.note_rejected({"max_num_queued_reqs": 4})
    families, values = scrape(stats)
    engine = lambda index: (("engine", str(index)), ("model_name", "m"))  # noqa: E731
    assert values["vllm:num_requests_running", *engine(1)] == 3
    assert values["vllm:num_requests_waiting", *engine(1)] == 2
    assert values["vllm:prefix_cache_hits_total", *engine(1)] == 3 * 24, "those of each step add up"
    assert values["vllm:num_preemptions_total", *engine(1)] == 3
    assert values["vllm:prompt_tokens_total", *engine(1)] == 7
    assert values["vllm:prompt_tokens_cached_total", *engine(1)] == 4
    assert values["vllm:generation_tokens_total", *engine(1)] == 3
    assert values["vllm:generation_tokens_total", *engine(2)] == 1
    ended = lambda index, reason: values[  # noqa: E731
        "vllm:request_success_total",
        ("engine", str(index)),
        ("finished_reason", reason),
        ("model_name", "m"),
    ]
    assert (ended(1, "length"), ended(2, "error"), ended(0, "abort"), ended(0, "stop")) == (
        1,
        1,
        1,
        0,
    )
    assert values["vllm:request_queue_time_seconds_count", *engine(1)] == 1
    assert values["vllm:request_queue_time_seconds_sum", *engine(1)] == 0.25
    bucket = (
        "vllm:inter_token_latency_seconds_bucket",
        ("engine", "1"),
        ("le", "0.3"),
        ("model_name", "m"),
    )
    assert values[bucket] == 1
    assert (
        values[
            "vllm:admission_rejections_total",
            ("model_name", "m"),
            ("reason", "max_num_queued_reqs"),
        ]
        == 4
    )
    assert ("vllm:request_success_created", *engine(1)) not in values
    kinds = {
        family.name: family.type for family in families if not family.name.endswith("_created")
    }
    assert kinds["vllm:num_requests_running"] == "gauge"
    assert kinds["vllm:time_to_first_token_seconds"] == "histogram"
    of_drafts = {name for name in DESCRIPTIONS if name.startswith("spec_decode")}
    assert {name.removeprefix("vllm:") for name in kinds} == set(DESCRIPTIONS) - of_drafts - {
        "cache_config_info",
        "lora_requests_info",
        "mm_cache_queries",
        "mm_cache_hits",
        *(name for name in DESCRIPTIONS if "_operation" in name),
    }
    assert {name for name, *_ in scrape(stats, "quire:")[1]} >= {"quire:num_requests_running"}


def test_the_cache_of_media_is_counted_where_there_is_one():
    stats = EngineStats("m", sizes_up_to(100))
    stats.media_counts = lambda: (5, 2)
    _, values = scrape(stats)
    model = ("model_name", "m")
    assert values["vllm:mm_cache_queries_total", model] == 5
    assert values["vllm:mm_cache_hits_total", model] == 2


def test_servers_report_what_their_caches_of_media_were_asked_since():
    stats = ApiServerStats(None)
    assert stats.take().media is None
    stats.media_counts = lambda: (5, 2)
    assert stats.take().media == (5, 2)
    stats.media_counts = lambda: (7, 2)
    assert stats.take().media == (2, 0)


def test_all_labels_exist_before_the_first_request():
    stats = EngineStats("m", sizes_up_to(100), plan=make_plan(), options=StatsOptions((), False))
    _, values = scrape(stats)
    reasons = {
        dict(key[1:])["finished_reason"] for key in values if key[0] == "vllm:request_success_total"
    }
    assert reasons == {"stop", "length", "abort", "error", "repetition"}
    info = next(dict(key[1:]) for key in values if key[0] == "vllm:cache_config_info")
    assert int(info["block_size"]) > 0 and int(info["num_gpu_blocks"]) > 0


def test_buckets_can_be_chosen_for_a_family():
    chosen = {"request_latency": [0.01, 0.5], "request_tokens": [10]}
    plan = EngineArgs(custom_histogram_buckets=chosen).create_engine_config()
    assert plan.observability_config.custom_histogram_buckets == chosen
    stats = EngineStats("m", sizes_up_to(100), plan=plan, options=StatsOptions((), False))
    _, values = scrape(stats)
    bounds = {}
    for name, *labels in values:
        if name.endswith("_bucket"):
            bounds.setdefault(name.removeprefix("vllm:"), []).append(dict(labels)["le"])
    assert bounds["e2e_request_latency_seconds_bucket"] == ["0.01", "0.5", "+Inf"]
    assert bounds["request_decode_time_seconds_bucket"] == ["0.01", "0.5", "+Inf"]
    assert bounds["request_prompt_tokens_bucket"] == ["10.0", "+Inf"]
    assert len(bounds["time_to_first_token_seconds_bucket"]) == 23
    in_families = [name for names in FAMILIES.values() for name in names]
    assert sorted(in_families) == sorted(HISTOGRAMS)


def test_adapters_are_one_series_with_the_names_of_the_moment():
    plan = make_plan().changed(adapters=AdapterPlan(3, 16, 3, "float32"))
    stats = EngineStats(
        "m", sizes_up_to(100), plan=plan, options=StatsOptions((), False), engine_indexes=(0, 1)
    )
    for core, names in ((0, ["a", "b"]), (1, ["b", "c"]), (0, ["b"])):
        told = SchedulerStats(running_adapters=names, waiting_adapters=["d"])
        stats.record(told, IterationStats(1000.0 + core), core)
    [(key, value)] = [
        item for item in scrape(stats)[1].items() if item[0][0] == "vllm:lora_requests_info"
    ]
    assert value == 1001.0
    assert dict(key[1:]) == {
        "max_lora": "3", "running_lora_adapters": "b,c", "waiting_lora_adapters": "d"
    }  # fmt: skip


def test_the_state_of_sleep():
    stats = EngineStats("m", sizes_up_to(100), options=StatsOptions((Recorder,), False))

    def state():
        return [
            dict(k[1:])["sleep_state"]
            for k, v in scrape(stats)[1].items()
            if v and k[0] == "vllm:engine_sleep_state"
        ]

    assert state() == ["awake"]
    levels = ((1, ["weights_offloaded"]), (0, []), (2, ["discard_all"]), (None, ["awake"]))
    for level, names in levels:
        stats.note_sleep(level)
        assert state() == names
    assert Recorder.made[-1].heard == ["initialized", (1, 1), (1, 0), (1, 2), (0, 0)]


def test_stat_loggers_are_made_for_each_core_or_once_for_all():
    class Together(AggregateStatLoggerBase):
        def __init__(self, vllm_config, engine_indexes):
            self.heard = []
            self.engine_indexes = engine_indexes

        record, log_engine_initialized = Recorder.record, Recorder.log_engine_initialized

    together = []
    Recorder.made.clear()

    def factory(plan, index):
        assert plan is not None
        return Recorder(plan, index)

    class Kept(Together):
        def __init__(self, *args):
            super().__init__(*args)
            together.append(self)

    stats = EngineStats(
        "m",
        sizes_up_to(9),
        plan=make_plan(),
        options=StatsOptions((factory, Kept), False),
        engine_indexes=(0, 1),
    )
    for index in (0, 1, 1, 5):
        stats.record(SchedulerStats(index), IterationStats(0.0), index)
    assert [(r.engine_index, len(r.heard) - (r.engine_index < 5)) for r in Recorder.made] == [
        (0, 1),
        (1, 2),
        (5, 1),
    ]
    [one] = together
    assert one.engine_indexes == [0, 1]
    assert [entry[2] for entry in one.heard[1:]] == [0, 1, 1, 5]


def test_installed_stat_loggers_turn_statistics_on(packages, monkeypatch):
    source = """
        from quire.engine.stats.loggers import StatLoggerBase
        class Recorder(StatLoggerBase):
            def __init__(self, vllm_config, engine_index=0): pass
            def record(self, *arguments, **named): pass
            def log_engine_initialized(self): pass
    """
    plan = make_plan().changed(log_stats=False)
    packages.install("mine", source, {"vllm.stat_logger_plugins": {"mine": "Recorder"}})
    [installed] = load_group("stat_logger_plugins").values()
    found, options = with_stat_loggers(plan)
    assert options == StatsOptions((installed,), False) and found.serving.log_stats
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert with_stat_loggers(plan, []) == (plan, StatsOptions((), False))
    assert with_stat_loggers(plan, [Recorder], True)[1] == StatsOptions((Recorder,), False, True)


def test_installed_stat_loggers_are_classes_that_can_be_imported(packages, caplog):
    points = {"quire.stat_logger_plugins": {"gone": "Gone"}}
    packages.install("gone", "", points)
    plan = make_plan()
    assert with_stat_loggers(plan) == (plan, StatsOptions((), plan.serving.log_stats))
    assert "'gone' of gone 1.0 (gone:Gone) is left out: it failed: gone has no Gone." in caplog.text
    packages.install("mine", "Recorder = dict", {"quire.stat_logger_plugins": {"mine": "Recorder"}})
    with pytest.raises(InvalidType, match="plugins: mine=<class 'dict'> is not allowed"):
        with_stat_loggers(plan, None)


def step(num_prompt=0, num_cached=0, num_generated=0):
    return IterationStats(0.0, num_generated, num_prompt, num_cached)


@pytest.mark.parametrize("error", [ValueError("full"), SystemExit(3), EngineDeadError("no")])
def test_a_stat_logger_that_raises_costs_nothing_else(caplog, error):
    class Faulty(Recorder):
        def record(self, *args, **kwargs):
            super().record(*args, **kwargs)
            raise error

        def log(self):
            raise error

        record_sleep_state = log

        def __init__(self, plan, index=0):
            if index:
                raise error
            super().__init__(plan, index)

    Recorder.made.clear()

    @looped
    async def serves():
        engine = make_async(log_stats=True)
        options = StatsOptions((Faulty, Recorder), has_log_line=False)
        engine.front_end.stats = stats = EngineStats("m", sizes_up_to(4096), options=options)
        for name in "rs":
            assert (await collect(engine, name, max_tokens=5))[-1].finished
        await engine.do_log_stats()
        await engine.sleep(1)
        await engine.wake_up()
        stats.record(SchedulerStats(), step(1), 7)  # a core that came later
        assert (await collect(engine, "t", max_tokens=5))[-1].finished

    serves()
    faulty, good, late = Recorder.made
    assert late.engine_index == 7 and [core for *_, core in late.heard] == [7]
    steps = [each for each in good.heard if len(each) == 3]
    assert [each for each in faulty.heard if len(each) == 3] == steps and len(steps) >= 15
    assert [each for each in good.heard if len(each) == 2] == [(1, 1), (0, 0)]
    said = [message.partition(" ")[0] for message in caplog.messages if "failed" in message]
    assert said == ["record", "log", "record_sleep_state"]


def test_the_line_tells_of_its_interval_and_is_quiet_when_idle(caplog):
    times = iter([0.0, 10.0, 20.0, 30.0])
    line = LoggingStatLogger(None, 3, clock=lambda: next(times))
    line.record(SchedulerStats(2, 1, 0.25, 10, 5, 0, 1), step(30, 10, 100), engine_idx=3)
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            line.log()
    assert caplog.messages[0] == (
        "engine 3: prompt 2.0 tokens/s, generation 10.0 tokens/s, running 2, waiting 1, "
        "KV 25.0 %, prefix hits 50.0 %"
    )
    assert "prompt 0.0 tokens/s" in caplog.messages[1]
    assert [record.levelno for record in caplog.records] == [
        logging.INFO,
        logging.INFO,
        logging.DEBUG,
    ]


def test_the_hit_rate_is_that_of_the_last_thousand_requests(caplog):
    line = AggregatedLoggingStatLogger(None, [0, 1])
    line.record(SchedulerStats(prefix_cache_queries=10**6, prefix_cache_requests=500), None)
    for number in range(100):
        stats = SchedulerStats(
            1, prefix_cache_queries=10, prefix_cache_hits=10, prefix_cache_requests=10
        )
        line.record(stats, step(1), engine_idx=number % 2)
    with caplog.at_level(logging.INFO):
        line.log()
    assert caplog.messages == [caplog.messages[0]]
    assert caplog.messages[0].startswith("2 engines: ")
    assert caplog.messages[0].endswith("running 2, waiting 0, KV 0.0 %, prefix hits 100.0 %")


def test_both_faces_count_the_same():
    params = {"max_tokens": 5, "n": 2}
    engine = make_engine(lambda request: list(range(10, 60)), log_stats=True)
    engine.add_request("r", [4, 5], SamplingParams(**params))
    run(engine)
    engine.add_request("s", [4], SamplingParams(max_tokens=5))
    engine.step()
    engine.abort_request("s")

    @looped
    async def awaited():
        served = make_async(log_stats=True)
        await collect(served, "r", (4, 5), **params)
        stream = served.generate([4], SamplingParams(max_tokens=5), "s")
        await anext(stream)
        await stream.aclose()
        registry = registry_of(served.metrics_collector("quire:"))
        assert b"quire:generation_tokens_total" in exposition(registry)[0]
        return counts(served)

    def counts(face):
        return {
            (m.name, *m.labels.values()): m.value
            for m in face.get_metrics()
            if isinstance(m, Counter) and m.name != "vllm:admission_rejections"
        }  # an engine of one caller refuses nobody

    found = counts(engine)
    assert found["vllm:generation_tokens", "scripted", "0"] == 11
    assert found["vllm:prompt_tokens", "scripted", "0"] == 5
    assert found["vllm:request_success", "scripted", "0", "abort"] == 1
    assert awaited() == found


def test_finished_stats_need_no_times():
    assert FinishedRequestStats(FinishReason.ABORT).e2e_latency == 0.0


def test_the_page_names_every_metric():
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in page.splitlines() if row.startswith("| `")]
    assert {row[0].strip("| `"): row[-1].strip(" |") for row in rows} == DESCRIPTIONS


def test_control_calls_are_counted_while_they_last_and_by_their_time():
    stats = EngineStats("m", sizes_up_to(64))
    call = Utility("start_weight_update", (True,))
    labels = {"operation": "start_draft"}

    def found():
        return {m.name: m for m in stats.metrics("") if m.labels == labels}

    assert not found()
    with noted(call, stats.note_operation):
        shown = found()
        assert shown["rl_weight_update_operations_in_flight"].value == 1
        assert shown["rl_weight_update_operation_duration_seconds"].count == 0
    with pytest.raises(ValueError), noted(call, stats.note_operation):
        raise ValueError
    shown = found()
    assert shown["rl_weight_update_operations_in_flight"].value == 0
    assert shown["rl_weight_update_operation_duration_seconds"].count == 2
    with noted(Utility("get_weight_version"), stats.note_operation):
        assert len(found()) == 2
