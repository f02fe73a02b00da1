"""What models write and what it means, by hand from the descriptions of the formats: one list that
all tests of the transcripts share.
"""

from __future__ import annotations

from tests.server.output_parsing.golden import BONN, TOOLS, Golden
from tests.server.output_parsing.goldens_of_more_formats import MORE_FORMATS

__all__ = ["GOLDENS", "TOOLS", "Golden"]

DEEPSEEK_V3_CALLS = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Bonn"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)

TAGGED_JSON = [
    Golden(
        "hermes-one",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>',
        "hermes",
        calls=(BONN,),
    ),
    Golden(
        "hermes-text-then-two",
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city":"Bonn","days":2}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "hermes",
        content="I look.\n",
        calls=(("weather", '{"city":"Bonn","days":2}'), ("now", "{}")),
    ),
    Golden(
        "hermes-arguments-first",
        '<tool_call>{"arguments": {"city": "Bonn"}, "name": "weather"}</tool_call>',
        "hermes",
        calls=(BONN,),
    ),
    Golden(
        "hermes-arguments-as-written",
        '<tool_call>{"name":"weather","arguments":{ "city" :"\\u00e9</tool_call>\\"}",'
        ' "limit": 1.50e+3}}</tool_call>',
        "hermes",
        calls=(("weather", '{ "city" :"\\u00e9</tool_call>\\"}", "limit": 1.50e+3}'),),
    ),
    Golden(
        "hermes-no-arguments",
        '<tool_call>{"name": "now"}</tool_call>',
        "hermes",
        calls=(("now", "{}"),),
    ),
    Golden(
        "hermes-text-after",
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\nDone.',
        "hermes",
        content="\nDone.",
        calls=(("now", "{}"),),
    ),
    Golden(
        "hermes-blanks-within-the-tags",
        'One: \n<tool_call> {"name": "now", "arguments": {}} </tool_call> Two: \n '
        '<tool_call>\n{"name": "now", "arguments": {}}\n\n</tool_call>\nDone.',
        "hermes",
        content="One: \n Two: \n \nDone.",
        calls=(("now", "{}"), ("now", "{}")),
    ),
    Golden(
        "hermes-prose-with-delimiter",
        "Write <tool_call> first.",
        "hermes",
        content="Write <tool_call> first.",
    ),
    Golden(
        "hermes-other-json",
        "<tool_call>[1, 2]</tool_call>",
        "hermes",
        content="<tool_call>[1, 2]</tool_call>",
    ),
    Golden("hermes-half-a-delimiter", "a <tool_", "hermes", content="a <tool_"),
    Golden("hermes-plain", "Straße 😀 <b>x</b> {}", "hermes", content="Straße 😀 <b>x</b> {}"),
    Golden(
        "hermes-cut-in-the-arguments",
        '<tool_call>{"name": "weather", "arguments": {"city": "Bo',
        "hermes",
        calls=(("weather", '{"city": "Bo'),),
    ),
    Golden(
        "hermes-cut-before-the-name",
        '<tool_call>{"name": "wea',
        "hermes",
        content='<tool_call>{"name": "wea',
    ),
    Golden(
        "granite-list",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bonn"}}, '
        '{"name": "now", "arguments": {}}]',
        "granite",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "granite-list-with-tag",
        '<tool_call>[{"name": "now", "arguments": {}}]',
        "granite",
        calls=(("now", "{}"),),
    ),
    Golden(
        "phi4-mini",
        'functools[{"name": "weather", "arguments": {"city": "Bonn"}}]',
        "phi4_mini_json",
        calls=(BONN,),
    ),
    Golden(
        "jamba",
        '<tool_calls>[\n  {"name": "weather", "arguments": {"city": "Bonn"}}\n]</tool_calls>',
        "jamba",
        calls=(BONN,),
    ),
]
LLAMA = [
    Golden(
        "llama-bare",
        '{"name": "weather", "parameters": {"city": "Bonn"}}',
        "llama3_json",
        calls=(BONN,),
    ),
    Golden(
        "llama-python-tag-and-second",
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Bonn"}}; '
        '{"name": "now", "parameters": {}}',
        "llama3_json",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "llama-type-key",
        '{"type": "function", "name": "now", "parameters": {}}',
        "llama3_json",
        calls=(("now", "{}"),),
    ),
    Golden(
        "llama-answer-in-json",
        '{"name": "Bonn", "people": 330000}',
        "llama3_json",
        content='{"name": "Bonn", "people": 330000}',
    ),
    Golden(
        "llama-after-text",
        'I look {now}: {"name": "weather", "parameters": {"city": "Bonn"}}',
        "llama3_json",
        content="I look {now}: ",
        calls=(BONN,),
    ),
    Golden(
        "llama-data-after-text",
        'It is {"name": "Bonn", "size": {"a": 1}}.',
        "llama3_json",
        content='It is {"name": "Bonn", "size": {"a": 1}}.',
    ),
    Golden("llama-prose", 'It is {"name": 1}.', "llama3_json", content='It is {"name": 1}.'),
]
MISTRAL = [
    Golden(
        "mistral-list",
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bonn"}}, '
        '{"name": "now", "arguments": {}}]',
        "mistral",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "mistral-list-with-blank",
        'Hm. [TOOL_CALLS] [{"name": "now", "arguments": {}}]',
        "mistral",
        content="Hm. ",
        calls=(("now", "{}"),),
    ),
    Golden(
        "mistral-args",
        '[TOOL_CALLS]weather[ARGS]{"city": "Bonn"}[TOOL_CALLS]now[ARGS]{}',
        "mistral",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "mistral-call-id",
        '[TOOL_CALLS]weather[CALL_ID]aB3dE6gH9[ARGS]{"city": "Bonn"}',
        "mistral",
        calls=(BONN,),
    ),
    Golden(
        "mistral-name-and-brace",
        '[TOOL_CALLS]weather{"city": "Bonn"}',
        "mistral",
        calls=(BONN,),
    ),
    Golden(
        "magistral",
        "[THINK]where?[/THINK]There.",
        "mistral",
        "mistral",
        thought="where?",
        content="There.",
    ),
]
PYTHONIC = [
    Golden(
        "pythonic-two",
        "[weather(city='Bonn', days=2), now()]",
        "pythonic",
        calls=(("weather", '{"city": "Bonn", "days": 2}'), ("now", "{}")),
    ),
    Golden(
        "pythonic-literals",
        '[weather(city="a\'b\\n", exact=True, limit=None, spots=[\'x\', "y",], '
        "where={'k': (1, -2.5)})]",
        "pythonic",
        calls=(
            (
                "weather",
                '{"city": "a\'b\\n", "exact": true, "limit": null, "spots": ["x", "y"], '
                '"where": {"k": [1, -2.5]}}',
            ),
        ),
    ),
    Golden(
        "pythonic-list-of-words", "[see the note (1)]", "pythonic", content="[see the note (1)]"
    ),
    Golden(
        "llama4",
        '<|python_start|>[weather(city="Bonn")]<|python_end|>',
        "llama4_pythonic",
        calls=(BONN,),
    ),
    Golden(
        "lfm2",
        '<|tool_call_start|>[weather(city="Bonn")]<|tool_call_end|>I look.',
        "lfm2",
        content="I look.",
        calls=(BONN,),
    ),
    Golden(
        "lfm2-a-line-after-the-call",
        '<|tool_call_start|>[weather(city="Bonn")]<|tool_call_end|>\nI look.\nSo.',
        "lfm2",
        content="I look.\nSo.",
        calls=(BONN,),
    ),
]
TAGGED_PARAMETERS = [
    Golden(
        "qwen3-coder",
        'I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nBad "Ems"\nnew\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=spots>\n[\'a\', "b"]\n</parameter>\n<parameter=where>\n{"k": [1]}\n</parameter>'
        "\n</function>\n</tool_call>",
        "qwen3_coder",
        content="I look.\n",
        calls=(
            (
                "weather",
                '{"city": "Bad \\"Ems\\"\\nnew", "days": 3, "exact": true, "spots": ["a", "b"], '
                '"where": {"k": [1]}}',
            ),
        ),
    ),
    Golden(
        "qwen3-coder-without-section",
        "<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>",
        "qwen3_coder",
        calls=(BONN,),
    ),
    Golden(
        "qwen3-coder-no-arguments",
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "qwen3_coder",
        calls=(("now", "{}"),),
    ),
    Golden(
        "qwen3-coder-wrong-type-stays-text",
        "<tool_call>\n<function=weather>\n<parameter=days>\nthree\n</parameter>\n</function>\n"
        "</tool_call>",
        "qwen3_coder",
        calls=(("weather", '{"days": "three"}'),),
    ),
    Golden(
        "seed-oss",
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n</function>\n"
        "</seed:tool_call>",
        "seed_oss",
        calls=(BONN,),
    ),
    Golden(
        "minimax-m2",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n'
        '<parameter name="limit">null</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "minimax_m2",
        calls=(("weather", '{"city": "Bonn", "limit": null}'), ("now", "{}")),
    ),
    Golden(
        "glm45",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now\n"
        "</tool_call>",
        "glm45",
        calls=(("weather", '{"city": "Bonn", "days": 2}'), ("now", "{}")),
    ),
    Golden(
        "glm47",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Bonn</arg_value></tool_call>",
        "glm47",
        calls=(BONN,),
    ),
]
MARKED_SECTIONS = [
    Golden("deepseek-v3", DEEPSEEK_V3_CALLS, "deepseek_v3", calls=(BONN, ("now", "{}"))),
    Golden(
        "deepseek-r1",
        f"I must look.\n</think>\n\n{DEEPSEEK_V3_CALLS}",
        "deepseek_v3",
        "deepseek_r1",
        prompt="<｜Assistant｜><think>\n",
        thought="I must look.\n",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "deepseek-v31",
        'Wait.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Bonn"}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "deepseek_v31",
        content="Wait.",
        calls=(BONN,),
    ),
    Golden(
        "kimi-k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        '<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        "kimi_k2",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "kimi-k2-noise",
        "Hm.<|tool_calls_section_begin|> I call:\n<|tool_call_begin|> functions.weather:0 "
        '<|tool_call_argument_begin|> {"city": "Bonn"} <|tool_call_end|>\n<|tool_call_begin|>'
        "now:1<|tool_call_argument_begin|>{}<|tool_calls_section_end|>",
        "kimi_k2",
        content="Hm.",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "kimi-k2-slips",
        '<|tool_call_begin|>functions.weather:0{"city": "Bonn"}<|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_call_section_end|>",
        "kimi_k2",
        calls=(BONN, ("now", "{}")),
    ),
    Golden(
        "kimi-k2-section-without-calls",
        "<|tool_calls_section_begin|>no call<|tool_calls_section_end|>",
        "kimi_k2",
        content="<|tool_calls_section_begin|>no call<|tool_calls_section_end|>",
    ),
]
HARMONY = [
    Golden(
        "harmony-thought-and-answer",
        "<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        "openai",
        "openai_gptoss",
        prompt="<|start|>assistant",
        thought="easy",
        content="Yes.",
    ),
    Golden(
        "harmony-call",
        "<|channel|>analysis<|message|>look<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}',
        "openai",
        "openai_gptoss",
        prompt="<|start|>assistant",
        thought="look",
        calls=(BONN,),
    ),
    Golden(
        "harmony-recipient-in-the-role",
        " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city": "Bonn"}<|call|>',
        "openai",
        "openai_gptoss",
        prompt="<|start|>assistant",
        calls=(BONN,),
    ),
    Golden(
        "harmony-preamble-then-call",
        "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>commentary"
        ' to=functions.weather<|message|>{"city": "Bonn"}<|call|>',
        "openai",
        "openai_gptoss",
        prompt="<|start|>assistant",
        content="I will look.",
        calls=(BONN,),
    ),
    Golden(
        "harmony-reasoning-only",
        "<|channel|>analysis<|message|>easy<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        None,
        "openai_gptoss",
        prompt="<|start|>assistant",
        thought="easy",
        content="Yes.",
    ),
    Golden("harmony-none", "Yes.", "openai", "openai_gptoss", content="Yes."),
]
REASONING = [
    Golden(
        "think-in-the-output",
        "<think>\nhm\n</think>\n\nYes.",
        None,
        "qwen3",
        prompt="<|im_start|>assistant\n",
        thought="\nhm\n",
        content="\n\nYes.",
    ),
    Golden("think-not-at-all", "Yes.", None, "qwen3", content="Yes."),
    Golden(
        "think-opened-by-the-prompt",
        "hm\n</think>\n\nYes.",
        None,
        "qwen3",
        prompt="<|im_start|>assistant\n<think>\n",
        thought="hm\n",
        content="\n\nYes.",
    ),
    Golden(
        "think-closed-by-the-prompt",
        "Yes <think>?",
        None,
        "qwen3",
        prompt="<|im_start|>assistant\n<think>\n\n</think>\n\n",
        content="Yes <think>?",
    ),
    Golden("think-assumed", "hm</think>Yes.", None, "deepseek_r1", thought="hm", content="Yes."),
    Golden(
        "think-assumed-and-said",
        "<think>hm</think>Yes.",
        None,
        "deepseek_r1",
        thought="hm",
        content="Yes.",
    ),
    Golden(
        "think-left-in-the-answer",
        "hm</think>Yes.",
        None,
        "minimax_m2_append_think",
        content="<think>hm</think>Yes.",
    ),
    Golden(
        "think-left-in-the-answer-before-a-call",
        'hm</think>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "hermes",
        "minimax_m2_append_think",
        prompt="]~b]ai\n<think>\n",
        content="<think>hm</think>\n",
        calls=(("now", "{}"),),
    ),
    Golden(
        "think-closed-by-the-prompt-and-left-in-the-answer",
        "Yes.",
        None,
        "minimax_m2_append_think",
        prompt="]~b]ai\n<think></think>",
        content="Yes.",
    ),
    Golden("think-cut", "<think>hm, let", None, "qwen3", thought="hm, let"),
    Golden("think-with-half-an-end", "<think>a </thi b", None, "qwen3", thought="a </thi b"),
    Golden(
        "think-then-call",
        '<think>hm</think>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "hermes",
        "qwen3",
        thought="hm",
        calls=(("now", "{}"),),
    ),
    Golden(
        "think-ended-by-the-call",
        '<think>hm<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "hermes",
        "qwen3",
        thought="hm",
        calls=(("now", "{}"),),
    ),
    Golden(
        "think-ended-by-the-mark-of-a-section",
        "hm<|tool_calls_section_begin|>x",
        "kimi_k2",
        "kimi_k2",
        thought="hm",
        content="<|tool_calls_section_begin|>x",
    ),
    Golden(
        "think-about-the-delimiter",
        "<think>a <tool_call> is JSON</think>Yes.",
        "hermes",
        "qwen3",
        thought="a <tool_call> is JSON",
        content="Yes.",
    ),
    Golden(
        "seed-think",
        "<seed:think>hm</seed:think>Yes.",
        None,
        "seed_oss",
        thought="hm",
        content="Yes.",
    ),
    Golden(
        "granite-think",
        "Here is my thought process: hm. Here is my response: Yes.",
        None,
        "granite",
        thought=" hm. ",
        content=" Yes.",
    ),
]
WEATHER_CALL = '{"name": "weather", "arguments": {"city": "Bonn"}}'
NOW_CALL = '{"name": "now", "parameters": {}}'
UNKNOWN_CALL = '{"name": "clock", "arguments": {"city": "Bonn"}}'


def generic(name: str, output: str, content: str | None, *calls: tuple[str, str]) -> Golden:
    return Golden(f"generic-{name}", output, "generic", content=content, calls=calls)


NOW = ("now", "{}")
GENERIC = [
    generic("bare", WEATHER_CALL, None, BONN),
    generic("list", f"[{WEATHER_CALL}, {NOW_CALL}]", None, BONN, NOW),
    generic("lines", f"{WEATHER_CALL}\n{NOW_CALL}\n", None, BONN, NOW),
    generic("commas", f"{WEATHER_CALL}, {NOW_CALL}", None, BONN, NOW),
    generic("fence", f"I look.\n```json\n{WEATHER_CALL}\n```", "I look.\n", BONN),
    generic("plain-fence", f"```\n[{WEATHER_CALL},{NOW_CALL}]\n```\nSo.", "\nSo.", BONN, NOW),
    generic("tags", f"<tool_call>\n{WEATHER_CALL}\n</tool_call>\n<tool_call>{NOW_CALL}"
            "</tool_call>", None, BONN, NOW),
    generic("tag-of-two", f"<tool_call>{WEATHER_CALL}\n{NOW_CALL}</tool_call>.", ".", BONN, NOW),
    generic("after-a-line", f"I look:\n{WEATHER_CALL}\nDone.", "I look:\nDone.", BONN),
    generic("typed", '{"type": "function", "id": "1", "name": "now", "arguments": {}}', None, NOW),
    generic("arguments-first", '{"parameters": {"city": "Bonn"}, "name": "weather"}', None, BONN),
    generic("cut", '<tool_call>{"name": "weather", "arguments": {"city": "Bo', None,
            ("weather", '{"city": "Bo')),
    generic("unknown-name", UNKNOWN_CALL, UNKNOWN_CALL),
    generic("unknown-in-tags", f"<tool_call>{UNKNOWN_CALL}</tool_call>",
            f"<tool_call>{UNKNOWN_CALL}</tool_call>"),
    generic("unknown-in-list", f"[{NOW_CALL}, {UNKNOWN_CALL}]", f", {UNKNOWN_CALL}]", NOW),
    generic("name-without-arguments", '{"name": "now"}', '{"name": "now"}'),
    generic("name-among-data", '{"name": "now", "age": 3}', '{"name": "now", "age": 3}'),
    generic("call-within-data", f'{{"steps": [{NOW_CALL}]}}', f'{{"steps": [{NOW_CALL}]}}'),
    generic("fenced-data", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```'),
    generic("code", "```\n{\n}\n```\n[1, 2]\n{}", "```\n{\n}\n```\n[1, 2]\n{}"),
    generic("within-a-line", f"Write {NOW_CALL} for it.", f"Write {NOW_CALL} for it."),
    generic("empty-list", "[]", "[]"),
    Golden("generic-after-reasoning", f"<think>\n{NOW_CALL}\n</think>\n\n{WEATHER_CALL}",
           "generic", "qwen3", thought=f"\n{NOW_CALL}\n", calls=(BONN,)),
]  # fmt: skip
NO_FORMAT = [Golden("no-format", "<tool_call> <think>", content="<tool_call> <think>")]

GOLDENS = [
    *TAGGED_JSON,
    *LLAMA,
    *MISTRAL,
    *PYTHONIC,
    *TAGGED_PARAMETERS,
    *MARKED_SECTIONS,
    *HARMONY,
    *REASONING,
    *GENERIC,
    *MORE_FORMATS,
    *NO_FORMAT,
]
