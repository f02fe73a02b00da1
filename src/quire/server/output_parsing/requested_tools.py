"""The tools of a request, checked: functions, and custom tools as functions of one text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter
from quire.server.output_parsing.call_schemas import check_strict
from quire.server.output_parsing.custom_inputs import INPUT
from quire.server.output_parsing.stream_writer import MAX_HEAD_CHARS

MAX_TOOLS = 512
_SYNTAXES = ("lark", "regex")

Tool = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestedTools:
    """The tools of a request.

    `functions`: all of them as function tools, a custom one with its input as its only argument.
    `inputs`: of each custom tool the syntax of its input and its definition; None: any text.
    """

    functions: tuple[Tool, ...]
    inputs: Mapping[str, tuple[str, str] | None]

    @property
    def grammars(self) -> dict[str, str]:
        """Lark grammars of custom tools' inputs, by tool, which the schemas cannot say."""
        given = ((name, form) for name, form in self.inputs.items() if form is not None)
        return {name: definition for name, (syntax, definition) in given if syntax == "lark"}


def check_tools(tools: Sequence[Any]) -> RequestedTools:
    """The tools, if each has a name of its own, and a schema of an object or a form of its input.

    Raises InvalidParameter that names the tool and what is wrong with it.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidParameter("tools", len(tools), f"there may be at most {MAX_TOOLS}")
    functions: list[Tool] = []
    inputs: dict[str, tuple[str, str] | None] = {}
    for index, tool in enumerate(tools):
        place = f"tools[{index}]"
        if isinstance(tool, Mapping) and tool.get("type") == "custom":
            name, form = _check_custom(f"{place}.custom", tool.get("custom"))
            inputs[name] = form
            tool = _as_function(tool["custom"], form)
        else:
            _check_function(place, tool)
        functions.append(tool)
    names = names_of(functions)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InvalidParameter("tools", repeated[0], "each tool must have a name of its own")
    return RequestedTools(tuple(functions), inputs)


def _check_function(place: str, tool: Any) -> None:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        hint = "Other tools are for the caller to run."
        raise InvalidParameter(f"{place}.type", kind, 'it must be "function" or "custom"', hint)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter(f"{place}.function", function, "it must be an object with a name")
    _check_name(f"{place}.function", function)
    schema = function.get("parameters")
    if schema is not None and not (
        isinstance(schema, Mapping) and schema.get("type", "object") == "object"
    ):
        allowed = 'it must be a JSON schema of type "object"'
        raise InvalidParameter(f"{place}.function.parameters", schema, allowed)
    if function.get("strict") is True and schema is not None:
        check_strict(f"{place}.function.parameters", schema)


def _check_name(place: str, described: Mapping[str, Any]) -> str:
    name = described.get("name")
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_HEAD_CHARS:
        allowed = f"it must be a text of 1 to {MAX_HEAD_CHARS} characters"
        raise InvalidParameter(f"{place}.name", name, allowed)
    return name


def _check_custom(place: str, custom: Any) -> tuple[str, tuple[str, str] | None]:
    if not isinstance(custom, Mapping):
        raise InvalidParameter(place, custom, "it must be an object with a name")
    name = _check_name(place, custom)
    form = custom.get("format") or {"type": "text"}
    if isinstance(form, Mapping) and form.get("type") == "text":
        return name, None
    if not isinstance(form, Mapping) or form.get("type") != "grammar":
        raise InvalidParameter(f"{place}.format", form, "its type must be text or grammar")
    # Chat Completions has an object in it, Responses the same fields without one
    grammar = form.get("grammar", form)
    syntax, definition = (
        (grammar.get("syntax"), grammar.get("definition")) if isinstance(grammar, Mapping) else
        (None, None)
    )  # fmt: skip
    if syntax not in _SYNTAXES or not isinstance(definition, str):
        allowed = "a grammar has a syntax, lark or regex, and a definition"
        raise InvalidParameter(f"{place}.format.grammar", grammar, allowed)
    return name, (syntax, definition)


def _as_function(custom: Mapping[str, Any], form: tuple[str, str] | None) -> Tool:
    schema: dict[str, Any] = {"type": "string"}
    notes = [custom["description"]] if isinstance(custom.get("description"), str) else []
    if form is not None:
        syntax, definition = form
        if syntax == "regex":
            # a group, so that the anchors hold for each alternative of the expression
            schema["pattern"] = f"^(?:{definition})$"
        notation = "regular expression" if syntax == "regex" else "grammar in Lark's notation"
        # the template shows descriptions and schemas, and a model cannot see the grammar otherwise
        notes.append(f"The input must follow this {notation}:\n{definition}")
    parameters = {
        "type": "object",
        "properties": {INPUT: schema},
        "required": [INPUT],
        "additionalProperties": False,
    }
    description = {"description": "\n\n".join(notes)} if notes else {}
    function = {"name": custom["name"], **description, "parameters": parameters}
    return {"type": "function", "function": function}


def name_of(tool: Tool) -> str:
    """The name of a checked tool."""
    name: str = tool["function"]["name"]
    return name


def names_of(tools: Sequence[Tool]) -> list[str]:
    """The names of checked tools."""
    return [name_of(tool) for tool in tools]
