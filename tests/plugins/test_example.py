"""The sample package of examples/plugin, which has one plugin of each kind: each is seen by what it
changes.
"""

import os

import pytest

from quire import LLM, SamplingParams
from quire.cli import doctor
from quire.plugins import load_general_plugins, records
from quire.server.output_parsing import choose_parsers
from tests.house.package import ROOT
from tests.server.serve_process import serving

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
        "provider of ops acme, connector of encoder caches AcmeConnector, tool parser acme, "
        "reasoning parser acme",
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
@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_changes_front_end_core_and_workers(example, workers):
    """The route and the count are of the front end, the model and the weights of the core and of
    each worker, which has a process of its own if there are two, and the token of the worker.
    """
    environ = {"VLLM_PLUGINS": "acme", "ACME_PLATFORM": "1", "PYTHONPATH": python_path(example)}
    flags = ("--hf-overrides", '{"architectures": ["AcmeForCausalLM"]}', "--load-format", "acme")
    flags += ("--tool-call-parser", "acme", "--tensor-parallel-size", workers)
    with serving(*flags, environ=environ) as served:
        body = {"prompt": "The sun", "max_tokens": 3, "vllm_xargs": {"acme_token": TOKEN}}
        body |= {"temperature": 0, "return_token_ids": True, "model": "quire-embedded"}
        reply = served.post("/v1/completions", body).json()
        assert reply["choices"][0]["token_ids"] == [TOKEN] * 3
        found = served.get("/acme/tokens").json()
        assert found["model"] == "AcmeForCausalLM" and found["generated"] >= 3
        assert "Acme's platform runs" in served.log


@pytest.mark.full
def test_a_server_makes_vectors_of_records(example):
    environ = {"VLLM_PLUGINS": "acme", "PYTHONPATH": python_path(example)}
    flags = ("--runner", "pooling", "--convert", "embed", "--io-processor-plugin", "acme")
    with serving(*flags, environ=environ) as served:
        data = {"records": [{"name": "Ada"}, {"name": "Bo", "age": 3}]}
        reply = served.post("/pooling", {"data": data, "request_id": "mine"}).json()
        expected = served.post("/pooling", {"input": "name: Ada"}).json()
        assert reply["request_id"] == "pooling-mine" and reply["created_at"] > 0
        assert reply["data"]["vectors"][0] == pytest.approx(expected["data"][0]["data"], abs=1e-5)
        refused = served.post("/pooling", {"data": 3})
        assert refused.status_code == 400 and "it must be {'records': [...]}" in refused.text
        assert served.get("/acme/tokens").status_code == 404, "it generates nothing"
        assert "acme is left out: it needs one of generate, and embed" in served.log


def python_path(example):
    return os.pathsep.join([str(example.folder), os.environ.get("PYTHONPATH", "")])
