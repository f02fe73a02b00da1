"""What the engine costs: every figure is there, and all requests were served."""

import json

import pytest

from benchmarks import overhead
from quire.cli.bench import run_measurement


@pytest.mark.full
def test_overhead_is_measured_with_and_without_a_model(capsys, cache):
    file = cache / "o.json"
    words = ["--concurrency", "4", "--num-rounds", "1", "--input-len", "8", "--output-len", "6"]
    limits = ["--idle-seconds", "0.1", "--max-model-len", "64", "--num-gpu-blocks-override", "80"]
    assert run_measurement(overhead, "overhead", [*words, *limits, "--output-json", str(file)]) == 0
    figures = json.loads(file.read_text())
    for name, value in figures.items():
        assert name == "model_id" or value >= 0, name
    assert figures["bare_output_tokens_per_second"] > 0
    assert figures["bare_ms_per_output_token_alone"] > 0
    assert "Without a model, 4 streams" in capsys.readouterr().out
