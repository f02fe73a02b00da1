"""Chat with output parsing: where tools are given, or the server has a tool or reasoning parser.

Applies a request's tools to its prompt and parameters, and opens the parsers of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import InvalidParameter
from quire.params import SamplingParams
from quire.params.structured import StructuredOutputsParams
from quire.server.context import Prompt, Server
from quire.server.openai.legacy_functions import is_legacy, tools_and_choice
from quire.server.openai.parsed_answer import ParsedAnswer
from quire.server.openai.requests import ChatRequest
from quire.server.output_parsing import (
    NO_TOOLS,
    ToolUse,
    answer_or_calls,
    as_tag,
    decide_tool_use,
    form_at,
    format_of,
    parameters_of,
)

FILLS_ANSWER = "force_nonempty_content"
"""Variable of templates (Nemotron's, Granite's): reasoning without an answer is the answer."""


@dataclass(frozen=True, slots=True)
class ChatPrompt(Prompt):
    """A conversation's prompt. `tools`: how it uses tools; `place`: the state of the parser in
    which its outputs begin, None for outputs that need no parser.
    """

    tools: ToolUse = NO_TOOLS
    place: str | None = None

    def form_parts(self) -> Sequence[tuple[str, StructuredOutputsParams]]:
        """See `Prompt`: the schemas of the tools that are forced."""
        use = self.tools
        if use.input_grammar is not None:
            return [
                (use.field_of(*use.chosen[0]), StructuredOutputsParams(grammar=use.input_grammar))
            ]
        return [
            (use.field_of(place, tool), StructuredOutputsParams(json=dict(parameters_of(tool))))
            for place, tool in use.chosen
        ]

    def field_at(self, pointer: str) -> str:
        """See `Prompt`."""
        return self.tools.field_at(pointer) or Prompt.field_at(self, pointer)


def tool_use(server: Server, body: ChatRequest) -> ToolUse:
    """Return how the request uses its tools. Raises InvalidParameter."""
    tools, choice = tools_and_choice(body)
    makes_one = body.parallel_tool_calls is False or is_legacy(body)
    return decide_tool_use(
        tools,
        choice,
        server.chat.parser_plan,
        max_calls=1 if makes_one else body.max_tool_calls,
        hides_unused=server.chat.hides_tools,
    )


def place_of(server: Server, body: ChatRequest, prompt: str) -> str:
    """The state of the parser in which the outputs of `prompt` begin."""
    last = body.messages[-1].get("content") if body.continue_final_message else None
    return server.chat.parser_plan.place(prompt, last if isinstance(last, str) else "")


def adapt_params(server: Server, params: SamplingParams, tools: ToolUse, place: str) -> str:
    """Have the engine produce what the parser reads: the special tokens among its delimiters, and
    forced calls as structured output. Returns the state of the parser in which outputs begin then.

    Raises InvalidParameter where the answer cannot be constrained as asked.
    """
    plan = server.chat.parser_plan
    special = server.need_tokenizer().all_special_tokens
    reads_calls = tools.tools is not None and not tools.forced
    # a delimiter that is a special token would be missing in the text
    if plan.needs_special_tokens(special, reads_calls=reads_calls):
        params.skip_special_tokens = False
    if tools.calls is not None:
        # such calls have a header of their own, which cannot come in the middle of a message
        if place not in ("start", "reasoning"):
            allowed = "a message that is continued cannot become a call"
            raise InvalidParameter("continue_final_message", True, allowed)
        tag = plan.whole_output(place, tools.calls)
        is_open = False if tools.is_strict else None
        params.structured_outputs = StructuredOutputsParams(
            structural_tag=tag, allow_additional_properties=is_open
        )
        return place
    form = _form(server, params.structured_outputs, tools)
    if form is None:
        return place
    # after the form is known: without one the reasoning may be assumed
    place = plan.place_of_form(place)
    params.structured_outputs = _from_place(server, form, tools, place)
    return place


def _form(
    server: Server, asked: StructuredOutputsParams | None, tools: ToolUse
) -> StructuredOutputsParams | None:
    """Form of the answer: of forced calls, else `asked`, which calls by choice are exempt from."""
    if tools.schema is not None:
        is_open = False if tools.is_strict else None
        return StructuredOutputsParams(json=dict(tools.schema), allow_additional_properties=is_open)
    if tools.input_grammar is not None:
        return StructuredOutputsParams(grammar=tools.input_grammar)
    if asked is not None and tools.tools is not None:
        return _or_calls(server, asked, tools.tools)
    return asked


def _from_place(
    server: Server, form: StructuredOutputsParams, tools: ToolUse, place: str
) -> StructuredOutputsParams:
    """Return the form with what may come before it in an output that begins at `place`."""
    plan, calls = server.chat.parser_plan, []
    if tools.tools is not None and plan.may_begin_a_call:
        calls.append(plan.begun_call(server.need_tokenizer().control_tokens))
    return form_at(plan, form, place, calls)


def _or_calls(
    server: Server, asked: StructuredOutputsParams, tools: Sequence[Mapping[str, Any]]
) -> StructuredOutputsParams:
    """Return the structured output of an answer in the requested JSON, or of calls. Other requested
    outputs, and those of formats that describe whole outputs, stay as they are.
    """
    own = server.chat.parser_plan.tool_format
    if asked.kind not in ("json", "json_object") or own is None or own.has_reasoning:
        return asked
    schema = format_of(asked)["json_schema"]
    tag = answer_or_calls(schema, own, tools, server.need_tokenizer().control_tokens)
    return asked if tag is None else as_tag(asked, tag)


def open_answers(
    server: Server, body: ChatRequest, prompt: ChatPrompt, role: str
) -> Sequence[ParsedAnswer]:
    """Make a parser for each answer to `prompt`."""
    plan, use = server.chat.parser_plan, prompt.tools
    kwargs = {**server.chat.default_kwargs, **(body.chat_template_kwargs or {})}
    return [
        ParsedAnswer(
            role,
            plan.open(
                prompt.place,
                tools=use.tools,
                forced=use.forced,
                writes_input=use.writes_input,
                max_calls=use.max_calls,
                fills_answer=kwargs.get(FILLS_ANSWER) is True,
            ),
            use,
            shows_reasoning=body.include_reasoning is not False,
            is_legacy=is_legacy(body),
        )
        for _ in range(body.n or 1)
    ]
