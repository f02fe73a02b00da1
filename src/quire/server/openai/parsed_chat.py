"""Chat with output parsing: where tools are given, or the server has a tool or reasoning parser.

Applies a request's tools to its prompt and parameters, and opens the parsers of its answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from quire.errors import InvalidParameter
from quire.params import SamplingParams
from quire.params.structured import StructuredOutputsParams
from quire.server.context import Prompt, Server
from quire.server.openai.legacy_functions import is_legacy, tools_and_choice
from quire.server.openai.parsed_answer import ParsedAnswer
from quire.server.openai.requests import ChatRequest
from quire.server.output_parsing import NO_TOOLS, ToolUse, answer_or_calls, decide_tool_use


@dataclass(frozen=True, slots=True)
class ChatPrompt(Prompt):
    """A conversation's prompt. `tools`: how it uses tools; `place`: the state of the parser in
    which its outputs begin, None for outputs that need no parser.
    """

    tools: ToolUse = NO_TOOLS
    place: str | None = None


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


def adapt_params(server: Server, params: SamplingParams, tools: ToolUse, place: str) -> None:
    """Have the engine produce what the parser reads: the special tokens among its delimiters, and
    forced calls as structured output.

    Raises InvalidParameter where the answer cannot be constrained as asked.
    """
    special = server.need_tokenizer().all_special_tokens
    reads_calls = tools.tools is not None and not tools.forced
    if server.chat.parser_plan.needs_special_tokens(special, reads_calls=reads_calls):
        params.skip_special_tokens = False
    params.structured_outputs = _constraint(server, params.structured_outputs, tools, place)


def _constraint(
    server: Server, asked: StructuredOutputsParams | None, tools: ToolUse, place: str
) -> StructuredOutputsParams | None:
    """Return the structured output for forced calls, else the requested one (`asked`), which calls
    by choice are exempt from. It begins after the reasoning, unless a grammar describes the
    reasoning too.
    """
    plan = server.chat.parser_plan
    if tools.grammar is not None:
        if place != plan.place(""):
            allowed = "a message that is continued cannot become a call"
            raise InvalidParameter("continue_final_message", True, allowed)
        return StructuredOutputsParams(grammar=tools.grammar)
    if tools.schema is not None:
        asked = StructuredOutputsParams(json=dict(tools.schema))
    elif tools.input_grammar is not None:
        asked = StructuredOutputsParams(grammar=tools.input_grammar)
    elif asked is not None and tools.tools is not None:
        asked = _or_calls(server, asked, tools.tools)
    delimiter = plan.answer_delimiter(place)
    if asked is None or delimiter is None or asked.starts_after is not None:
        return asked
    return replace(asked, starts_after=delimiter)


def _or_calls(
    server: Server, asked: StructuredOutputsParams, tools: Sequence[Mapping[str, Any]]
) -> StructuredOutputsParams:
    """Return the structured output of an answer in the requested JSON, or of calls. Other requested
    outputs, and formats whose grammar begins after the calls anyway, stay as they are.
    """
    own = server.chat.parser_plan.tool_format
    is_plain = asked.whitespace_pattern is None and not asked.disable_additional_properties
    if asked.kind not in ("json", "json_object") or not is_plain or own is None:
        return asked
    if own.has_reasoning:
        return asked
    schema = {"type": "object"} if asked.json is None else asked.json
    schema = msgspec.json.decode(schema) if isinstance(schema, str) else schema
    tag = answer_or_calls(schema, own, tools, server.need_tokenizer().control_tokens)
    return asked if tag is None else replace(asked, json=None, json_object=None, structural_tag=tag)


def open_answers(
    server: Server, body: ChatRequest, prompt: ChatPrompt, role: str
) -> Sequence[ParsedAnswer]:
    """Make a parser for each answer to `prompt`."""
    plan, use = server.chat.parser_plan, prompt.tools
    return [
        ParsedAnswer(
            role,
            plan.open(
                prompt.place,
                tools=use.tools,
                forced=use.forced,
                writes_input=use.writes_input,
                max_calls=use.max_calls,
            ),
            use,
            shows_reasoning=body.include_reasoning is not False,
            is_legacy=is_legacy(body),
        )
        for _ in range(body.n or 1)
    ]
