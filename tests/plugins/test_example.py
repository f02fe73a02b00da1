"""The sample package of examples/plugin, which has one plugin of each kind: each is seen by what it
changes.
"""

import subprocess
import sys

import pytest

from quire import LLM, SamplingParams
from quire.cli import doctor
from quire.plugins import load_general_plugins, records
from quire.server.output_parsing import choose_parsers
from tests.house.package import ROOT

MODEL = {"architectures": ["AcmeForCausalLM"]}
TOKEN = 77


@pytest.fixture
def example(packages):
    packages.install_project(ROOT / "examples" / "plugin", "acme_quire", "1.0")
    return packages


def test_it_changes_an_engine_of_this_process(example):
    llm = LLM(hf_overrides=MODEL, load_format="acme", dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=4)
    only = SamplingParams(temperature=0, max_tokens=4, extra_args={"acme_token": TOKEN})
    usual, found = llm.generate(["The sun"] * 2, [params, only])
    assert found.outputs[0].token_ids == [TOKEN] * 4 != usual.outputs[0].token_ids
    with pytest.raises(ValueError, match="acme_token='x' must be the id of a token"):
        llm.generate("a", SamplingParams(extra_args={"acme_token": "x"}))
    from acme_quire.statistics import totals

    assert totals["generated"] >= 8
    assert llm.llm_engine.vllm_config.model.architecture == "AcmeForCausalLM"


def test_it_fills_tables(example):
    load_general_plugins()
    [record] = records()
    assert record.changes == [
        "architecture AcmeForCausalLM",
        "quantization method acme-fp8",
        "load format acme",
        "provider of ops acme",
        "connector of encoder caches AcmeConnector",
        "LoRA resolver acme",
        "tool parser acme",
        "reasoning parser acme",
    ]
    parsed = choose_parsers("acme", "acme", None).read(
        '<why>so</why>On it. <call>{"name": "f", "arguments": {"a": 1}}</call>',
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
    )
    assert (parsed.reasoning, parsed.tool_calls[0].name) == ("so", "f")


def test_its_io_processor_makes_vectors_of_records(example):
    llm = LLM(convert="embed", runner="pooling", io_processor_plugin="acme")
    data = {"records": [{"name": "Ada"}, {"name": "Bo", "age": 3}]}
    [output] = llm.encode({"data": data}, pooling_task="plugin")
    [expected] = llm.embed("name: Bo, age: 3")
    assert output.outputs["vectors"][1] == pytest.approx(expected.outputs.embedding, abs=1e-6)


def test_doctor_lists_it(example, monkeypatch):
    lines = dict(doctor._plugins())
    endpoint = lines.pop("plugin acme (quire.endpoint_plugins)")
    assert endpoint == (
        f"acme_quire.endpoint:TokenRoute of acme_quire 1.0 in {example.folder}: left out: "
        "VLLM_PLUGINS does not name it"
    )
    listed = lines.values()
    assert [text.rpartition(": ")[2] for text in listed] == [
        "added architecture AcmeForCausalLM, quantization method acme-fp8, load format acme, "
        "provider of ops acme, connector of encoder caches AcmeConnector, LoRA resolver acme, "
        "tool parser acme, reasoning parser acme",
        "opens the device of the workers",
        "edits logits in the workers",
        "records the statistics of every step",
        "makes prompts of data, if io_processor_plugin names it",
    ]
    example.forget()
    monkeypatch.setenv("VLLM_PLUGINS", "acme,acne")
    assert doctor._plugins()[-1] == (
        "plugin acne",
        "is named by VLLM_PLUGINS, and not installed",
    )
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr("sys.path", [])
    assert doctor._plugins() == [("plugins", "none installed")]


@pytest.mark.full
def test_each_part_changes_something_where_it_is_installed():
    """In front end, core and workers; see tests/plugins/installed.py."""
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_plugin.py"], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("seen: ") == 15, done.stdout
