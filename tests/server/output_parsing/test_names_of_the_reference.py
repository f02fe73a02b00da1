"""Every parser that vLLM 0.32 has by name is served under that name or refused with a sentence."""

from __future__ import annotations

import pytest

from quire.errors import NotBuiltYet
from quire.server.output_parsing import REASONING_PARSERS, TOOL_PARSERS, plan_parsers
from quire.server.output_parsing.formats.generic import GENERIC
from quire.server.output_parsing.formats.harmony import HARMONY, HARMONY_REASONING
from quire.server.output_parsing.formats.message_formats import MESSAGE_FORMATS, MESSAGE_REASONINGS
from quire.server.output_parsing.formats.parameter_formats import PARAMETER_FORMATS
from quire.server.output_parsing.formats.reasoning_formats import REASONING_FORMATS
from quire.server.output_parsing.formats.tool_formats import TOOL_FORMATS
from quire.server.output_parsing.parser_registry import REFUSED

TOOL_NAMES = [
    "apertus", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4",
    "gigachat3", "glm45", "glm47", "granite", "granite-20b-fc", "granite4", "hermes", "hf",
    "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "internlm", "jamba", "k2_horizon", "kimi_k2",
    "kimi_k3", "lfm2", "ling3", "llama3_json", "llama4_json", "llama4_pythonic", "longcat",
    "mimo", "minicpm5", "minimax_m2", "minimax_m3", "mistral", "muse_glimmer", "olmo3",
    "openai", "phi4_mini_json", "plamo3", "poolside_v1", "pythonic", "qwen3_coder",
    "qwen3_json", "qwen3_xml", "seed_oss", "step3", "step3p5", "xlam",
]  # fmt: skip
REASONING_NAMES = [
    "cohere_command3", "cohere_command4", "deepseek_r1", "deepseek_v3", "deepseek_v4",
    "deepseek_v41", "ernie45", "gemma4", "glm45", "glm47", "granite", "granite_thinking_parser",
    "hf", "holo2", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "k2_horizon", "kimi_k2",
    "kimi_k3", "ling3", "mimo", "minicpmv", "minimax_m2", "minimax_m2_append_think",
    "minimax_m3", "mistral", "muse_glimmer", "nemotron_v3", "olmo3", "openai_gptoss", "plamo3",
    "poolside_v1", "qwen3", "seed_oss", "step3", "step3p5",
]  # fmt: skip
OWN_TOOL_NAMES = {"generic", "qwen", "nemotron_json"}
"""Names that are not the reference's."""


def test_the_lists_are_those_of_the_release():
    assert (len(set(TOOL_NAMES)), len(set(REASONING_NAMES))) == (54, 38)


def test_every_name_is_served_or_refused_and_no_other_exists():
    assert {*TOOL_PARSERS, *REFUSED} == {*TOOL_NAMES, *OWN_TOOL_NAMES}
    assert {*REASONING_PARSERS, *REFUSED} == {*REASONING_NAMES}
    assert not set(TOOL_PARSERS) & set(REFUSED)
    assert not set(REASONING_PARSERS) & set(REFUSED)


def test_every_format_that_is_written_is_served_under_its_name():
    """The tables name formats without importing them."""
    made = [*TOOL_FORMATS, *PARAMETER_FORMATS, *MESSAGE_FORMATS, HARMONY, GENERIC]
    assert {each.name for each in TOOL_PARSERS.values()} == {each.name for each in made}
    reasonings = [*REASONING_FORMATS, *MESSAGE_REASONINGS, HARMONY_REASONING]
    found = {each.name for each in REASONING_PARSERS.values()}
    assert found == {each.name for each in reasonings}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tool_format_that_is_not_served_is_refused_with_a_sentence(name):
    with pytest.raises(NotBuiltYet, match=f"tool_call_parser='{name}'.*Give the name of"):
        plan_parsers(name)


def test_a_reasoning_format_that_is_not_served_is_refused_with_a_sentence():
    assert set(REFUSED) == {"hf"}
    with pytest.raises(NotBuiltYet, match="reasoning_parser='hf'.*Give the name"):
        plan_parsers(None, "hf")
