"""Start-up and kernels: what they measure and write."""

import json

import pytest

from benchmarks import kernels
from quire.bench import startup
from quire.cli import main
from quire.config.args.engine_args import EngineArgs
from quire.errors import LoadError


@pytest.mark.full
def test_parts_of_a_start_add_up_to_its_first_token(capsys, tmp_path):
    file = tmp_path / "figures.json"
    words = ["--num-trials", "1", "--max-model-len", "64", "--output-json", str(file)]
    assert main.main(["bench", "startup", *words]) == 0
    figures = json.loads(file.read_text())
    seconds = figures["seconds"]
    assert sum(seconds[part] for part in startup.PARTS) == pytest.approx(seconds["first token"])
    assert 0 < sum(seconds[part] for part in startup.BUILDER_PARTS) < seconds["engine"]
    assert seconds["ready"] < seconds["first token"] == figures["elapsed_time"]
    assert "first token after" in capsys.readouterr().out


def test_a_start_that_fails_says_why(tmp_path):
    with pytest.raises(LoadError, match="no-such-folder"):
        startup.one_start(EngineArgs(model=str(tmp_path / "no-such-folder")))


def test_kernels_are_timed_with_each_provider(capsys, cache):
    file = cache / "k.json"
    words = ["--op", "linear", "--case", "0.6b", "--dtype", "float32", "--seconds", "0.001"]
    assert kernels.main([*words, "--output-json", str(file)]) == 0
    rows = json.loads(file.read_text())["kernels"]
    assert {row["provider"] for row in rows} == {"cpu", "torch"}
    for row in rows:
        assert row["op"] == "linear" and row["num_bytes"] > 0 and row["flops"] > 0
        assert row["seconds"] > 0 and row["share_of_machine_limit"] > 0
    assert "of limit" in capsys.readouterr().out


def test_kernels_name_the_cases_there_are(capsys, cache):
    assert kernels.main(["--op", "no_such_op"]) == 2
    assert "linear/" in capsys.readouterr().err
