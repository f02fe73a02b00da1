"""`quire show`, `quire doctor` and the benches: what they print, and the formulas of the limit."""

import json

import pytest
import torch

from quire import embedded
from quire.bench import limits, machine, report, scheduler, workload
from quire.cli import main
from quire.config.engine_args import EngineArgs
from quire.models import read_spec
from quire.models.figures import flops_per_token
from quire.testing import make_checkpoint
from quire.testing.model_shapes import make_config


def test_show_prints_the_program_of_the_embedded_model(capsys):
    assert main.main(["show"]) == 0
    out = capsys.readouterr().out
    assert "quire-embedded" in out and "LlamaForCausalLM" in out
    assert "bytes per token" in out and "softmax" in out


def test_show_takes_overrides(capsys):
    folder = str(embedded.path())
    assert main.main(["show", folder, "--hf-overrides.num_hidden_layers", "1"]) == 0
    assert "layers            1\n" in capsys.readouterr().out


def test_show_loads_no_weights(capsys, tmp_path):
    config = make_config("8b", "llama")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main.main(["show", str(tmp_path)]) == 0
    assert "8,030,261,248" in capsys.readouterr().out


def test_doctor_reports_every_part(capsys):
    assert main.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for word in ("python", "torch", "cores", "memory", "op attend", "embedded model"):
        assert any(line.startswith(word) for line in out.splitlines()), word
    assert main.main(["doctor", "--json"]) == 0
    assert "cpu features" in json.loads(capsys.readouterr().out)


def test_doctor_names_what_does_not_work(capsys, monkeypatch):
    def fail():
        raise OSError("no such thing")

    monkeypatch.setattr("quire.embedded.path", fail)
    assert main.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: OSError: no such thing" in out and "op attend" in out


def test_scheduler_bench_writes_its_figures(capsys, tmp_path):
    file = tmp_path / "figures.json"
    words = ["--num-requests", "4", "9", "--num-steps", "20", "--num-trials", "1"]
    assert main.main(["bench", "scheduler", *words, "--output-json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert set(figures["us_per_request_step"]) == {"4", "9"}
    assert all(cost > 0 for cost in figures["us_per_request_step"].values())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == figures


def test_scheduler_bench_decodes_every_request_in_every_step(monkeypatch):
    plans = []
    real = scheduler.fake_result
    monkeypatch.setattr(scheduler, "fake_result", lambda plan: plans.append(plan) or real(plan))
    scheduler.decode_cost_us(5, 40, input_len=10, block_size=4)
    timed = plans[-40:]
    assert all(len(plan.decode_rows) == 5 and not plan.chunks for plan in timed)
    assert sum(len(plan.new_blocks) for plan in timed) == 5 * 40 // 4  # boundaries are crossed


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(machine, "_MATRIX", 64)
    return tmp_path


def test_throughput_and_latency_of_a_random_model(capsys, cache):
    flags = ["--random-model", "tiny", "--input-len", "5", "--output-len", "3"]
    flags += ["--max-model-len", "64", "--max-num-seqs", "2", "--dtype", "float32"]
    file = cache / "t.json"
    words = ["bench", "throughput", *flags, "--num-prompts", "3", "--output-json", str(file)]
    assert main.main(words) == 0
    figures = json.loads(file.read_text())
    assert (figures["num_requests"], figures["total_num_tokens"]) == (3, 24)
    assert figures["num_output_tokens"] == 9
    assert figures["cpu_time"] > 0
    rate = figures["num_output_tokens"] / figures["elapsed_time"]
    assert figures["output_tokens_per_second"] == pytest.approx(rate)
    share = figures["limit_seconds"] / figures["elapsed_time"]
    assert figures["share_of_machine_limit"] == pytest.approx(share)
    assert figures["machine"]["dtype"] == "float32"
    assert "Throughput: " in capsys.readouterr().out

    words = ["bench", "latency", *flags, "--batch-size", "2", "--num-iters", "2"]
    assert main.main([*words, "--num-iters-warmup", "0"]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(figures["latencies"]) == 2
    assert figures["avg_latency"] == pytest.approx(sum(figures["latencies"]) / 2)
    assert set(figures["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    for name in ("elapsed_time", "num_requests", "total_num_tokens", "output_tokens_per_second"):
        assert name in figures


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


QWEN = read_spec(make_config("0.6b", "qwen3"))


def test_arithmetic_of_the_published_shape():
    """performance.md counts 0.88 GFLOP for a prompt token and 1.19 for an output token."""
    assert flops_per_token(QWEN) / 1e9 == pytest.approx(1.19, abs=0.01)
    body = limits.prefill_flops(QWEN, 128) - 2 * QWEN.vocab * QWEN.dim
    attention = 128 * 4 * 16 * 128 * 64 * 28
    assert (body - attention) / 128 / 1e9 == pytest.approx(0.88, abs=0.01)
    assert limits.step_bytes(QWEN, 1, 0, 2) / 1e9 == pytest.approx(1.19, abs=0.01)


def test_limit_is_bandwidth_for_one_row_and_arithmetic_for_many():
    one = limits.Workload(1, 1, 11, 256)
    seconds = limits.least_seconds(QWEN, one, 2, read_bytes_per_s=40e9, flops_per_s=1e15)
    assert seconds == pytest.approx(10 * 1.19 / 40, rel=0.01)
    many = limits.Workload(64, 1, 11, 256)
    seconds = limits.least_seconds(QWEN, many, 2, read_bytes_per_s=1e15, flops_per_s=1e12)
    assert seconds == pytest.approx(64 * (0.88 + 0.31 + 10 * 1.19) / 1000, rel=0.02)


def test_more_waves_take_more_reads():
    def seconds(max_num_seqs):
        work = limits.Workload(32, 8, 8, max_num_seqs)
        return limits.least_seconds(QWEN, work, 2, 40e9, 1e15)

    assert seconds(8) == pytest.approx(4 * seconds(32), rel=0.05)


def test_few_rows_of_a_mixture_read_few_experts():
    config = make_config("tiny", "mixtral")
    decoder = read_spec(config)
    per_rows = [limits.step_bytes(decoder, rows, 0, 2) for rows in (1, 4, 10_000)]
    assert per_rows == sorted(per_rows) and per_rows[0] < per_rows[1] < per_rows[2]
    everything = limits.num_parameters(decoder)
    if not decoder.tie:
        everything -= decoder.vocab * decoder.dim
    assert per_rows[2] == pytest.approx(2 * everything)


def test_machine_limits_leave_the_threads_alone(cache):
    before = torch.get_num_threads()
    measured = machine.measure_limits("bfloat16", 1, repeats=1)
    assert measured.read_bytes_per_s > 0 and measured.matrix_flops_per_s > 0
    assert torch.get_num_threads() == before


def test_percentile_interpolates():
    assert report.percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert report.percentile([1.0, 2.0], 75) == 1.75
    assert report.percentile([4.0], 99) == 4.0


def test_a_checkpoint_of_any_shape_can_be_planned(tmp_path):
    folder = make_checkpoint(tmp_path / "m", shape="tiny", family="mistral")
    assert EngineArgs(model=str(folder)).create_engine_config().architecture == "MistralForCausalLM"
