"""`quire show` and `quire doctor`: what they print."""

import json

import pytest

from quire import embedded
from quire.cli import main
from quire.cli.doctor import describe, describe_cores, describe_threads
from quire.config.args.engine_args import EngineArgs
from quire.hardware.host import gather_machine_facts
from quire.ops.catalog import CATALOG, Choice
from quire.testing import make_checkpoint
from quire.testing.model_shapes import make_config
from tests.hardware import machines


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


@pytest.mark.parametrize(
    ("files", "cores", "threads"),
    [
        (machines.LAPTOP, "6 cores (2 performance, 4 efficiency), 8 logical CPUs",
         "2 on CPUs 0,2 (one for each performance core; 4 efficiency cores are left to the rest)"),
        (machines.SERVER, "8 cores, 16 logical CPUs, 2 last-level caches, 2 NUMA nodes",
         "4 on CPUs 4-7 (one for each core that this process may use of NUMA node 1; "
         "tensor_parallel_size=2 or data_parallel_size=2 uses all nodes)"),
        (machines.CONTAINER, "4 cores, 7 logical CPUs, a quota of 2.5 CPUs",
         "3 on CPUs 4-6,15 (the container's quota of 2.5 CPUs)"),
        (machines.ONE_CPU, "1 core",
         "1 on any CPU (one for each core that this process may use)"),
    ],
    ids=["laptop", "server", "container", "one CPU"],
)  # fmt: skip
def test_doctor_says_where_threads_run_and_why(tmp_path, monkeypatch, files, cores, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    facts = gather_machine_facts(machines.write(tmp_path, files))
    assert (describe_cores(facts), describe_threads(facts)) == (cores, threads)


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
    assert (
        EngineArgs(model=str(folder)).create_engine_config().model.architecture
        == "MistralForCausalLM"
    )
