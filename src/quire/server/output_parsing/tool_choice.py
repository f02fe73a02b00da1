"""What the tools of a request mean for its prompt, for its structured output and for the parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, NotBuiltYet
from quire.server.output_parsing.call_schemas import parameters_of, required_schema
from quire.server.output_parsing.parser_plan import ParserPlan
from quire.server.output_parsing.requested_tools import check_tools, name_of, names_of

ALLOWED_TOOLS = "allowed_tools"
CHOICES = (
    "it must be none, auto, required or one function of the tools by its name, or allowed_tools"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What was decided for one request.

    `tools`: what the parser of its outputs is given; None: calls are not read. `in_prompt`: what
    the chat template is given. `forced` and `max_calls`: see `ParserPlan.open`. `is_named`: one
    tool was chosen by its name. `schema`: the JSON schema that the answer must follow; `grammar`:
    the grammar in Lark's notation that the whole output must follow. None of both: it is free.
    """

    tools: tuple[Mapping[str, Any], ...] | None = None
    in_prompt: tuple[Mapping[str, Any], ...] | None = None
    forced: str | bool = False
    max_calls: int | None = None
    is_named: bool = False
    schema: Mapping[str, Any] | None = None
    grammar: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the output is made a call."""
        return self.schema is not None or self.grammar is not None


NO_TOOLS = ToolUse()
"""The `ToolUse` of a request without tools."""


def decide_tool_use(
    tools: Sequence[Any] | None,
    tool_choice: Any,
    plan: ParserPlan,
    *,
    max_calls: int | None = None,
    hides_unused: bool = False,
) -> ToolUse:
    """What the tools of a request and its `tool_choice` (None: auto if there are tools) ask for.

    Required and named calls are made by a grammar, so that they need no format; `auto` leaves the
    model free and reads what it writes in the format of `plan`. There are at most `max_calls`.
    `hides_unused`: with "none" the prompt does not show the tools. Raises InvalidParameter for
    tools that are not as they should be, a choice that they do not offer, or one that this server's
    formats cannot serve.
    """
    choice = "auto" if tool_choice is None else tool_choice
    if not tools:
        if choice not in ("none", "auto"):
            raise InvalidParameter("tool_choice", choice, "it goes with tools only")
        return NO_TOOLS
    checked = check_tools(tools)
    if isinstance(choice, Mapping) and choice.get("type") == ALLOWED_TOOLS:
        checked, choice = _allowed(checked, choice)
    if choice == "none":
        return ToolUse(in_prompt=None if hides_unused else checked)
    if choice == "auto":
        _need_format(plan)
        return ToolUse(checked, checked, max_calls=max_calls)
    chosen = checked if choice == "required" else (_chosen(checked, choice),)
    return _forced(checked, chosen, choice, plan, max_calls)


def _forced(
    tools: tuple[Mapping[str, Any], ...],
    chosen: tuple[Mapping[str, Any], ...],
    choice: Any,
    plan: ParserPlan,
    max_calls: int | None,
) -> ToolUse:
    is_named = choice != "required"
    if plan.tool_format is not None and plan.tool_format.forced_grammar is not None:
        functions = [{"name": name_of(tool), "parameters": parameters_of(tool)} for tool in chosen]
        grammar = plan.tool_format.forced_grammar(functions)
        return ToolUse(tools, tools, max_calls=max_calls, is_named=is_named, grammar=grammar)
    if plan.writes_forced_calls_itself:
        hint = "Start the server with --tool-call-parser openai."
        raise NotBuiltYet("tool_choice", choice, hint)
    if is_named:
        [tool] = chosen
        return ToolUse(tools, tools, name_of(tool), max_calls, True, parameters_of(tool))
    return ToolUse(tools, tools, True, max_calls, False, required_schema(chosen, max_calls))


def _allowed(
    tools: tuple[Mapping[str, Any], ...], choice: Mapping[str, Any]
) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """The tools of `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`, or
    flat as in Responses, and its mode. The model is shown no others.
    """
    given = choice.get(ALLOWED_TOOLS, choice)
    mode, chosen = (given.get(key) for key in ("mode", "tools")) if isinstance(
        given, Mapping) else (None, None)  # fmt: skip
    if mode not in ("auto", "required") or not isinstance(chosen, list) or not chosen:
        allowed = "allowed_tools needs a mode, auto or required, and tools by their names"
        raise InvalidParameter("tool_choice", choice, allowed)
    names = {name_of(_chosen(tools, each)) for each in chosen}
    return tuple(tool for tool in tools if name_of(tool) in names), mode


def _chosen(tools: Sequence[Mapping[str, Any]], choice: Any) -> Mapping[str, Any]:
    name = _chosen_name(choice)
    for tool in tools:
        if name_of(tool) == name:
            return tool
    raise InvalidParameter("tool_choice", name, f"the tools are {', '.join(names_of(tools))}")


def _need_format(plan: ParserPlan) -> None:
    if plan.tool_format is None:
        allowed = "this server reads no tool calls in outputs"
        hint = (
            "Start the server with --tool-call-parser auto or the name of a format, "
            'or use "required", "none" or a name.'
        )
        raise InvalidParameter("tool_choice", "auto", allowed, hint)


def _chosen_name(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}`, or flat as in Responses."""
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return name
    raise InvalidParameter("tool_choice", choice, CHOICES)
