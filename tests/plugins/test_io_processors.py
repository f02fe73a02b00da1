"""Plugins that make prompts of data for a model that pools."""

import pytest

from quire import LLM
from quire.errors import InvalidParameter

SOURCE = """
    from quire.io_processor import IOProcessor
    class Lengths(IOProcessor):
        def parse_data(self, data):
            if not isinstance(data, list): raise ValueError("it must be a list of texts")
            return data
        def pre_process(self, prompt, request_id=None, **kwargs):
            return [text.upper() for text in prompt]
        def post_process(self, model_output, request_id=None, **kwargs):
            return {"sizes": [len(output.outputs.data) for output in model_output]}
    def lengths(): return "acme.Lengths"
    def other(): return "builtins.dict"
    def raises(): raise OSError("no licence")
"""
GROUP = "vllm.io_processor_plugins"


@pytest.fixture
def install(packages):
    members = {"lengths": "lengths", "other": "other", "raises": "raises"}
    packages.install("acme", SOURCE, {GROUP: members})


def test_data_is_processed_both_ways(install):
    llm = LLM(convert="embed", runner="pooling", io_processor_plugin="lengths")
    [output] = llm.encode({"data": ["one", "two words"]}, pooling_task="plugin")
    size = len(llm.embed("one")[0].outputs.embedding)
    assert output.outputs == {"sizes": [size, size]} and output.finished
    with pytest.raises(InvalidParameter, match="it must be {'data': ...}"):
        llm.encode("text", pooling_task="plugin")
    with pytest.raises(ValueError, match="it must be a list of texts"):
        llm.encode({"data": 3}, pooling_task="plugin")


def test_without_the_option_there_is_none(install):
    llm = LLM(convert="embed", runner="pooling")
    with pytest.raises(InvalidParameter, match="No IOProcessor plugin installed"):
        llm.encode({"data": []}, pooling_task="plugin")


def named_by_config(name, **more):
    return LLM(
        convert="embed", runner="pooling", hf_overrides={"io_processor_plugin": name}, **more
    )


def test_a_model_s_config_names_one(install):
    """The option goes before it, and None stands for none."""
    llm = named_by_config("lengths", strict_config=True)
    [output] = llm.encode({"data": ["one"]}, pooling_task="plugin")
    assert len(output.outputs["sizes"]) == 1
    llm = named_by_config("absent", io_processor_plugin="lengths")
    assert llm.encode({"data": ["one"]}, pooling_task="plugin")[0].outputs == output.outputs
    with pytest.raises(InvalidParameter, match="No IOProcessor plugin installed"):
        named_by_config(None).encode({"data": []}, pooling_task="plugin")
    for name, why in (("absent", "must be installed, and .* does without"), (3, "by a text")):
        with pytest.raises(InvalidParameter, match=why):
            named_by_config(name)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "it must be installed, and lengths, other, raises"),
        ("other", "must name a subclass of quire.io_processor.IOProcessor"),
        ("raises", "its plugin failed: OSError: no licence"),
    ],
)
def test_names_that_lead_nowhere_are_refused_at_start(install, name, why):
    with pytest.raises(InvalidParameter, match=why):
        LLM(convert="embed", runner="pooling", io_processor_plugin=name)
