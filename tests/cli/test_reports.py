"""`quire show` and `quire doctor`: what they print."""

import json

import pytest

from quire import embedded
from quire.cli import main
from quire.cli.doctor import describe
from quire.config.args.engine_args import EngineArgs
from quire.ops.catalog import CATALOG
from quire.ops.select import Choice
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


def test_doctor_says_of_every_op_who_serves_it_and_why_the_others_do_not(capsys):
    main.main(["doctor"])
    lines = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    served = {words[1]: words[2] for words in lines if words[0] == "op"}
    assert set(served) == set(CATALOG)
    for op, text in served.items():
        provider, _, reasons = text.partition(" (")
        others = {"cpu", "torch", "fa3", "triton"} - {provider}
        assert all(other in reasons for other in others), (op, text)
    assert served["attend"].startswith("cpu (torch: the fallback after cpu; ")
    assert "fa3, triton: for NVIDIA GPUs" in served["attend"]
    assert served["penalize"].startswith("torch (cpu: has no penalize; ")


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (Choice("attend", "fa3", ""), "fa3 (triton: the next choice after fa3; torch: the fallback "
         "after fa3; cpu: for CPUs)"),
        (Choice("norm", "triton", ""), "triton (fa3: has no norm; torch: the fallback after "
         "triton; cpu: for CPUs)"),
        (Choice("attend", "triton", "fa3: not installed"), "triton (fa3: not installed; torch: "
         "the fallback after triton; cpu: for CPUs)"),
    ],
    ids=["best", "lacking", "refused"],
)  # fmt: skip
def test_doctor_describes_a_choice_on_a_gpu(choice, text):
    assert describe(choice, "cuda") == text


def test_doctor_names_what_does_not_work(capsys, monkeypatch):
    def fail():
        raise OSError("no such thing")

    monkeypatch.setattr("quire.embedded.path", fail)
    assert main.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "FAILED: OSError: no such thing" in out and "op attend" in out


def test_a_checkpoint_of_any_shape_can_be_planned(tmp_path):
    folder = make_checkpoint(tmp_path / "m", shape="tiny", family="mistral")
    assert EngineArgs(model=str(folder)).create_engine_config().architecture == "MistralForCausalLM"
