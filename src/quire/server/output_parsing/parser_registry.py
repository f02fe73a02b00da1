"""The formats by the names that `--tool-call-parser` and `--reasoning-parser` take, and which of
them a model writes, by its chat template: it shows the model the very delimiters to use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from quire.errors import InvalidParameter, NotBuiltYet, RequestError
from quire.plugins import NameTable, References
from quire.server.output_parsing.formats.generic import GENERIC
from quire.server.output_parsing.parser_plan import ParserPlan
from quire.server.output_parsing.state_table import ReasoningFormat, ToolFormat
from quire.text.chat_template import ChatTemplate

AUTO = "auto"
"""The name that selects the format by the chat template."""
NONE = "none"
"""The name that selects no format."""

# The first row whose texts all occur in the template counts, so the special come before the usual.
TOOL_PARSERS_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|content_invoke_tool_json|>",), "inkling"),
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<|channel|>", "<|message|>", "functions."), "openai"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("｜DSML｜", " calls>"), "deepseek_v41"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|open|>", "argument"), "kimi_k3"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<steptml:invoke",), "step3"),
    (("<dots_function_call>",), "dots"),
    (("<ifm|tool_calls>",), "k2_horizon"),
    (("<tool_sep", "<arg_key"), "hy_v3"),
    (("<tool_calls", "<arg_key"), "hy_v4"),
    (("<arg_key>", "<tool_call>"), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<function name=", "<param name="), "minicpm5"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<|plamo:begin_tool_request",), "plamo3"),
    (("<|role_sep|>", "function"), "gigachat3"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<longcat_tool_call>",), "longcat"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<tool_calls>",), "jamba"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<function_calls>",), "olmo3"),
    (("<function_call>",), "granite-20b-fc"),
    (("<|start_header_id|>", '"parameters": '), "llama3_json"),
    (("<|tool|>",), "phi4_mini_json"),
)
REASONING_PARSERS_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|content_thinking|>",), "inkling"),
    (("to=self<|message|>",), "muse_glimmer"),
    (("<|channel|>", "<|message|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process",), "granite"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<|open|>", "think"), "kimi_k3"),
    (("<ifm|think",), "k2_horizon"),
    (("<|plamo:begin_think",), "plamo3"),
    (("<|channel>thought",), "gemma4"),
    (("<mm:think>",), "minimax_m3"),
    (("<answer>", "</think>"), "hunyuan_a13b"),
    (("<tool_calls", "<arg_key", "<think"), "hy_v3"),
    (("</think>",), "qwen3"),
)
TOOL_ALIASES = {
    "qwen": "hermes",
    "qwen3_json": "hermes",
    "granite4": "hermes",
    "llama4_json": "llama3_json",
    "qwen3_xml": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "glm47": "glm45",
    "ling3": "glm45",
    "poolside_v1": "glm45",
    "cohere_command4": "cohere_command3",
}
REASONING_ALIASES = {
    "deepseek_v3": "qwen3",
    "deepseek_v4": "qwen3",
    "deepseek_v41": "qwen3",
    "ling3": "qwen3",
    "minicpmv": "qwen3",
    "poolside_v1": "qwen3",
    "holo2": "deepseek_r1",
    "hy_v4": "hy_v3",
    "cohere_command4": "cohere_command3",
    "glm45": "qwen3",
    "glm47": "qwen3",
    "mimo": "qwen3",
    "nemotron_v3": "qwen3",
    "minimax_m2": "deepseek_r1",
    "olmo3": "deepseek_r1",
    "step3": "deepseek_r1",
    "step3p5": "deepseek_r1",
}
REFUSED = {
    "hf": "It reads outputs by a response_template of the tokenizer. Give the name of the format "
    "that the template describes, or auto.",
}
"""Names of formats that are not served, each with what to do."""

T = TypeVar("T", ToolFormat, ReasoningFormat)


class _Formats(References):
    """Formats by name, from the modules of formats/: the tables of one are made when one of its
    formats is looked up, which for all of them takes 15 ms.
    """

    def __init__(
        self, names_by_place: Mapping[str, tuple[str, ...]], other_names: Mapping[str, str]
    ) -> None:
        folder = "quire.server.output_parsing.formats"
        places = {
            name: f"{folder}.{place}" for place, names in names_by_place.items() for name in names
        }
        super().__init__(places | {name: places[own] for name, own in other_names.items()})
        self._own_names = other_names

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        formats = found if isinstance(found, tuple) else (found,)
        own = self._own_names.get(name, name)
        return next(made for made in formats if made.name == own)


_TOOL_FORMATS = {
    "tool_formats:TOOL_FORMATS": (
        *("hermes", "ernie45", "llama3_json", "granite", "granite-20b-fc", "jamba"),
        *("hunyuan_a13b", "nemotron_json", "internlm", "longcat", "cohere_command3", "apertus"),
        *("gigachat3", "xlam", "phi4_mini_json", "mistral", "plamo3", "pythonic"),
        *("llama4_pythonic", "lfm2", "olmo3", "deepseek_v3", "deepseek_v31", "kimi_k2"),
    ),
    "parameter_formats:PARAMETER_FORMATS": (
        *("qwen3_coder", "mimo", "seed_oss", "minimax_m2", "minicpm5", "dots", "deepseek_v32"),
        *("deepseek_v4", "deepseek_v41", "step3", "glm45", "k2_horizon", "hy_v3", "hy_v4"),
        *("kimi_k3", "minimax_m3", "gemma4", "functiongemma"),
    ),
    "harmony:HARMONY": ("openai",),
    "message_formats:MESSAGE_FORMATS": ("muse_glimmer", "inkling"),
    "generic:GENERIC": ("generic",),
}
_REASONING_FORMATS = {
    "reasoning_formats:REASONING_FORMATS": (
        *("qwen3", "deepseek_r1", "minimax_m2_append_think", "granite_thinking_parser", "mistral"),
        *("seed_oss", "granite", "ernie45", "hunyuan_a13b", "cohere_command3", "kimi_k2"),
        *("kimi_k3", "k2_horizon", "gemma4", "minimax_m3", "plamo3", "hy_v3"),
    ),
    "harmony:HARMONY_REASONING": ("openai_gptoss",),
    "message_formats:MESSAGE_REASONINGS": ("muse_glimmer", "inkling"),
}


def _check(kind: type) -> Callable[[object], None]:
    """A check that raises TypeError for another value than a format of this kind."""

    def check(value: object) -> None:
        if not isinstance(value, kind):
            raise TypeError(
                f"A parser is a table of states, a {kind.__name__} (quire.server.output_parsing), "
                f"and {value!r} is not: classes that parse by themselves have no counterpart here."
            )

    return check


TOOL_PARSERS: NameTable[ToolFormat] = NameTable(
    "tool parser",
    _Formats(_TOOL_FORMATS, TOOL_ALIASES),
    reserved={AUTO, NONE},
    check=_check(ToolFormat),
)
REASONING_PARSERS: NameTable[ReasoningFormat] = NameTable(
    "reasoning parser",
    _Formats(_REASONING_FORMATS, REASONING_ALIASES),
    reserved={AUTO, NONE},
    check=_check(ReasoningFormat),
)


def plan_parsers(
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
    template: str | None = None,
) -> ParserPlan:
    """The plan of a server with these parsers; None: none. `template`: the chat template, where a
    format's marks are the checkpoint's own.

    Raises InvalidParameter for a name that does not exist, with those that do, or for two formats
    that do not go together; NotBuiltYet for a name that is known and not served.
    """
    tools = _find("tool_call_parser", tool_parser, TOOL_PARSERS, template)
    reasoning = _find("reasoning_parser", reasoning_parser, REASONING_PARSERS, template)
    try:
        return ParserPlan(tools, reasoning)
    except ValueError as error:
        raise InvalidParameter("reasoning_parser", reasoning_parser, str(error)) from error


def choose_parsers(
    tool_parser: str | None, reasoning_parser: str | None, template: str | None
) -> ParserPlan:
    """The plan of a server whose operator says AUTO, NONE or a name for each, and whose model has
    this chat template. Raises InvalidParameter as `plan_parsers` does.
    """
    reasoning = detect_reasoning_parser(template) if reasoning_parser == AUTO else reasoning_parser
    reasoning = None if reasoning == NONE else reasoning
    tools = _tool_parser_for(template, reasoning) if tool_parser == AUTO else tool_parser
    return plan_parsers(None if tools == NONE else tools, reasoning, template)


def _tool_parser_for(template: str | None, reasoning: str | None) -> str | None:
    """The model's own format if the template shows tools to the model, else the generic one, else
    (for outputs that the reasoning format describes as a whole) none.
    """
    found = detect_tool_parser(template)
    if found is not None and _shows_tools(template or ""):
        return found
    described = REASONING_PARSERS.get(reasoning or "")
    # a table of whole outputs goes with the tool format of the same table only
    if described is not None and described.table is not None:
        return found
    return GENERIC.name


def _shows_tools(template: str) -> bool:
    try:
        return ChatTemplate(template).knows_tools
    except RequestError:  # requests that it is rendered for are refused with this error
        return True


def _find(
    parameter: str,
    name: str | None,
    formats: Mapping[str, T],
    template: str | None,
) -> T | None:
    if name is None:
        return None
    # a plugin may have registered a format under a refused name
    if name in REFUSED and name not in formats:
        raise NotBuiltYet(parameter, name, REFUSED[name])
    if name not in formats:
        allowed = f"it must be {AUTO}, {NONE} or one of {', '.join(sorted(formats))}"
        raise InvalidParameter(parameter, name, allowed)
    found = formats[name]
    return found if found.for_template is None else found.for_template(template or "")


def detect_tool_parser(template: str | None) -> str | None:
    """The name of the format of tool calls whose delimiters are in a chat template, or None."""
    return _first(TOOL_PARSERS_BY_TEXT, template or "")


def detect_reasoning_parser(template: str | None) -> str | None:
    """The name of the format of reasoning whose delimiters are in a chat template, or None.

    A template that opens the reasoning in its prompt needs no other format than one that does not:
    where an output begins is read from its prompt.
    """
    return _first(REASONING_PARSERS_BY_TEXT, template or "")


def _first(rows: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str | None:
    return next((name for texts, name in rows if all(text in template for text in texts)), None)
