"""Which formats a model writes, by its chat template: it shows the model the very delimiters to
use.
"""

from __future__ import annotations

AUTO = "auto"
"""The name that asks for what is found here."""
NONE = "none"
"""The name that asks for no format at all."""

# The first row whose texts all occur in the template counts, so the special come before the usual.
TOOL_PARSERS_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>", "functions."), "openai"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<arg_key>", "<tool_call>"), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<tool_calls>",), "jamba"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>",), "hermes"),
    (("<|start_header_id|>", '"parameters": '), "llama3_json"),
    (("<|tool|>",), "phi4_mini_json"),
)
REASONING_PARSERS_BY_TEXT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "<|message|>", "analysis"), "openai_gptoss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("Here is my thought process",), "granite"),
    (("</think>",), "qwen3"),
)


def detect_tool_parser(template: str | None) -> str | None:
    """The name of the format of tool calls that a chat template speaks of; None: of none known."""
    return _first(TOOL_PARSERS_BY_TEXT, template or "")


def detect_reasoning_parser(template: str | None) -> str | None:
    """The name of the format of reasoning that a chat template speaks of; None: of none known.

    A template that opens the reasoning in its prompt needs no other format than one that does not:
    where an output begins is read from its prompt.
    """
    return _first(REASONING_PARSERS_BY_TEXT, template or "")


def _first(rows: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str | None:
    return next((name for texts, name in rows if all(text in template for text in texts)), None)
