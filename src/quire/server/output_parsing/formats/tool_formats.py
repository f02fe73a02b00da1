"""The tool-call formats that are built in, each as its table. Sources are the chat templates that
the models ship with, which show the model the very text that it is to write.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.server.output_parsing.call_ids import counted_call_id, short_call_id
from quire.server.output_parsing.formats.generic import GENERIC
from quire.server.output_parsing.formats.harmony import HARMONY
from quire.server.output_parsing.state_table import Head, ParserState, Reads, ToolFormat

PLAIN = ToolFormat("plain", {"content": ParserState(Reads.CONTENT)})
"""No calls at all."""


def tagged(opening: str, closing: str) -> Mapping[str, ParserState]:
    """One envelope between two tags, as often as there are calls."""
    tags = {closing: "content", opening: "call"}
    return {
        "content": ParserState(Reads.CONTENT, {opening: "call"}),
        "call": ParserState(Reads.ENVELOPE, tags, then="after"),
        "after": ParserState(Reads.CONTENT, tags),
    }


def listed(*openings: str, closing: str = "") -> dict[str, ParserState]:
    """A JSON list of envelopes after an opening."""
    opens = dict.fromkeys(openings, "list")
    after = {closing: "content"} if closing else {}
    return {
        "content": ParserState(Reads.CONTENT, opens),
        "list": ParserState(Reads.BLANK, {"[": "item"}),
        "item": ParserState(Reads.ENVELOPE, after, then="more"),
        "more": ParserState(Reads.CONTENT, {",": "item", "]": "after", **after}, then="content"),
        "after": ParserState(Reads.CONTENT, {**after, **opens}),
    }


def marked_parameters(
    section: str,
    section_end: str,
    call: str,
    name_end: str,
    key: str,
    key_end: str,
    call_end: str,
    value_end: str = "</parameter>",
) -> Mapping[str, ParserState]:
    """Calls whose arguments stand in tags of their own, within the tags of a section. A value may
    have these tags within its lines: its end is followed by another tag, and the tags of a value
    that was not closed begin a line.
    """
    opens = {section: "section", call: "name"}
    value_ends = {value_end: "between", f"\n{key}": "key", call_end: "close"}
    followers = {
        value_end: (key, call_end, section_end, call),
        call_end: (section_end, section, call),
    }
    return {
        "content": ParserState(Reads.CONTENT, opens),
        "section": ParserState(Reads.BLANK, {call: "name"}),
        "name": ParserState(Reads.HEAD, {name_end: "between"}, bars="\n<"),
        "between": ParserState(
            Reads.CONTENT, {key: "key", call_end: "close", section_end: "closed", **opens}
        ),
        "key": ParserState(Reads.KEY, {key_end: "value"}),
        "value": ParserState(Reads.VALUE, value_ends, followers=followers),
        "close": ParserState(Reads.CONTENT, {section_end: "content", **opens}, closes=True),
        "closed": ParserState(Reads.CONTENT, opens, closes=True),
    }


def deepseek_states(call: Mapping[str, ParserState]) -> Mapping[str, ParserState]:
    """Sections of calls; `call` says what stands within one, from "name" to "end"."""
    between = {"<｜tool▁call▁begin｜>": "name", "<｜tool▁calls▁end｜>": "content"}
    return {
        "content": ParserState(Reads.CONTENT, {"<｜tool▁calls▁begin｜>": "section"}),
        "section": ParserState(Reads.BLANK, {"<｜tool▁call▁begin｜>": "name"}),
        "between": ParserState(Reads.CONTENT, between),
        "end": ParserState(
            Reads.CONTENT, {"```": "end", "<｜tool▁call▁end｜>": "between", **between}
        ),
        **call,
    }


KIMI_ENDS = ("<|tool_calls_section_end|>", "<|tool_call_section_end|>")


def noise_before_a_call(text: str) -> Head:
    """What stands between the marks of a section and of a call is markup, if the call is one."""
    return Head(is_held=True)


def kimi_head(text: str) -> Head | None:
    """`functions.NAME:INDEX` is both the name and the id."""
    name = text.strip().removeprefix("functions.").rpartition(":")[0] or text.strip()
    return Head(name, text.strip()) if name else None


def mistral_head(text: str) -> Head | None:
    """The name, followed by the id if the model gave one."""
    name, _, call_id = text.partition("[CALL_ID]")
    return Head(name.strip(), call_id.strip() or None) if name.strip() else None


def deepseek_head(text: str) -> Head | None:
    """V3 says what kind of tool it is, which is always a function, then its name."""
    name = text.rpartition("<｜tool▁sep｜>")[2].strip()
    return Head(name) if name and "<｜tool▁sep｜>" in text else None


def mistral_states() -> Mapping[str, ParserState]:
    """`[TOOL_CALLS]` with a list of envelopes (tokenizers up to v7), or before each call with its
    name, from v11 on with `[ARGS]` and in v11 with `[CALL_ID]`.
    """
    heads = {"[ARGS]": "arguments", "{": "arguments"}
    return {
        **listed("[TOOL_CALLS]"),
        "list": ParserState(Reads.BLANK, {"[": "item"}, then="name"),
        "name": ParserState(Reads.HEAD, heads, kept={"{"}, head=mistral_head),
        "arguments": ParserState(Reads.JSON, {"[TOOL_CALLS]": "list"}, then="after"),
    }


HERMES = ToolFormat("hermes", tagged("<tool_call>", "</tool_call>"))
LLAMA_JSON = ToolFormat(
    "llama3_json",
    {
        "start": ParserState(Reads.ENVELOPE, {"<|python_tag|>": "call"}, then="more"),
        "content": ParserState(Reads.CONTENT, {"<|python_tag|>": "call", "{": "call"}, kept={"{"}),
        "call": ParserState(Reads.ENVELOPE, then="more"),
        "more": ParserState(Reads.CONTENT, {";": "call", "<|python_tag|>": "call"}, then="content"),
    },
    start="start",
    lone_names=False,
)
GRANITE = ToolFormat(
    "granite",
    {
        **listed("<|tool_call|>", "<tool_call>"),
        "start": ParserState(
            Reads.BLANK,
            {"[": "item", "<|tool_call|>": "list", "<tool_call>": "list"},
            then="content",
        ),
    },
    start="start",
)
JAMBA = ToolFormat("jamba", listed("<tool_calls>", closing="</tool_calls>"))
PHI4_MINI = ToolFormat("phi4_mini_json", listed("functools"))
MISTRAL = ToolFormat("mistral", mistral_states(), call_id=short_call_id)
PYTHONIC = ToolFormat(
    "pythonic",
    {
        "start": ParserState(Reads.BLANK, {"[": "call"}, then="content"),
        "content": ParserState(Reads.CONTENT),
        "call": ParserState(Reads.PYTHON, then="more"),
        "more": ParserState(Reads.CONTENT, {",": "call", "]": "content"}, then="content"),
    },
    start="start",
)


def bracketed_pythonic(opening: str, closing: str) -> Mapping[str, ParserState]:
    """A list of Python calls, between tags."""
    return {
        "content": ParserState(Reads.CONTENT, {opening: "list"}),
        "list": ParserState(Reads.BLANK, {"[": "call"}),
        "call": ParserState(Reads.PYTHON, then="more"),
        "more": ParserState(Reads.CONTENT, {",": "call", "]": "after"}, then="content"),
        "after": ParserState(Reads.CONTENT, {closing: "content", opening: "list"}),
    }


LLAMA4_PYTHONIC = ToolFormat(
    "llama4_pythonic",
    {
        **bracketed_pythonic("<|python_start|>", "<|python_end|>"),
        "start": ParserState(
            Reads.BLANK, {"[": "call", "<|python_start|>": "list"}, then="content"
        ),
    },
    start="start",
)
LFM2 = ToolFormat("lfm2", bracketed_pythonic("<|tool_call_start|>", "<|tool_call_end|>"))
QWEN_XML = ToolFormat(
    "qwen3_coder",
    marked_parameters(
        "<tool_call>", "</tool_call>", "<function=", ">", "<parameter=", ">", "</function>"
    ),
    pads_values=True,
)
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
GLM = ToolFormat(
    "glm45",
    {
        "content": ParserState(Reads.CONTENT, {"<tool_call>": "name"}),
        "name": ParserState(
            Reads.HEAD,
            {"\n": "between", "<arg_key>": "between", "</tool_call>": "between"},
            kept={"<arg_key>", "</tool_call>"},
            bars="<{",
        ),
        "between": ParserState(
            Reads.CONTENT, {"<arg_key>": "key", "</tool_call>": "close", "<tool_call>": "name"}
        ),
        "key": ParserState(Reads.KEY, {"</arg_key>": "colon"}),
        "colon": ParserState(Reads.CONTENT, {"<arg_value>": "value", "</tool_call>": "close"}),
        "value": ParserState(
            Reads.VALUE,
            {"</arg_value>": "between"},
            followers={"</arg_value>": ("<arg_key>", "</tool_call>", "<tool_call>")},
        ),
        "close": ParserState(Reads.CONTENT, {"<tool_call>": "name"}, closes=True),
    },
)
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    deepseek_states(
        {
            "name": ParserState(Reads.HEAD, {"\n```json": "arguments"}, head=deepseek_head),
            "arguments": ParserState(Reads.JSON, {"<｜tool▁call▁end｜>": "between"}, then="end"),
        }
    ),
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    deepseek_states(
        {
            "name": ParserState(Reads.HEAD, {"<｜tool▁sep｜>": "arguments"}),
            "arguments": ParserState(Reads.JSON, {"<｜tool▁call▁end｜>": "between"}, then="end"),
        }
    ),
)
KIMI_K2 = ToolFormat(
    "kimi_k2",
    {
        "content": ParserState(
            Reads.CONTENT,
            {
                "<|tool_calls_section_begin|>": "section",
                "<|tool_call_section_begin|>": "section",
                "<|tool_call_begin|>": "name",
            },
        ),
        "section": ParserState(
            Reads.HEAD,
            {"<|tool_call_begin|>": "name", **dict.fromkeys(KIMI_ENDS, "content")},
            head=noise_before_a_call,
            bars="",
        ),
        "name": ParserState(
            Reads.HEAD,
            {"<|tool_call_argument_begin|>": "arguments", "{": "arguments"},
            kept={"{"},
            head=kimi_head,
        ),
        "arguments": ParserState(
            Reads.JSON,
            {"<|tool_call_end|>": "between", **dict.fromkeys(KIMI_ENDS, "content")},
            then="end",
        ),
        "end": ParserState(
            Reads.CONTENT,
            {
                "<|tool_call_end|>": "between",
                "<|tool_call_begin|>": "name",
                **dict.fromkeys(KIMI_ENDS, "content"),
            },
        ),
        "between": ParserState(
            Reads.CONTENT,
            {
                "<|tool_call_begin|>": "name",
                "<|tool_calls_section_begin|>": "section",
                **dict.fromkeys(KIMI_ENDS, "content"),
            },
        ),
    },
    call_id=counted_call_id,
)


TOOL_FORMATS = (
    HERMES, LLAMA_JSON, GRANITE, JAMBA, PHI4_MINI, MISTRAL, PYTHONIC, LLAMA4_PYTHONIC,
    LFM2, QWEN_XML, SEED_OSS, MINIMAX_M2, GLM, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, HARMONY,
    GENERIC,
)  # fmt: skip
ALIASES = {
    "qwen": "hermes",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "mimo": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "glm47": "glm45",
}
"""Names of the same formats."""


def required_calls() -> ToolFormat:
    """What a grammar makes of `tool_choice="required"`: a list of `{"name", "parameters"}`."""
    states = listed()
    return ToolFormat(
        "required", {**states, "start": ParserState(Reads.BLANK, {"[": "item"}, then="content")},
        start="start",
    )  # fmt: skip


def named_call(name: str, *, as_text: bool = False) -> ToolFormat:
    """What a grammar makes of a named `tool_choice`: the arguments and nothing else, as one JSON
    value, or as text that is the input of a custom tool.
    """
    reads = Reads.TEXT if as_text else Reads.JSON
    states = {
        "content": ParserState(Reads.CONTENT),
        "start": ParserState(reads, then="content", calls=name),
    }
    return ToolFormat("named", states, start="start")
