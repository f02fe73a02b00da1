"""A transcript with what it means, and the tools that all of them have."""

from __future__ import annotations

from dataclasses import dataclass, field

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"enum": ["C", "F"]},
                    "exact": {"type": "boolean"},
                    "spots": {"type": "array", "items": {"type": "string"}},
                    "where": {"$ref": "#/$defs/place"},
                    "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                },
                "$defs": {"place": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True)
class Golden:
    """`output` after a prompt that ends with `prompt`, and what it says; calls are (name,
    arguments).
    """

    name: str
    output: str
    tools: str | None = None
    reasoning: str | None = None
    prompt: str = ""
    thought: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, str], ...] = field(default=())


BONN = ("weather", '{"city": "Bonn"}')
WHOLE_OUTPUTS = {"openai": "openai_gptoss", "muse_glimmer": "muse_glimmer", "inkling": "inkling"}
"""The reasoning formats of the tool formats that describe whole outputs."""
