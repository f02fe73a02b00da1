"""The formats of calls whose arguments are written one by one, in tags or as an object of their own
notation. Sources are the chat templates that the models ship with.
"""

from __future__ import annotations

import re
from dataclasses import replace

from quire.server.output_parsing.formats.call_tables import (
    argument_pairs,
    marked_parameters,
    markup_before_a_call,
)
from quire.server.output_parsing.state_table import Head, Key, ParserState, Reads, ToolFormat
from quire.server.output_parsing.tool_schemas import TYPES, json_type_named

QWEN_TAGS = (
    "<tool_call>", "</tool_call>", "<function=", ">", "<parameter=", ">", "</function>",
)  # fmt: skip
QWEN_XML = ToolFormat("qwen3_coder", marked_parameters(*QWEN_TAGS), pads_values=True)
MIMO = ToolFormat("mimo", marked_parameters(*QWEN_TAGS))
"""Qwen's tags, with values that do not stand on lines of their own."""
SEED_OSS = ToolFormat(
    "seed_oss",
    marked_parameters(
        "<seed:tool_call>", "</seed:tool_call>", "<function=", ">", "<parameter=", ">",
        "</function>",
    ),
)  # fmt: skip
MINIMAX_M2 = ToolFormat(
    "minimax_m2",
    marked_parameters(
        "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', '">',
        '<parameter name="', '">', "</invoke>",
    ),
)  # fmt: skip
MINICPM5 = ToolFormat(
    "minicpm5",
    marked_parameters(
        "", "", '<function name="', '">', '<param name="', '">', "</function>", "</param>",
        verbatim=("<![CDATA[", "]]>"),
    ),
    only_known_names=True,
    checks_calls=True,
)  # fmt: skip


def dots_states() -> dict[str, ParserState]:
    """A section of invocations, or of one JSON object."""
    end = {"</dots_function_call>": "content"}
    states = marked_parameters(
        "<dots_function_call>", "</dots_function_call>", '<invoke name="', '">',
        '<parameter name="', '">', "</invoke>",
    )  # fmt: skip
    return {
        **states,
        "section": ParserState(Reads.BLANK, {'<invoke name="': "name", "{": "object"}, kept={"{"}),
        "object": ParserState(Reads.ENVELOPE, end, then="after"),
        "after": ParserState(Reads.CONTENT, {**end, "<dots_function_call>": "section"}),
    }


DOTS = ToolFormat("dots", dots_states(), only_known_names=True)


STRING_ATTRIBUTE = re.compile(r'"\s+string="')


def dsml_key(text: str) -> Key:
    """`NAME" string="true`: a text as it stands, or JSON."""
    name, *rest = STRING_ATTRIBUTE.split(text, maxsplit=1)
    types = {"true": frozenset({"string"}), "false": TYPES - {"string"}}
    return Key(name.strip(), types.get("".join(rest), frozenset()))


def dsml_states(section: str, gap: str = "", *others: str) -> dict[str, ParserState]:
    """DeepSeek's markup from V3.2 on. `others`: other names that models write for the section."""
    mark = f"｜DSML｜{gap}"
    states = marked_parameters(
        f"<{mark}{section}>", f"</{mark}{section}>", f'<{mark}invoke name="', '">',
        f'<{mark}parameter name="', '">', f"</{mark}invoke>", f"</{mark}parameter>",
        read_key=dsml_key,
    )  # fmt: skip
    opened = {f"<{mark}{other}>": "section" for other in others}
    opens = {**states["content"].delimiters, **opened}
    return {**states, "content": ParserState(Reads.CONTENT, opens)}


DEEPSEEK_V32 = ToolFormat("deepseek_v32", dsml_states("function_calls"))
DEEPSEEK_V4 = ToolFormat("deepseek_v4", dsml_states("tool_calls", "", "toolcalls", "tool"))
DEEPSEEK_V41 = ToolFormat("deepseek_v41", dsml_states("calls", " "))


def step3_states() -> dict[str, ParserState]:
    """Sections of calls, each between marks that say what kind of tool it is."""
    section, end = "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"
    between = {"<｜tool_call_begin｜>": "kind", "<｜tool_sep｜>": "ended", end: "content"}
    states = marked_parameters(
        section, end, '<steptml:invoke name="', '">', '<steptml:parameter name="', '">',
        "</steptml:invoke>", "</steptml:parameter>",
    )  # fmt: skip
    return {
        **states,
        "content": ParserState(Reads.CONTENT, {section: "section"}),
        "section": ParserState(Reads.BLANK, {"<｜tool_call_begin｜>": "kind"}),
        "kind": ParserState(
            Reads.HEAD,
            {"<｜tool_sep｜>": "opening", '<steptml:invoke name="': "name"},
            head=markup_before_a_call,
        ),
        "opening": ParserState(Reads.BLANK, {'<steptml:invoke name="': "name"}),
        "close": ParserState(
            Reads.CONTENT, {"<｜tool_call_end｜>": "ended", **between}, closes=True
        ),
        "closed": ParserState(Reads.CONTENT, between, closes=True),
        "ended": ParserState(Reads.CONTENT, between),
    }


STEP3 = ToolFormat("step3", step3_states())
GLM = ToolFormat("glm45", argument_pairs(), trims_answer=True)


def k2_horizon_states() -> dict[str, ParserState]:
    """Calls with their arguments in tags, with or without types, or as JSON."""
    states = argument_pairs("<ifm|", has_section=True, has_types=True)
    ends = {"</ifm|tool_call>": "ended"}
    opens = {
        text: "form" for text, place in states["content"].delimiters.items() if place == "name"
    }
    for place, state in states.items():
        forms = {text: "form" for text in opens if text in state.delimiters}
        delimiters = {**state.delimiters, **forms}
        states[place] = replace(state, delimiters=delimiters)
    return {
        **states,
        "form": ParserState(Reads.BLANK, {"{": "object"}, then="name", kept={"{"}),
        "object": ParserState(Reads.ENVELOPE, ends, then="ended"),
        "ended": ParserState(Reads.CONTENT, {**ends, **opens, "</ifm|tool_calls>": "content"}),
    }


K2_HORIZON = ToolFormat("k2_horizon", k2_horizon_states(), only_known_names=True)
SUFFIX = re.compile(r"""=\s*['"](:[\w.\-]+)['"]|<(?:think|tool_calls?)(:[\w.\-]+)>""")
"""The suffix of the tags of a checkpoint, where its template says it."""


def suffix_in(template: str) -> str:
    """The suffix of the tags in a chat template; "" if there is none."""
    found = SUFFIX.search(template)
    return "" if found is None else found[1] or found[2]


def hunyuan_v3(template: str = "") -> ToolFormat:
    """The format of a checkpoint with this chat template."""
    states = argument_pairs("<", f"{suffix_in(template)}>", has_section=True, separator="tool_sep")
    return ToolFormat("hy_v3", states, for_template=hunyuan_v3)


def hunyuan_v4(template: str = "") -> ToolFormat:
    """The format of a checkpoint with this chat template."""
    states = argument_pairs("<", f"{suffix_in(template)}>", has_section=True)
    return ToolFormat("hy_v4", states, for_template=hunyuan_v4)


HUNYUAN_V3, HUNYUAN_V4 = hunyuan_v3(), hunyuan_v4()
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"?')


def attributes(text: str) -> dict[str, str]:
    """The attributes of a tag, by their names."""
    return {
        # the ampersand last, so that an escaped entity stays one
        name: value.replace("&quot;", '"').replace("&amp;", "&")
        for name, value in ATTRIBUTE.findall(text)
    }


def kimi_k3_head(text: str) -> Head | None:
    """`tool="NAME" index="1"`."""
    name = attributes(text).get("tool", "").strip()
    return Head(name) if name else None


def kimi_k3_key(text: str) -> Key:
    """`key="NAME" type="number"`: a text as it stands, or JSON of that type."""
    found = attributes(text)
    types = frozenset({json_type_named(found.get("type", "string"))}) & TYPES
    return Key(found.get("key", ""), types or frozenset({"string"}))


KIMI_K3_ANSWER = (
    "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>",
)  # fmt: skip


def kimi_k3_states() -> dict[str, ParserState]:
    """A channel of calls after one of the answer, whose tags are markup."""
    states = marked_parameters(
        "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|open|>call ", "<|sep|>",
        "<|open|>argument ", "<|sep|>", "<|close|>call<|sep|>", "<|close|>argument<|sep|>",
        head=kimi_k3_head, read_key=kimi_k3_key,
    )  # fmt: skip
    answer = dict.fromkeys(KIMI_K3_ANSWER, "content")
    opens = {"<|open|>tools<|sep|>": "section"}
    return {**states, "content": ParserState(Reads.CONTENT, {**opens, **answer})}


KIMI_K3 = ToolFormat("kimi_k3", kimi_k3_states())
M3 = "]<]minimax[>["
MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    {
        "content": ParserState(Reads.CONTENT, {f"{M3}<tool_call>": "section"}),
        "section": ParserState(Reads.BLANK, {f'{M3}<invoke name="': "name"}),
        "name": ParserState(Reads.HEAD, {'">': "arguments"}),
        "arguments": ParserState(
            Reads.ELEMENTS, {f"{M3}</invoke>": "between", f"{M3}</tool_call>": "content"}, mark=M3
        ),
        "between": ParserState(
            Reads.CONTENT,
            {
                f'{M3}<invoke name="': "name",
                f"{M3}</tool_call>": "content",
                f"{M3}<tool_call>": "section",
            },
        ),
    },
)


def gemma_head(text: str) -> Head | None:
    """`call:NAME`; some checkpoints leave out the word."""
    name = text.strip().removeprefix("call").removeprefix(":").strip()
    return Head(name) if name else None


def loose_calls(opening: str, closing: str, mark: str, *others: str) -> dict[str, ParserState]:
    """Calls of Gemma's notation, perhaps without braces; `others` may follow them."""
    ends = {closing: "content"}
    opens = {opening: "name"}
    return {
        "content": ParserState(Reads.CONTENT, opens),
        "name": ParserState(
            Reads.HEAD, {"{": "arguments", closing: "empty"}, head=gemma_head, bars="\n<}"
        ),
        "empty": ParserState(Reads.CONTENT, opens, closes=True),
        "arguments": ParserState(Reads.LOOSE, ends, then="after", mark=mark),
        "after": ParserState(
            Reads.CONTENT, {closing: "after", **opens, **dict.fromkeys(others, "content")}
        ),
    }


GEMMA4 = ToolFormat(
    "gemma4",
    loose_calls("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
    trims_answer=True,
)
FUNCTIONGEMMA = ToolFormat(
    "functiongemma",
    loose_calls(
        "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
    ),
    trims_answer=True,
)
PARAMETER_FORMATS = (
    QWEN_XML, MIMO, SEED_OSS, MINIMAX_M2, MINICPM5, DOTS, DEEPSEEK_V32, DEEPSEEK_V4, DEEPSEEK_V41,
    STEP3, GLM, K2_HORIZON, HUNYUAN_V3, HUNYUAN_V4, KIMI_K3, MINIMAX_M3, GEMMA4, FUNCTIONGEMMA,
)  # fmt: skip
