"""Scheduler, throughput and latency: what they write."""

import json

import pytest

from benchmarks import scheduler
from quire.bench import report, workload
from quire.cli import main
from quire.cli.bench import run_measurement

FLAGS = ["--random-model", "tiny", "--input-len", "5", "--output-len", "3", "--max-model-len", "64"]
FLAGS += ["--max-num-seqs", "2", "--dtype", "float32"]


def test_scheduler_bench_writes_its_figures(capsys, tmp_path):
    file = tmp_path / "figures.json"
    words = ["--num-requests", "4", "9", "--num-steps", "20", "--num-trials", "1"]
    assert run_measurement(scheduler, "scheduler", [*words, "--output-json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures["us_per_request_step"]) == {"4", "9"}
    assert all(cost > 0 for cost in figures["us_per_request_step"].values())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures


def test_scheduler_bench_decodes_every_request_in_every_step(monkeypatch):
    plans = []
    real = scheduler.fake_result
    monkeypatch.setattr(
        scheduler, "fake_result", lambda plan, *how: plans.append(plan) or real(plan, *how)
    )
    for num_drafts in (0, 3):
        scheduler.decode_cost_us(5, 40, input_len=10, block_size=4, num_drafts=num_drafts)
        timed = plans[-40:]
        assert all(len(plan.decode_rows) == 5 and not plan.chunks for plan in timed)
        assert all(sum(plan.sampled_drafts) == 5 * num_drafts for plan in timed)
        steps_of_a_block = 4 // (1 + num_drafts)  # boundaries are crossed
        assert sum(len(plan.new_blocks) for plan in timed) == 5 * 40 // steps_of_a_block


def test_throughput_of_a_random_model(capsys, cache):
    file = cache / "t.json"
    words = ["--num-prompts", "3", "--num-trials", "3", "--output-json", str(file)]
    assert main.main(["bench", "throughput", *FLAGS, *words]) == 0
    figures = json.loads(file.read_text())
    assert (figures["num_requests"], figures["total_num_tokens"]) == (3, 24)
    assert figures["num_output_tokens"] == 9
    assert figures["cpu_time"] > 0 and figures["resident_bytes"] > 0
    assert sorted(figures["elapsed_times"])[1] == figures["elapsed_time"]
    rate = figures["num_output_tokens"] / figures["elapsed_time"]
    assert figures["output_tokens_per_second"] == pytest.approx(rate)
    share = figures["limit_seconds"] / figures["elapsed_time"]
    assert figures["share_of_machine_limit"] == pytest.approx(share)
    assert set(figures["machine"]["torch_flops_per_s"]) == {"float32"}
    said = capsys.readouterr().out
    assert "Throughput: " in said and figures["machine"]["read_by"] in said


def test_latency_of_a_random_model_in_parts(capsys, cache):
    words = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0", "--n", "2"]
    assert main.main(["bench", "latency", *FLAGS, "--max-num-seqs", "4", *words]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(figures["latencies"]) == 2
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 2)
    assert set(figures["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    for name in ("elapsed_time", "num_requests", "total_num_tokens", "output_tokens_per_second"):
        assert name in figures
    assert 0 < figures["prefill_seconds"] < max(figures["latencies"])
    decode_s = 2 * 2 * 2 / figures["decode_tokens_per_second"]  # all but the first tokens
    assert figures["prefill_seconds"] + decode_s <= sum(figures["latencies"])


def test_latency_without_decode_steps_has_no_decode_rate(capsys, cache):
    words = ["--batch-size", "1", "--num-iters", "1", "--num-iters-warmup", "0"]
    assert main.main(["bench", "latency", *FLAGS, *words, "--output-len", "1"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "prefill_share_of_machine_limit" in figures
    assert "decode_tokens_per_second" not in figures


@pytest.mark.parametrize("given", ["0", "-1", "two"])
@pytest.mark.parametrize(
    ("kind", "flag"),
    [("throughput", "--num-prompts"), ("throughput", "--num-trials"), ("latency", "--num-iters")]
    + [("serve", "--num-prompts"), ("startup", "--num-trials")],
)
def test_counts_without_sense_are_refused_by_name(capsys, kind, flag, given):
    with pytest.raises(SystemExit) as caught:
        main.main(["bench", kind, f"{flag}={given}"])
    assert caught.value.code == 2
    assert f"argument {flag}: {given!r} is not an integer >= 1" in capsys.readouterr().err


def test_model_and_random_model_exclude_each_other(capsys, cache):
    words = ["bench", "throughput", "--random-model", "tiny", "--model", "x"]
    assert main.main(words) == 2
    assert "--model was given as well" in capsys.readouterr().err


def test_a_random_model_is_written_once(cache):
    folder = workload.random_model("tiny")
    weights = folder / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert workload.random_model("tiny") == folder
    assert weights.stat().st_mtime_ns == before


def test_prompts_are_a_function_of_their_arguments():
    first = workload.random_prompts(3, 4, 100, seed=1)
    assert first == workload.random_prompts(3, 4, 100, seed=1)
    assert first != workload.random_prompts(3, 4, 100, seed=2)
    assert [len(ids) for ids in first] == [4, 4, 4]
    assert all(0 <= i < 100 for ids in first for i in ids)


def test_percentile_interpolates():
    assert report.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert report.percentile([1.0, 2.0], 75) == 1.75
    assert report.percentile([4.0], 99) == 4.0
