"""Output parsing: reasoning, answer and tool calls, in one pass as the text arrives.

One parser reads reasoning and tool calls, because where one ends decides where the other begins: a
call may end the reasoning, a header may announce either. A format is data (`state_table.py`), so a
new model needs a table and no code.

Layer 5, pure text: neither torch nor HTTP.
"""

from quire.server.output_parsing.answer_or_calls import answer_or_calls, format_of
from quire.server.output_parsing.call_schemas import check_strict, parameters_of
from quire.server.output_parsing.custom_inputs import CustomInputs
from quire.server.output_parsing.events import (
    ArgumentText,
    CallStarted,
    ContentText,
    Event,
    ParsedOutput,
    ReasoningText,
    ToolCall,
    whole,
)
from quire.server.output_parsing.form_places import FormsAfterReasoning, as_tag, form_at
from quire.server.output_parsing.output_parser import OutputParser
from quire.server.output_parsing.parser_plan import ParserPlan
from quire.server.output_parsing.parser_registry import (
    AUTO,
    NONE,
    REASONING_PARSERS,
    TOOL_PARSERS,
    choose_parsers,
    detect_reasoning_parser,
    detect_tool_parser,
    plan_parsers,
)
from quire.server.output_parsing.state_table import (
    Head,
    ParserState,
    Reads,
    ReasoningFormat,
    ToolFormat,
)
from quire.server.output_parsing.tool_choice import NO_TOOLS, ToolUse, decide_tool_use

__all__ = [
    "AUTO",
    "NONE",
    "NO_TOOLS",
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ArgumentText",
    "CallStarted",
    "ContentText",
    "CustomInputs",
    "Event",
    "FormsAfterReasoning",
    "Head",
    "ParserState",
    "Reads",
    "ReasoningFormat",
    "ReasoningText",
    "ToolCall",
    "ToolFormat",
    "ToolUse",
    "ParsedOutput",
    "ParserPlan",
    "OutputParser",
    "answer_or_calls",
    "as_tag",
    "check_strict",
    "choose_parsers",
    "decide_tool_use",
    "detect_reasoning_parser",
    "detect_tool_parser",
    "form_at",
    "format_of",
    "parameters_of",
    "plan_parsers",
    "whole",
]
