"""benchmarks/speculation.py with the embedded model: what it reports, not how fast it is."""

import json

import pytest

from benchmarks import speculation
from quire.cli.bench import run_measurement
from quire.testing import make_checkpoint


def ran(tmp_path, *flags):
    file = tmp_path / "figures.json"
    common = ["--output-len", "24", "--num-iters", "1", "--max-model-len", "128"]
    words = [*common, "--output-json", str(file), *flags]
    assert run_measurement(speculation, "speculation", words) == 0
    return json.loads(file.read_text())["results"]


def test_an_oracle_is_as_right_as_it_should_be(tmp_path, capsys):
    words = ["--oracle", "0", "1", "--fixed", "--batch-size", "2", "--temperature", "1"]
    right, wrong = ran(tmp_path, *words, "--spec-method", "ngram", "--spec-tokens", "3")
    assert right["acceptance_rate"] == 1.0 and right["acceptance_by_position"][0] == 1.0
    assert wrong["acceptance_rate"] == 0.0 and wrong["mean_acceptance_length"] == 1.0
    assert right["same_answers"] and wrong["same_answers"]
    assert "mean acceptance length" in capsys.readouterr().out


def test_an_oracle_has_the_cost_of_a_network(tmp_path, cache):
    weights = make_checkpoint(tmp_path / "drafts", seed=1)  # other weights than the model's
    words = ["--random-model", "tiny", "--spec-method", "draft_model", "--spec-tokens", "2"]
    words += ["--spec-model", str(weights), "--batch-size", "2", "--temperature", "0", "--fixed"]
    [alone] = ran(tmp_path, *words)
    [replaced] = ran(tmp_path, *words, "--oracle", "0")
    assert alone["acceptance_rate"] < 1.0 and replaced["acceptance_rate"] == 1.0
    assert replaced["drafting_seconds"]["2"] > 0


@pytest.mark.full
def test_paragraphs_of_a_text_are_prompts(tmp_path):
    text = tmp_path / "code.txt"
    text.write_text("def f(x):\n    return x\n\n\nfor i in range(3):\n    print(i)\n" * 3)
    found = ran(tmp_path, "--prompts", str(text), "--batch-size", "1", "2", "--temperature", "0")
    assert [each["batch_size"] for each in found] == [1, 2]
    assert all(each["same_answers"] for each in found)
