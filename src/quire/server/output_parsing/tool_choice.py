"""Effects of a request's tools on its prompt, its structured output and the parser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import InvalidParameter, NotBuiltYet
from quire.server.output_parsing.call_schemas import parameters_of, required_schema
from quire.server.output_parsing.parser_plan import ParserPlan
from quire.server.output_parsing.requested_tools import Tool, check_tools, name_of, names_of

ALLOWED_TOOLS = "allowed_tools"
_DEFINITIONS = "#/$defs/"
CHOICES = (
    "it must be none, auto, required or one function of the tools by its name, or allowed_tools"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Decisions about the tools of one request.

    `tools`: what the parser of its outputs is given; None: calls are not read. `in_prompt`: what
    the chat template is given. `forced`, `writes_input` and `max_calls`: see `ParserPlan.open`.
    `is_named`: one tool was chosen by its name. `schema`: the JSON schema that the answer must
    follow; `input_grammar`: the grammar in Lark's notation that it must follow; `calls`: the
    formats, as structural tags have them, one of which the output must end with. None of them: it
    is free. `chosen`: the tools that are forced, by their places in the request. `custom`: the
    names of the tools whose argument is a text.
    """

    tools: tuple[Tool, ...] | None = None
    in_prompt: tuple[Tool, ...] | None = None
    forced: str | bool = False
    max_calls: int | None = None
    is_named: bool = False
    schema: Mapping[str, Any] | None = None
    input_grammar: str | None = None
    calls: Sequence[Mapping[str, Any]] | None = None
    chosen: tuple[tuple[int, Tool], ...] = ()
    custom: frozenset[str] = field(default_factory=frozenset)

    @property
    def is_forced(self) -> bool:
        return self.forced is not False or self.calls is not None

    @property
    def is_strict(self) -> bool:
        """Whether a tool that is forced is to be followed strictly."""
        return any(tool["function"].get("strict") is True for _, tool in self.chosen)

    def field_of(self, place: int, tool: Tool) -> str:
        """The field of the request with the schema of a tool, or with what it was made from."""
        rest = "custom.format" if name_of(tool) in self.custom else "function.parameters"
        return f"tools[{place}].{rest}"

    def field_at(self, pointer: str) -> str | None:
        """Field that a place in the schema of forced calls was made from; None: none is forced."""
        if not self.chosen:
            return None
        if len(self.chosen) == 1 and not pointer.startswith(_DEFINITIONS):
            return self.field_of(*self.chosen[0]) + pointer
        index, _, rest = pointer.removeprefix(_DEFINITIONS).partition("/")
        if not pointer.startswith(_DEFINITIONS) or not index.isdecimal():
            return f"tools{pointer}"
        return f"{self.field_of(*self.chosen[int(index)])}#/{rest}"

    @property
    def writes_input(self) -> bool:
        """Whether the answer is the input of a custom tool and nothing else."""
        return self.input_grammar is not None


NO_TOOLS = ToolUse()


def decide_tool_use(
    tools: Sequence[Any] | None,
    tool_choice: Any,
    plan: ParserPlan,
    *,
    max_calls: int | None = None,
    hides_unused: bool = False,
) -> ToolUse:
    """Decides about the tools of a request and its `tool_choice` (None: auto if there are tools).

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
    requested = check_tools(tools)
    functions = requested.functions
    if isinstance(choice, Mapping) and choice.get("type") == ALLOWED_TOOLS:
        functions, choice = _allowed(functions, choice)
    if choice == "none":
        return ToolUse(in_prompt=None if hides_unused else functions)
    custom = frozenset(requested.inputs).intersection(names_of(functions))
    use = ToolUse(functions, functions, max_calls=max_calls, custom=custom)
    if choice == "auto":
        _need_format(plan)
        return use
    chosen = functions if choice == "required" else (_chosen(functions, choice),)
    return _forced(use, requested.functions, chosen, choice, plan, requested.grammars)


def _forced(
    use: ToolUse,
    functions: tuple[Tool, ...],
    chosen: tuple[Tool, ...],
    choice: Any,
    plan: ParserPlan,
    grammars: Mapping[str, str],
) -> ToolUse:
    """The use with a call of one of the tools `chosen` of all `functions`; `grammars`: those of
    custom tools' inputs that only a grammar of the answer can enforce.
    """
    places = tuple((index, tool) for index, tool in enumerate(functions) if tool in chosen)
    use = replace(use, is_named=choice != "required", chosen=places)
    own_calls = None if plan.tool_format is None else plan.tool_format.forced_calls
    # a bare JSON list is not a message of such a format
    if plan.writes_forced_calls_itself and own_calls is None:
        names = "openai (gpt-oss), inkling and muse_glimmer"
        hint = f"Choose auto; --tool-call-parser {names} take it."
        raise NotBuiltYet("tool_choice", choice, hint)
    name = name_of(chosen[0])
    # a JSON schema cannot say a grammar, so the whole answer is the input
    if len(chosen) == 1 and name in grammars and own_calls is None:
        return replace(use, forced=name, input_grammar=grammars[name])
    if unenforced := [each for each in names_of(chosen) if each in grammars]:
        hint = f"Choose {unenforced[0]} by its name, or leave its grammar out."
        raise NotBuiltYet("tool_choice", f"{choice} with a grammar in Lark's notation", hint)
    if own_calls is not None:
        named = [{"name": name_of(tool), "parameters": parameters_of(tool)} for tool in chosen]
        return replace(use, calls=own_calls(named))
    if use.is_named:
        return replace(use, forced=name, schema=parameters_of(chosen[0]))
    return replace(use, forced=True, schema=required_schema(chosen, use.max_calls))


def _allowed(tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> tuple[tuple[Tool, ...], str]:
    """The tools of `{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}`, or
    flat as in Responses, and its mode. The model is shown no others.
    """
    given = choice.get(ALLOWED_TOOLS, choice)
    given = given if isinstance(given, Mapping) else {}
    mode, chosen = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required") or not isinstance(chosen, list) or not chosen:
        allowed = "allowed_tools needs a mode, auto or required, and tools by their names"
        raise InvalidParameter("tool_choice", choice, allowed)
    names = {name_of(_chosen(tools, each)) for each in chosen}
    return tuple(tool for tool in tools if name_of(tool) in names), mode


def _chosen(tools: Sequence[Tool], choice: Any) -> Tool:
    name = _chosen_name(choice)
    for tool in tools:
        if name_of(tool) == name:
            return tool
    raise InvalidParameter("tool_choice", name, f"the tools are {', '.join(names_of(tools))}")


def _chosen_name(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name": ...}}` (or "custom"; a function needs
    no type), or flat as in Responses.
    """
    given = choice if isinstance(choice, Mapping) else {}
    kind = given.get("type", "function" if "function" in given else None)
    if kind in ("function", "custom"):
        described = choice.get(kind, choice)
        name = described.get("name") if isinstance(described, Mapping) else None
        if isinstance(name, str):
            return name
    raise InvalidParameter("tool_choice", choice, CHOICES)


def _need_format(plan: ParserPlan) -> None:
    if plan.tool_format is None:
        allowed = "this server reads no tool calls in outputs"
        hint = (
            "Start the server with --tool-call-parser auto or the name of a format, "
            'or use "required", "none" or a name.'
        )
        raise InvalidParameter("tool_choice", "auto", allowed, hint)
