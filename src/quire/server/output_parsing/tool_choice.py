"""What the tools of a request mean for its prompt, for its structured output and for the parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter, NotBuiltYet
from quire.server.output_parsing.parser_plan import ParserPlan
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS

MAX_TOOLS = 512
CHOICES = "it must be none, auto, required or one function of the tools by its name"
NO_PARAMETERS = {"type": "object", "properties": {}}
DATA_KEYS = frozenset({"const", "default", "enum", "examples"})
"""Keys of a schema whose values are data, not schemas."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What was decided for one request.

    `tools`: what the parser of its outputs is given; None: calls are not read. `in_prompt`: what
    the chat template is given. `forced` and `parallel`: see `ParserPlan.open`. `is_named`: one
    tool was chosen by its name. `schema`: the JSON schema that the answer must follow; `grammar`:
    the grammar in Lark's notation that the whole output must follow. None of both: it is free.
    """

    tools: tuple[Mapping[str, Any], ...] | None = None
    in_prompt: tuple[Mapping[str, Any], ...] | None = None
    forced: str | bool = False
    parallel: bool = True
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
    parallel: bool = True,
    hides_unused: bool = False,
) -> ToolUse:
    """What the tools of a request and its `tool_choice` (None: auto if there are tools) ask for.

    Required and named calls are made by a grammar, so that they need no format; `auto` leaves the
    model free and reads what it writes in the format of `plan`. `hides_unused`: with "none" the
    prompt does not show the tools. Raises InvalidParameter for tools that are not as they should
    be, a choice that they do not offer, or one that this server's formats cannot serve.
    """
    if not tools:
        if tool_choice not in (None, "none"):
            raise InvalidParameter("tool_choice", tool_choice, "it goes with tools only")
        return NO_TOOLS
    checked = check_tools(tools)
    choice = tool_choice or "auto"
    if choice == "none":
        return ToolUse(in_prompt=None if hides_unused else checked)
    if choice == "auto":
        _need_format(plan)
        return ToolUse(checked, checked, parallel=parallel)
    chosen = checked if choice == "required" else (_chosen(checked, choice),)
    return _forced(checked, chosen, choice, plan, parallel)


def _forced(
    tools: tuple[Mapping[str, Any], ...],
    chosen: tuple[Mapping[str, Any], ...],
    choice: Any,
    plan: ParserPlan,
    parallel: bool,
) -> ToolUse:
    is_named = choice != "required"
    if plan.tool_format is not None and plan.tool_format.forced_grammar is not None:
        functions = [{"name": _name(tool), "parameters": _parameters(tool)} for tool in chosen]
        grammar = plan.tool_format.forced_grammar(functions)
        return ToolUse(tools, tools, parallel=parallel, is_named=is_named, grammar=grammar)
    if plan.writes_forced_calls_itself:
        hint = "Start the server with --tool-call-parser openai."
        raise NotBuiltYet("tool_choice", choice, hint)
    if is_named:
        [tool] = chosen
        return ToolUse(tools, tools, _name(tool), parallel, True, _parameters(tool))
    return ToolUse(tools, tools, True, parallel, False, required_schema(chosen, parallel))


def check_tools(tools: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """The tools, if each is a function with a name of its own and a schema of an object.

    Raises InvalidParameter that names the tool and what is wrong with it.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", len(tools), f"there may be at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        _check_tool(f"tools[{index}]", tool)
    names = _names(tools)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InvalidParameter("tools", repeated[0], "each tool must have a name of its own")
    return tuple(tools)


def _check_tool(place: str, tool: Any) -> None:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        hint = "Other tools than functions are for the caller to run."
        raise InvalidParameter(f"{place}.type", kind, 'it must be "function"', hint)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter(f"{place}.function", function, "it must be an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_HEAD_CHARS:
        allowed = f"it must be a text of 1 to {MAX_HEAD_CHARS} characters"
        raise InvalidParameter(f"{place}.function.name", name, allowed)
    schema = function.get("parameters")
    if schema is not None and not (
        isinstance(schema, Mapping) and schema.get("type", "object") == "object"
    ):
        allowed = 'it must be a JSON schema of type "object"'
        raise InvalidParameter(f"{place}.function.parameters", schema, allowed)


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name


def _names(tools: Sequence[Any]) -> list[str]:
    return [_name(tool) for tool in tools]


def _chosen(tools: Sequence[Mapping[str, Any]], choice: Any) -> Mapping[str, Any]:
    name = _chosen_name(choice)
    for tool in tools:
        if _name(tool) == name:
            return tool
    raise InvalidParameter("tool_choice", name, f"the tools are {', '.join(_names(tools))}")


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


def required_schema(tools: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """The schema of a list of `{"name": ..., "parameters": ...}`, at least one, of these tools."""
    call = call_schema(tools, "parameters")
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": call["anyOf"]},
            "$defs": call["$defs"]}  # fmt: skip


def call_schema(tools: Sequence[Mapping[str, Any]], arguments: str) -> dict[str, Any]:
    """The schema of `{"name": ..., arguments: ...}` for one of these tools.

    Each tool's schema keeps its own references: it is moved below "$defs" as a whole.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": _name(tool)},
                arguments: {"$ref": f"#/$defs/{index}"},
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    moved = {
        str(index): _moved(_parameters(tool), f"#/$defs/{index}")
        for index, tool in enumerate(tools)
    }
    return {"anyOf": calls, "$defs": moved}


def _parameters(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a tool's arguments, which are an object even where it does not say so."""
    return {"type": "object", **(tool["function"].get("parameters") or NO_PARAMETERS)}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references into itself work when it stands at `place` of another."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _moved_value(key, value, place) for key, value in schema.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value.removeprefix("#").rstrip("/")
    return value if key in DATA_KEYS else _moved(value, place)
