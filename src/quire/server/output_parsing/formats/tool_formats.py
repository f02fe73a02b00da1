"""The tool-call formats whose arguments are JSON or Python, each as its table. Sources are the chat
templates that the models ship with, which show the model the very text that it is to write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from quire.server.output_parsing.call_ids import counted_call_id, short_call_id
from quire.server.output_parsing.formats.call_tables import (
    deepseek_states,
    listed,
    markup_before_a_call,
    tagged,
)
from quire.server.output_parsing.formats.generic import enveloped, generic_states
from quire.server.output_parsing.state_table import Head, ParserState, Reads, ToolFormat

COHERE_ANSWER = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
KIMI_ENDS = dict.fromkeys(("<|tool_calls_section_end|>", "<|tool_call_section_end|>"), "content")


def plamo(name: str) -> str:
    """A mark of PLaMo's."""
    return f"<|plamo:{name}:plamo|>"


PLAMO_ARGUMENTS = f"{plamo('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>"


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
ERNIE45 = ToolFormat("ernie45", tagged("<tool_call>", "</tool_call>"), trims_answer=True)
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


def one_or_several(opening: str, closing: str) -> dict[str, ParserState]:
    """A JSON list of envelopes, or envelopes alone, between two tags."""
    return {
        "content": ParserState(Reads.CONTENT, {opening: "calls"}),
        **enveloped("calls", closing),
    }


JAMBA = ToolFormat("jamba", one_or_several("<tool_calls>", "</tool_calls>"))
HUNYUAN_A13B = ToolFormat(
    "hunyuan_a13b", one_or_several("<tool_calls>", "</tool_calls>"), ends_reasoning=False
)
NEMOTRON_JSON = ToolFormat("nemotron_json", one_or_several("<TOOLCALL>", "</TOOLCALL>"))
INTERNLM = ToolFormat("internlm", tagged("<|action_start|><|plugin|>", "<|action_end|>"))
LONGCAT = ToolFormat("longcat", tagged("<longcat_tool_call>", "</longcat_tool_call>"))
COHERE = ToolFormat(
    "cohere_command3",
    {
        **listed("<|START_ACTION|>", closing="<|END_ACTION|>"),
        "content": ParserState(
            Reads.CONTENT, {"<|START_ACTION|>": "list", **dict.fromkeys(COHERE_ANSWER, "content")}
        ),
    },
    name_key="tool_name",
    argument_keys=("parameters",),
)
APERTUS = ToolFormat(
    "apertus",
    listed("<|tools_prefix|>", closing="<|tools_suffix|>"),
    names_are_keys=True,
    trims_answer=True,
)
GRANITE_20B = ToolFormat(
    "granite-20b-fc",
    {
        "content": ParserState(Reads.CONTENT, {"<function_call>": "call"}),
        "call": ParserState(Reads.ENVELOPE, {"<function_call>": "call"}, then="content"),
    },
)
GIGACHAT3 = ToolFormat(
    "gigachat3",
    {
        "content": ParserState(
            Reads.CONTENT,
            {
                "<|message_sep|>": "next",
                "<|function_call|>": "call",
                "function call<|role_sep|>": "call",
            },
        ),
        "next": ParserState(
            Reads.BLANK,
            {"<|function_call|>": "call", "function call<|role_sep|>": "call"},
            then="content",
        ),
        "call": ParserState(Reads.ENVELOPE, {"<|message_sep|>": "content"}, then="after"),
        "after": ParserState(Reads.CONTENT, {"<|message_sep|>": "content"}),
    },
    lone_names=False,
)


def xlam_states() -> dict[str, ParserState]:
    """The generic wrappings, and Mistral's, whose bracket may be a list's at the start."""
    states = {**generic_states()}
    content = {**states["content"].delimiters, "[TOOL_CALLS]": "bare"}
    return {
        **states,
        "content": replace(states["content"], delimiters=content),
        "bare item": replace(states["bare item"], delimiters={"TOOL_CALLS]": "bare"}),
    }


XLAM = ToolFormat(
    "xlam",
    xlam_states(),
    start="start",
    other_keys=frozenset({"type", "id"}),
    lone_names=False,
    trims_answer=True,
)
"""Lists of envelopes in whichever of several wrappings."""
PLAMO3 = ToolFormat(
    "plamo3",
    {
        "content": ParserState(Reads.CONTENT, {plamo("begin_tool_requests"): "section"}),
        "section": ParserState(Reads.BLANK, {plamo("begin_tool_request"): "request"}),
        "request": ParserState(Reads.BLANK, {plamo("begin_tool_name"): "name"}),
        "name": ParserState(Reads.HEAD, {plamo("end_tool_name"): "named"}),
        "named": ParserState(
            Reads.CONTENT,
            {PLAMO_ARGUMENTS: "arguments", plamo("end_tool_request"): "empty"},
        ),
        "arguments": ParserState(Reads.JSON, {plamo("end_tool_arguments"): "after"}, then="after"),
        "after": ParserState(
            Reads.CONTENT,
            {
                plamo("end_tool_arguments"): "after",
                plamo("end_tool_request"): "after",
                plamo("begin_tool_request"): "request",
                plamo("end_tool_requests"): "content",
            },
        ),
        "empty": ParserState(
            Reads.CONTENT,
            {plamo("begin_tool_request"): "request", plamo("end_tool_requests"): "content"},
            closes=True,
        ),
    },
)
OLMO3 = ToolFormat(
    "olmo3",
    {
        "content": ParserState(Reads.CONTENT, {"<function_calls>": "call"}),
        "call": ParserState(Reads.PYTHON, then="more"),
        "more": ParserState(Reads.LEAD, {"</function_calls>": "content"}, then="call"),
    },
)
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
        "after": ParserState(Reads.CONTENT, {closing: "trimmed", opening: "list"}),
        "trimmed": ParserState(Reads.CONTENT, {opening: "list"}, then="content", trims=True),
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


def said_again(text: str) -> Head | None:
    """Calls without their opening tag, right after those that had one, are an echo of them."""
    return Head() if text.rstrip().endswith(")]") else None


def lfm2_states() -> Mapping[str, ParserState]:
    """The states of LFM2, whose models may write a list again, with the closing tag alone."""
    opening, closing = "<|tool_call_start|>", "<|tool_call_end|>"
    after = {opening: "list", "[": "echo"}
    return {
        **bracketed_pythonic(opening, closing),
        "trimmed": ParserState(Reads.CONTENT, after, then="content", trims=True),
        "echo": ParserState(Reads.HEAD, {closing: "trimmed"}, head=said_again),
    }


LFM2 = ToolFormat("lfm2", lfm2_states())
DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    deepseek_states(ParserState(Reads.HEAD, {"\n```json": "arguments"}, head=deepseek_head)),
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31",
    deepseek_states(ParserState(Reads.HEAD, {"<｜tool▁sep｜>": "arguments"})),
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
            {"<|tool_call_begin|>": "name", **KIMI_ENDS},
            head=markup_before_a_call,
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
            {"<|tool_call_end|>": "between", **KIMI_ENDS},
            then="end",
        ),
        "end": ParserState(
            Reads.CONTENT,
            {
                "<|tool_call_end|>": "between",
                "<|tool_call_begin|>": "name",
                **KIMI_ENDS,
            },
        ),
        "between": ParserState(
            Reads.CONTENT,
            {
                "<|tool_call_begin|>": "name",
                "<|tool_calls_section_begin|>": "section",
                **KIMI_ENDS,
            },
        ),
    },
    call_id=counted_call_id,
)


TOOL_FORMATS = (
    HERMES, ERNIE45, LLAMA_JSON, GRANITE, GRANITE_20B, JAMBA, HUNYUAN_A13B, NEMOTRON_JSON,
    INTERNLM, LONGCAT, COHERE, APERTUS, GIGACHAT3, XLAM, PHI4_MINI, MISTRAL, PLAMO3, PYTHONIC,
    LLAMA4_PYTHONIC, LFM2, OLMO3, DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2,
)  # fmt: skip
