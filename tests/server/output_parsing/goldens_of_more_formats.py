"""Transcripts of the formats that few models write: of each a call after text and one without
arguments, by hand from the models' chat templates, and what is special of it.
"""

from __future__ import annotations

from tests.server.output_parsing.golden import BONN, Golden

NOW = ("now", "{}")
BOTH = (BONN, NOW)
ENVELOPE = '{"name": "weather", "arguments": {"city": "Bonn"}}'
NOW_ENVELOPE = '{"name": "now", "arguments": {}}'

IN_JSON = [
    Golden(
        "cohere",
        "<|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Bonn"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n'
        "]<|END_ACTION|>",
        "cohere_command3",
        calls=BOTH,
    ),
    Golden(
        "cohere-plan-then-calls",
        "I look.<|END_THINKING|><|START_ACTION|>[\n"
        '{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
        "cohere_command4",
        "cohere_command4",
        prompt="<|START_THINKING|>",
        thought="I look.",
        calls=(NOW,),
    ),
    Golden(
        "cohere-answer",
        "<|START_RESPONSE|>Fine.<|END_RESPONSE|>",
        "cohere_command3",
        "cohere_command3",
        prompt="<|START_THINKING|><|END_THINKING|>",
        content="Fine.",
    ),
    Golden(
        "cohere-thought-and-text-without-tools",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_TEXT|>Fine.<|END_TEXT|>",
        None,
        "cohere_command4",
        thought="Hm.",
        content="Fine.",
    ),
    Golden(
        "apertus",
        'I look. <|tools_prefix|>[{"weather": {"city": "Bonn"}}, {"now": {}}]<|tools_suffix|>',
        "apertus",
        content="I look.",
        calls=BOTH,
    ),
    Golden(
        "apertus-other-json",
        '<|tools_prefix|>[{"a": 1}]<|tools_suffix|>',
        "apertus",
        content='<|tools_prefix|>[{"a": 1}]<|tools_suffix|>',
    ),
    Golden(
        "lfm2-said-again",
        '<|tool_call_start|>[weather(city="Bonn"), now()]<|tool_call_end|>'
        '[weather(city="Bonn"), now()]<|tool_call_end|> Wait.',
        "lfm2",
        content="Wait.",
        calls=BOTH,
    ),
    Golden(
        "lfm2-brackets-of-the-answer",
        '<|tool_call_start|>[weather(city="Bonn")]<|tool_call_end|>[a](b)]',
        "lfm2",
        content="[a](b)]",
        calls=(BONN,),
    ),
    Golden(
        "granite-20b",
        f"I look.<function_call> {ENVELOPE}<function_call> {NOW_ENVELOPE}",
        "granite-20b-fc",
        content="I look.",
        calls=BOTH,
    ),
    Golden(
        "gigachat3",
        f"I look.<|message_sep|>\n\nfunction call<|role_sep|>\n{ENVELOPE}",
        "gigachat3",
        content="I look.",
        calls=(BONN,),
    ),
    Golden(
        "gigachat3-token",
        f"I look.<|function_call|>{ENVELOPE}<|message_sep|>\n\n",
        "gigachat3",
        content="I look.",
        calls=(BONN,),
    ),
    Golden(
        "gigachat3-prose",
        "A function call<|role_sep|> is this.",
        "gigachat3",
        content="A function call<|role_sep|> is this.",
    ),
    Golden(
        "hunyuan-a13b",
        f"<think>\nHm.\n</think>\n<answer>\nI look.\n</answer><tool_calls>[{ENVELOPE}, "
        f"{NOW_ENVELOPE}]</tool_calls>",
        "hunyuan_a13b",
        "hunyuan_a13b",
        thought="Hm.",
        content="I look.",
        calls=BOTH,
    ),
    Golden(
        "hunyuan-a13b-call-in-the-reasoning",
        f"<think>\n<tool_calls>[{NOW_ENVELOPE}]</tool_calls>\n</think>\n<answer>\nNo.\n</answer>",
        "hunyuan_a13b",
        "hunyuan_a13b",
        thought=f"<tool_calls>[{NOW_ENVELOPE}]</tool_calls>",
        content="No.",
    ),
    Golden(
        "hunyuan-a13b-without-reasoning",
        "<think>\n\n</think>\n<answer>\nNo.\n</answer>",
        "hunyuan_a13b",
        "hunyuan_a13b",
        content="No.",
    ),
    Golden(
        "hunyuan-a13b-opened-by-the-prompt",
        "Hm.\n</think>\n<answer>\nNo.",
        None,
        "hunyuan_a13b",
        prompt="<think>\n",
        thought="Hm.",
        content="No.",
    ),
    Golden(
        "jamba-one-a-line",
        f"<tool_calls>\n{ENVELOPE}\n{NOW_ENVELOPE}\n</tool_calls>",
        "jamba",
        calls=BOTH,
    ),
    Golden(
        "internlm",
        f"I look.<|action_start|><|plugin|>\n{ENVELOPE}<|action_end|>\n",
        "internlm",
        content="I look.",
        calls=(BONN,),
    ),
    Golden(
        "internlm-parameters",
        '<|action_start|><|plugin|>{"name": "weather", "parameters": {"city": "Bonn"}}'
        "<|action_end|>",
        "internlm",
        calls=(BONN,),
    ),
    Golden(
        "longcat",
        f"I look.\n<longcat_tool_call>\n{ENVELOPE}\n</longcat_tool_call>",
        "longcat",
        content="I look.\n",
        calls=(BONN,),
    ),
    Golden(
        "nemotron-json",
        f"I look.<TOOLCALL>[{ENVELOPE}, {NOW_ENVELOPE}]</TOOLCALL>",
        "nemotron_json",
        content="I look.",
        calls=BOTH,
    ),
    Golden(
        "ernie",
        f"Hm.\n</think>\n\n<response>\nI look.\n</response>\n<tool_call>\n{ENVELOPE}\n</tool_call>",
        "ernie45",
        "ernie45",
        thought="Hm.\n",
        content="I look.",
        calls=(BONN,),
    ),
    Golden(
        "ernie-without-tags",
        "Hm.</think>Fine.",
        "ernie45",
        "ernie45",
        thought="Hm.",
        content="Fine.",
    ),
    Golden(
        "granite-thinking",
        "<think>Hm.\n</think>\n\n Fine.\n",
        "hermes",
        "granite_thinking_parser",
        thought="Hm.\n",
        content="Fine.\n",
    ),
    Golden(
        "granite-thinking-without-an-answer",
        "<think>Hm.</think>\n\n",
        "hermes",
        "granite_thinking_parser",
        thought="Hm.",
    ),
    Golden(
        "granite-thinking-then-a-call",
        f"Hm.</think>\n<tool_call>\n{ENVELOPE}\n</tool_call>",
        "hermes",
        "granite_thinking_parser",
        prompt="<think>\n",
        thought="Hm.",
        calls=(BONN,),
    ),
    Golden(
        "ernie-call-at-once",
        f"Hm.\n</think>\n\n\n<tool_call>\n{ENVELOPE}\n</tool_call>\n",
        "ernie45",
        "ernie45",
        thought="Hm.\n",
        calls=(BONN,),
    ),
    Golden("xlam-list", f"[{ENVELOPE}, {NOW_ENVELOPE}]", "xlam", calls=BOTH),
    Golden(
        "xlam-fenced", f"I look.\n```json\n[{ENVELOPE}]\n```", "xlam", content="I look.",
        calls=(BONN,),
    ),
    Golden("xlam-tagged", f"<tool_call>[{ENVELOPE}]</tool_call>", "xlam", calls=(BONN,)),
    Golden("xlam-marked", f"[TOOL_CALLS][{ENVELOPE}]", "xlam", calls=(BONN,)),
    Golden(
        "xlam-marked-after-text", f"I look.[TOOL_CALLS] [{ENVELOPE}]", "xlam", content="I look.",
        calls=(BONN,),
    ),
    Golden(
        "xlam-after-reasoning", f"<think>Hm.</think>[{NOW_ENVELOPE}]", "xlam", "qwen3",
        thought="Hm.", calls=(NOW,),
    ),
    Golden("xlam-data", '[{"a": 1}]', "xlam", content='[{"a": 1}]'),
    Golden(
        "plamo3",
        "Hm.<|plamo:end_think:plamo|>I look.<|plamo:begin_tool_requests:plamo|>"
        "<|plamo:begin_tool_request:plamo|>"
        "<|plamo:begin_tool_name:plamo|>weather<|plamo:end_tool_name:plamo|>"
        "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
        '{"city": "Bonn"}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>'
        "<|plamo:begin_tool_request:plamo|>"
        "<|plamo:begin_tool_name:plamo|>now<|plamo:end_tool_name:plamo|>"
        "<|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
        "plamo3",
        "plamo3",
        prompt="<|plamo:begin_think:plamo|>",
        thought="Hm.",
        content="I look.",
        calls=BOTH,
    ),
    Golden(
        "inkling",
        "<|message_model|><|content_thinking|>Hm.<|end_message|>"
        "<|message_model|><|content_text|>I look.<|end_message|>"
        '<|message_model|><|content_invoke_tool_json|>{"name":"weather","args":{"city": "Bonn"}}'
        "<|end_message|><|content_model_end_sampling|>",
        "inkling",
        "inkling",
        thought="Hm.",
        content="I look.",
        calls=(BONN,),
    ),
    Golden(
        "inkling-without-tools",
        "Hm.<|end_message|><|message_model|><|content_text|>Fine.<|end_message|>",
        None,
        "inkling",
        prompt="<|message_model|><|content_thinking|>",
        thought="Hm.",
        content="Fine.",
    ),
]  # fmt: skip


def dsml(section: str, gap: str = "", opened_as: str = "") -> str:
    """Two calls in DeepSeek's markup."""
    mark = f"｜DSML｜{gap}"
    return (
        f"I look.\n\n<{mark}{opened_as or section}>\n"
        f'<{mark}invoke name="weather">\n'
        f'<{mark}parameter name="city" string="true">Bonn</{mark}parameter>\n'
        f'<{mark}parameter name="days" string="false">2</{mark}parameter>\n'
        f'<{mark}parameter name="spots" string="false">["a", "b"]</{mark}parameter>\n'
        f"</{mark}invoke>\n"
        f'<{mark}invoke name="now">\n</{mark}invoke>\n'
        f"</{mark}{section}>"
    )


DSML_CALLS = (("weather", '{"city": "Bonn", "days": 2, "spots": ["a", "b"]}'), NOW)
TWO_DAYS = ("weather", '{"city": "Bonn", "days": 2}')


def hunyuan(separator: str) -> str:
    """Two calls with keys and values in tags of their own, in a section."""
    return (
        f"I look.<tool_calls>\n<tool_call>weather{separator}\n"
        "<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
        f"<tool_call>now{separator}\n</tool_call>\n</tool_calls>"
    )


IN_TAGS = [
    *(
        Golden(f"{name}-dsml", dsml(*marks), name, content="I look.\n\n", calls=DSML_CALLS)
        for name, marks in {
            "deepseek_v32": ("function_calls",),
            "deepseek_v4": ("tool_calls",),
            "deepseek_v41": ("calls", " "),
        }.items()
    ),
    Golden(
        "deepseek-v4-other-opening",
        dsml("tool_calls", opened_as="toolcalls"),
        "deepseek_v4",
        content="I look.\n\n",
        calls=DSML_CALLS,
    ),
    Golden(
        "deepseek-v4-the-schema-rules-over-the-attribute",
        '<｜DSML｜tool_calls><｜DSML｜invoke name="weather">'
        '<｜DSML｜parameter name="days" string="true">2</｜DSML｜parameter>'
        '<｜DSML｜parameter name="city" string="false">null</｜DSML｜parameter>'
        '<｜DSML｜parameter name="limit">3</｜DSML｜parameter>'
        '<｜DSML｜parameter name="a" string="true">4</｜DSML｜parameter>'
        '<｜DSML｜parameter name="b" string="false">[4]</｜DSML｜parameter>'
        '<｜DSML｜parameter name="c">5</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜tool_calls>",
        "deepseek_v4",
        calls=(
            ("weather", '{"days": 2, "city": "null", "limit": 3, "a": "4", "b": [4], "c": "5"}'),
        ),
    ),
    Golden(
        "deepseek-v4-call-in-the-reasoning",
        f"Hm.{dsml('tool_calls')}",
        "deepseek_v4",
        "deepseek_v4",
        prompt="<think>",
        thought="Hm.I look.\n\n",
        calls=DSML_CALLS,
    ),
    Golden(
        "mimo",
        "<tool_call>\n<function=weather>\n<parameter=city>Bonn</parameter>\n"
        "<parameter=days>2</parameter>\n</function>\n</tool_call>",
        "mimo",
        calls=(TWO_DAYS,),
    ),
    Golden(
        "mimo-lines",
        "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n"
        "</tool_call>",
        "mimo",
        calls=(("weather", '{"city": "\\nBonn\\n"}'),),
    ),
    Golden(
        "dots",
        'I look.<dots_function_call>\n<invoke name="weather">\n'
        '<parameter name="city">Bonn</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</dots_function_call>',
        "dots",
        content="I look.",
        calls=(TWO_DAYS, NOW),
    ),
    Golden(
        "dots-json",
        f"<dots_function_call>\n{ENVELOPE}\n</dots_function_call>",
        "dots",
        calls=(BONN,),
    ),
    Golden(
        "minicpm5",
        'I look.\n<function name="weather"><param name="city">Bonn</param>'
        '<param name="days">2</param></function>\n<function name="now"></function>',
        "minicpm5",
        content="I look.\n",
        calls=(TWO_DAYS, NOW),
    ),
    Golden(
        "minicpm5-verbatim",
        '<function name="weather"><param name="city"><![CDATA[a < b\n</param></function> & ]] c]]>'
        '</param><param name="days"><![CDATA[3]]></param></function>',
        "minicpm5",
        calls=(("weather", '{"city": "a < b\\n</param></function> & ]] c", "days": 3}'),),
    ),
    *(
        Golden(f"{name}-unknown-name", output, name, content=output)
        for name, output in {
            "minicpm5": 'So: <function name="x"><param name="y">1</param></function>',
            "dots": '<dots_function_call><invoke name="x"></invoke></dots_function_call>',
            "k2_horizon": "<ifm|tool_calls><ifm|tool_call>x</ifm|tool_call></ifm|tool_calls>",
        }.items()
    ),
    Golden(
        "step3",
        "I look.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="weather"><steptml:parameter name="city">Bonn</steptml:parameter>'
        '<steptml:parameter name="days">2</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        "step3",
        content="I look.",
        calls=(TWO_DAYS, NOW),
    ),
    Golden(
        "step3-without-kinds",
        '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="weather">'
        '<steptml:parameter name="city">Bonn</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_sep｜><｜tool_call_begin｜>"
        '<steptml:invoke name="now"></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        "step3",
        calls=BOTH,
    ),
    Golden(
        "hunyuan-v3",
        hunyuan("<tool_sep>"),
        "hy_v3",
        content="I look.",
        calls=(TWO_DAYS, NOW),
    ),
    Golden("hunyuan-v4", hunyuan(""), "hy_v4", content="I look.", calls=(TWO_DAYS, NOW)),
    Golden(
        "hunyuan-v3-reasoning", "Hm.</think>Fine.", "hy_v3", "hy_v3", prompt="<think>",
        thought="Hm.", content="Fine.",
    ),
    Golden(
        "k2-horizon-a-section-ends-the-reasoning",
        "<ifm|think>Hm.<ifm|tool_calls>none",
        "k2_horizon",
        "k2_horizon",
        thought="Hm.",
        content="<ifm|tool_calls>none",
    ),
    Golden(
        "k2-horizon",
        "<ifm|think_fast>Hm.</ifm|think_fast>I look.<ifm|tool_calls>\n<ifm|tool_call>weather\n"
        "<ifm|arg_key>city</ifm|arg_key>\n<ifm|arg_value>Bonn</ifm|arg_value>\n"
        "<ifm|arg_key>days</ifm|arg_key>\n<ifm|arg_value>2</ifm|arg_value>\n</ifm|tool_call>\n"
        "<ifm|tool_call>now</ifm|tool_call>\n</ifm|tool_calls>",
        "k2_horizon",
        "k2_horizon",
        thought="Hm.",
        content="I look.",
        calls=(TWO_DAYS, NOW),
    ),
    Golden(
        "k2-horizon-typed",
        "<ifm|tool_calls><ifm|tool_call>weather"
        "<ifm|arg_key>city</ifm|arg_key><ifm|arg_type>integer</ifm|arg_type>"
        "<ifm|arg_value>5</ifm|arg_value>"
        "<ifm|arg_key>other</ifm|arg_key><ifm|arg_type>list[int]</ifm|arg_type>"
        "<ifm|arg_value>[5]</ifm|arg_value>"
        "<ifm|arg_key>some</ifm|arg_key><ifm|arg_value>5</ifm|arg_value>"
        "</ifm|tool_call></ifm|tool_calls>",
        "k2_horizon",
        calls=(("weather", '{"city": "5", "other": [5], "some": "5"}'),),
    ),
    Golden(
        "k2-horizon-json",
        f"<ifm|tool_calls>\n<ifm|tool_call>\n{ENVELOPE}\n</ifm|tool_call>\n"
        f"<ifm|tool_call>\n{NOW_ENVELOPE}\n</ifm|tool_call>\n</ifm|tool_calls>",
        "k2_horizon",
        calls=BOTH,
    ),
    Golden(
        "kimi-k3",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>I look.<|close|>response<|sep|>"
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Bonn<|close|>argument<|sep|>'
        '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
        '<|open|>argument key="a&quot;&amp;quot;" type="object"<|sep|>{"b": 1}'
        "<|close|>argument<|sep|><|close|>call<|sep|>"
        '<|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
        "<|close|>message<|sep|>",
        "kimi_k3",
        "kimi_k3",
        prompt="<|open|>think<|sep|>",
        thought="Hm.",
        content="I look.",
        calls=(("weather", '{"city": "Bonn", "days": 2, "a\\"&quot;": {"b": 1}}'), NOW),
    ),
    Golden(
        "kimi-k3-without-tools",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Fine.<|close|>response<|sep|>",
        None,
        "kimi_k3",
        prompt="<|open|>think<|sep|>",
        thought="Hm.",
        content="Fine.",
    ),
    Golden(
        "muse-glimmer",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=weather<|message|>"
        '<atem:function_calls>\n<atem:invoke name="weather">\n'
        '<atem:parameter name="city">Bonn</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
        "<|eom|><|start|>assistant to=now<|message|><atem:function_calls>\n"
        '<atem:invoke name="now">\n</atem:invoke>\n</atem:function_calls><|eot|>',
        "muse_glimmer",
        "muse_glimmer",
        prompt="<|start|>assistant",
        thought="Hm.",
        calls=(TWO_DAYS, NOW),
    ),
    Golden(
        "muse-glimmer-echo",
        ' to=self<|message|><atem:invoke name="now"><|eom|><|start|>assistant to=user<|message|>'
        '<atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls><|eot|>',
        "muse_glimmer",
        "muse_glimmer",
        prompt="<|start|>assistant",
        thought='<atem:invoke name="now">',
        content='<atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls>',
    ),
    Golden(
        "muse-glimmer-without-tools",
        " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Fine.<|eot|>",
        None,
        "muse_glimmer",
        prompt="<|start|>assistant",
        thought="Hm.",
        content="Fine.",
    ),
    Golden(
        "minimax-m3",
        "<mm:think>Hm.</mm:think>I look.]<]minimax[>[<tool_call>\n"
        ']<]minimax[>[<invoke name="weather">]<]minimax[>[<city>Bonn]<]minimax[>[</city>'
        "]<]minimax[>[<days>2]<]minimax[>[</days>"
        "]<]minimax[>[<spots>]<]minimax[>[<item>a]<]minimax[>[</item>"
        "]<]minimax[>[<item>3]<]minimax[>[</item>]<]minimax[>[</spots>"
        "]<]minimax[>[<where>]<]minimax[>[<x>]<]minimax[>[<y>1]<]minimax[>[</y>]<]minimax[>[</x>"
        "]<]minimax[>[</where>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="now">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        "minimax_m3",
        "minimax_m3",
        thought="Hm.",
        content="I look.",
        calls=(
            (
                "weather",
                '{"city": "Bonn", "days": 2, "spots": ["a", "3"], "where": {"x": {"y": "1"}}}',
            ),
            NOW,
        ),
    ),
    Golden(
        "minimax-m3-empty-and-unclosed",
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="weather">'
        "]<]minimax[>[<spots>]<]minimax[>[</spots>]<]minimax[>[<where>]<]minimax[>[</where>"
        "]<]minimax[>[<city>a <b>]<] c]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
        "minimax_m3",
        calls=(("weather", '{"spots": [], "where": {}, "city": "a <b>]<] c"}'),),
    ),
    Golden(
        "gemma4-thoughts-without-a-label-and-again",
        "So.\n<|channel>thousands<channel|>Yes, <|channel>thought\nno<channel|>no.",
        "gemma4",
        "gemma4",
        thought="thousandsno",
        content="So.\nYes, no.",
    ),
    Golden(
        "gemma4-an-end-of-nothing",
        "So.<channel|>Yes.",
        None,
        "gemma4",
        content="So.Yes.",
    ),
    Golden(
        "gemma4-opened-by-the-prompt",
        "Hm.<channel|>Yes.",
        None,
        "gemma4",
        prompt="<|turn>model\n<|channel>thought\n",
        thought="Hm.",
        content="Yes.",
    ),
    Golden(
        "gemma4-without-braces",
        "<|tool_call>call:now<tool_call|><|tool_call>:no such name<tool_call|>",
        "gemma4",
        calls=(("now", "{}"), ("no such name", "{}")),
    ),
    *(
        Golden(f"{name}-blanks-before-a-call", f"One. \n{call}\n Two. ", name, content=said,
               calls=(NOW,))
        for name, call, said in (
            ("gemma4", "<|tool_call>call:now{}<tool_call|>", "One.\n Two. "),
            ("functiongemma", "<start_function_call>call:now{}<end_function_call>", "One.\n Two. "),
            ("glm45", "<tool_call>now\n</tool_call>", "One.\n Two. "),
            ("xlam", f"<tool_call>[{NOW_ENVELOPE}]</tool_call>", "One.\n Two. "),
            ("ernie45", f"<tool_call>{NOW_ENVELOPE}</tool_call>", "One.\n Two. "),
        )
    ),
    Golden(
        "gemma4",
        "<|channel>thought\nHm.\n<channel|><|tool_call>call:weather{city:"
        '<|"|>Bonn<|"|>,days:2,spots:[<|"|>a, b}<|"|>,<|"|><|"|>],where:{x:{y:1.5,z:<|"|>"<|"|>},'
        'ok:true,no:null},limit:null}<tool_call|><|tool_call>call:now{}<tool_call|>'
        "<|tool_response>",
        "gemma4",
        "gemma4",
        thought="Hm.\n",
        calls=(
            (
                "weather",
                '{"city": "Bonn", "days": 2, "spots": ["a, b}", ""], '
                '"where": {"x": {"y": 1.5, "z": "\\""}, "ok": true, "no": null}, "limit": null}',
            ),
            NOW,
        ),
    ),
    Golden(
        "gemma4-types-of-the-schema",
        '<|tool_call>call:weather{ days : <|"|>2<|"|>, city:12, other:word, <|"|>a<|"|>:1 }'
        "<tool_call|>I look.",
        "gemma4",
        content="I look.",
        calls=(("weather", '{"days": 2, "city": "12", "other": "word", "a": 1}'),),
    ),
    Golden(
        "gemma4-cut",
        '<|tool_call>call:weather{city:<|"|>Bo',
        "gemma4",
        calls=(("weather", '{"city": "Bo'),),
    ),
    Golden(
        "gemma4-cut-by-its-end",
        '<|tool_call>call:weather{days:[1<tool_call|>I look.',
        "gemma4",
        content="I look.",
        calls=(("weather", '{"days": "[1"'),),
    ),
    Golden(
        "functiongemma",
        "<start_function_call>call:weather{city:<escape>Bonn<escape>,days:2}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call><start_function_response>",
        "functiongemma",
        calls=(TWO_DAYS, NOW),
    ),
    Golden(
        "olmo3",
        'I look.<function_calls>weather(city="Bonn", limit=null)\nnow()</function_calls>',
        "olmo3",
        content="I look.",
        calls=(("weather", '{"city": "Bonn", "limit": null}'), NOW),
    ),
    Golden(
        "olmo3-lines",
        '<function_calls>\nnow()\nweather(city="Bonn")\n</function_calls>\nDone.',
        "olmo3",
        content="\nDone.",
        calls=(NOW, BONN),
    ),
]  # fmt: skip
MORE_FORMATS = [*IN_JSON, *IN_TAGS]
