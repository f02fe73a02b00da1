"""The format of a model is found by what its chat template writes."""

from __future__ import annotations

import json

import pytest

from quire.server.output_parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    choose_parsers,
    detect_reasoning_parser,
    detect_tool_parser,
    plan_parsers,
)
from quire.server.output_parsing.parser_registry import (
    REASONING_PARSERS_BY_TEXT,
    TOOL_PARSERS_BY_TEXT,
)
from quire.text.chat_template import ChatTemplate
from tests.server.output_parsing.golden_transcripts import GOLDENS, TOOLS

CALL = "{% for call in messages[0].tool_calls %}{% set f = call.function %}"
TEMPLATES = {
    "hermes": CALL + "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n"
    "</tool_call>\n{% endfor %}",
    "qwen3_coder": CALL + "<tool_call>\n{{ '<function=' + f.name + '>\n' }}"
    "{% for key, value in f.arguments | items %}{{ '<parameter=' + key + '>\n' }}{{ value }}"
    "{{ '\n</parameter>\n' }}{% endfor %}</function>\n</tool_call>{% endfor %}",
    "glm45": CALL + "<tool_call>{{ f.name }}{{ '\n' }}{% for key, value in f.arguments | items %}"
    "<arg_key>{{ key }}</arg_key>{{ '\n' }}<arg_value>{{ value }}</arg_value>{{ '\n' }}"
    "{% endfor %}</tool_call>{% endfor %}",
    "mistral": "[TOOL_CALLS][" + CALL + "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
    "{% endfor %}]",
    "granite": "<|tool_call|>[" + CALL
    + "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}{% endfor %}]",
    "llama3_json": "{% set _ = '<|start_header_id|>' %}" + CALL
    + "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}{{ f.arguments | tojson }}"
    "{{ '}' }}{% endfor %}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>" + CALL + "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ f.name + '\n```json\n' }}{{ f.arguments | tojson }}{{ '\n```' }}<｜tool▁call▁end｜>"
    "{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + CALL
    + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"
    "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|>" + CALL + "<|tool_call_begin|>functions.{{ f.name }}:0"
    "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>",
    "minimax_m2": "<minimax:tool_call>\n" + CALL + "{{ '<invoke name=\"' + f.name + '\">\n' }}"
    "{% for key, value in f.arguments | items %}{{ '<parameter name=\"' + key + '\">' }}{{ value }}"
    "</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>",
    "openai": CALL + "{{ '<|channel|>commentary to=functions.' + f.name }}<|message|>"
    "{{ f.arguments | tojson }}<|call|>{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_s_own_call_is_read_by_the_format_that_is_found(name):
    template = ChatTemplate(TEMPLATES[name])
    found = detect_tool_parser(template.source)
    assert found == name
    arguments = {"city": 'Bad "Ems", 3 < 4'}
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    written = template.render([{"role": "assistant", "content": "", "tool_calls": [call]}], {})
    plan = plan_parsers(found, detect_reasoning_parser(template.source))
    [read] = plan.read(written, "start" if name == "openai" else None, tools=TOOLS).tool_calls
    assert read.name == "weather"
    assert json.loads(read.arguments) == arguments


@pytest.mark.parametrize(
    ("template", "reasoning"),
    [
        ("{{ '<think>\\n' }}", None),
        ("{% if '</think>' in content %}", "qwen3"),
        ("[THINK]{{ m.thinking }}[/THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
        ("<|channel|>analysis<|message|>", "openai_gptoss"),
        ("{{ content }}", None),
        ("", None),
        (None, None),
    ],
)
def test_the_reasoning_is_found(template, reasoning):
    assert detect_reasoning_parser(template) == reasoning


def test_a_template_without_tools_has_no_format():
    for template in (None, "", "<|im_start|>{{ messages[0].content }}<|im_end|>"):
        assert detect_tool_parser(template) is None


def test_auto_takes_what_is_found_and_a_name_rules_over_it():
    template = "{{ tools }}<tool_call></think>"
    plan = choose_parsers("auto", "auto", template)
    assert plan.tool_format is TOOL_PARSERS["hermes"]
    assert plan.reasoning is REASONING_PARSERS["qwen3"]
    plan = choose_parsers("pythonic", "none", template)
    assert (plan.tool_format, plan.reasoning) == (TOOL_PARSERS["pythonic"], None)
    plan = choose_parsers("none", None, template)
    assert (plan.tool_format, plan.reasoning) == (None, None)


@pytest.mark.parametrize(
    ("template", "reasoning", "name"),
    [
        (None, "auto", "generic"),
        ("{{ messages }}", "auto", "generic"),
        ("{{ tools }} in a form that is not known", "auto", "generic"),
        ("<tool_call> of the past, and no tools", "auto", "generic"),
        ("{% if tools %}<tool_call>", "auto", "hermes"),
        ("{% if tools", "auto", "generic"),
        ("{% if tools <tool_call>", "auto", "hermes"),
        ("{{ messages }}", "openai_gptoss", None),
        ("<|channel|><|message|>functions.analysis", "auto", "openai"),
    ],
)
def test_the_generic_form_is_for_templates_that_show_no_tools(template, reasoning, name):
    plan = choose_parsers("auto", reasoning, template)
    assert plan.tool_format is (name and TOOL_PARSERS[name])
    assert plan.tools_as_text is (None if name is None else name == "generic")
    assert f"tool parser: {name or 'none'}, " in plan.described


def test_a_plan_of_the_generic_form_alone_parses_no_other_outputs():
    assert not choose_parsers("auto", "auto", None).is_needed
    assert choose_parsers("auto", "qwen3", None).is_needed


def test_what_is_found_exists_and_every_format_that_can_be_found_is_tried():
    assert {name for _, name in TOOL_PARSERS_BY_TEXT} <= set(TOOL_PARSERS)
    assert {name for _, name in REASONING_PARSERS_BY_TEXT} <= set(REASONING_PARSERS)
    golden = {golden.tools for golden in GOLDENS}
    assert {name for _, name in TOOL_PARSERS_BY_TEXT} <= golden
