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
from tests.server.output_parsing.golden import WHOLE_OUTPUTS
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
    "deepseek_v32": "{% set d = '｜DSML｜' %}{{ '<' + d + 'function_calls>\n' }}" + CALL
    + "{{ '<' + d + 'invoke name=\"' + f.name + '\">\n' }}"
    "{% for key, value in f.arguments | items %}"
    "{{ '<' + d + 'parameter name=\"' + key + '\" string=\"true\">' + value }}"
    "{{ '</' + d + 'parameter>\n' }}{% endfor %}{{ '</' + d + 'invoke>\n' }}{% endfor %}"
    "{{ '</' + d + 'function_calls>' }}",
    "deepseek_v4": "{% set d = '｜DSML｜' %}{{ '<' + d + 'tool_calls>\n' }}" + CALL
    + "{{ '<' + d + 'invoke name=\"' + f.name + '\">\n' }}"
    "{% for key, value in f.arguments | items %}"
    "{{ '<' + d + 'parameter name=\"' + key + '\" string=\"true\">' + value }}"
    "{{ '</' + d + 'parameter>\n' }}{% endfor %}{{ '</' + d + 'invoke>\n' }}{% endfor %}"
    "{{ '</' + d + 'tool_calls>' }}",
    "cohere_command3": "<|START_ACTION|>[\n" + CALL + '{"tool_call_id": "0", "tool_name": '
    '"{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}]<|END_ACTION|>',
    "apertus": "<|tools_prefix|>[" + CALL
    + "{{ {f.name: f.arguments} | tojson }}{% endfor %}]<|tools_suffix|>",
    "gigachat3": CALL + "<|message_sep|>\n\nfunction call<|role_sep|>\n"
    "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}{% endfor %}",
    "gemma4": CALL + "<|tool_call>{{ 'call:' + f.name }}{{ '{' }}"
    "{% for key, value in f.arguments | items %}{{ key }}:<|\"|>{{ value }}<|\"|>{% endfor %}"
    "{{ '}' }}<tool_call|>{% endfor %}",
    "minimax_m3": "{% set m = ']<]minimax[>[' %}{{ m }}<tool_call>\n" + CALL
    + "{{ m + '<invoke name=\"' + f.name + '\">' }}{% for key, value in f.arguments | items %}"
    "{{ m }}<{{ key }}>{{ value }}{{ m }}</{{ key }}>{% endfor %}{{ m }}</invoke>\n{% endfor %}"
    "{{ m }}</tool_call>",
    "kimi_k3": "<|open|>tools<|sep|>" + CALL
    + "<|open|>call tool=\"{{ f.name }}\" index=\"1\"<|sep|>"
    "{% for key, value in f.arguments | items %}<|open|>argument key=\"{{ key }}\" type=\"string\""
    "<|sep|>{{ value }}<|close|>argument<|sep|>{% endfor %}<|close|>call<|sep|>{% endfor %}"
    "<|close|>tools<|sep|>",
    "hy_v3": "{% set x = ':5a' %}{{ '<tool_calls{}>'.format(x) }}\n" + CALL
    + "{{ '<tool_call{}>'.format(x) + f.name + '<tool_sep{}>'.format(x) }}\n"
    "{% for key, value in f.arguments | items %}{{ '<arg_key{}>'.format(x) + key }}"
    "{{ '</arg_key{}>'.format(x) }}\n{{ '<arg_value{}>'.format(x) + value }}"
    "{{ '</arg_value{}>'.format(x) }}\n{% endfor %}{{ '</tool_call{}>'.format(x) }}\n{% endfor %}"
    "{{ '</tool_calls{}>'.format(x) }}",
    "minicpm5": CALL
    + "<function name=\"{{ f.name }}\">{% for key, value in f.arguments | items %}"
    "<param name=\"{{ key }}\"><![CDATA[{{ value }}]]></param>{% endfor %}</function>{% endfor %}",
    "muse_glimmer": CALL + "{{ ' to=' + f.name }}<|message|><atem:function_calls>\n"
    "<atem:invoke name=\"{{ f.name }}\">\n{% for key, value in f.arguments | items %}"
    "<atem:parameter name=\"{{ key }}\">{{ value }}</atem:parameter>\n{% endfor %}"
    "</atem:invoke>\n</atem:function_calls><|eot|>{% endfor %}{{ 'to=self<|message|>' if 0 }}",
    "olmo3": "<function_calls>" + CALL + "{{ f.name }}({% for key, value in f.arguments | items %}"
    "{{ key }}={{ value | tojson }}{% endfor %})\n{% endfor %}</function_calls>",
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
    plan = plan_parsers(found, detect_reasoning_parser(template.source), template.source)
    place = "start" if name in WHOLE_OUTPUTS else None
    [read] = plan.read(written, place, tools=TOOLS).tool_calls
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
        ("'<think{}>'.format(':5a') <tool_calls <arg_key", "hy_v3"),
        ("<|channel>thought\n", "gemma4"),
        ("<mm:think>", "minimax_m3"),
        ("<|START_THINKING|>", "cohere_command3"),
        ("<|START_THINKING|> and </think>", "cohere_command3"),
        ("{{ open('think') }}<|open|>", "kimi_k3"),
        ("<think>\n\n</think>\n<answer>\n", "hunyuan_a13b"),
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


def test_the_tags_of_a_checkpoint_are_those_of_its_template():
    template = "{% set x = ':5a' %}{{ tools }}<tool_sep <tool_calls <arg_key '<think{}>'.format(x)"
    plan = choose_parsers("auto", "auto", template)
    assert plan.described == "tool parser: hy_v3, reasoning parser: hy_v3"
    output = (
        "Hm.</think:5a>I look.<tool_calls:5a>\n<tool_call:5a>weather<tool_sep:5a>\n"
        "<arg_key:5a>city</arg_key:5a>\n<arg_value:5a>Bonn</arg_value:5a>\n</tool_call:5a>\n"
        "</tool_calls:5a>"
    )
    said = plan.read(output, plan.place("<think:5a>"), tools=TOOLS)
    assert (said.reasoning, said.content) == ("Hm.", "I look.")
    assert [call.arguments for call in said.tool_calls] == ['{"city": "Bonn"}']
    named = choose_parsers("hy_v4", None, "<tool_calls:x.1>")
    output = "<tool_calls:x.1><tool_call:x.1>now</tool_call:x.1></tool_calls:x.1>"
    assert [call.name for call in named.read(output, tools=TOOLS).tool_calls] == ["now"]
    assert choose_parsers("hy_v4", None, None).read(output, tools=TOOLS).tool_calls == ()


def test_a_plan_of_the_generic_form_alone_parses_no_other_outputs():
    assert not choose_parsers("auto", "auto", None).is_needed
    assert choose_parsers("auto", "qwen3", None).is_needed


def test_what_is_found_exists_and_every_format_that_can_be_found_is_tried():
    assert {name for _, name in TOOL_PARSERS_BY_TEXT} <= set(TOOL_PARSERS)
    assert {name for _, name in REASONING_PARSERS_BY_TEXT} <= set(REASONING_PARSERS)
    golden = {golden.tools for golden in GOLDENS}
    assert {made.name for made in TOOL_PARSERS.values()} <= golden
