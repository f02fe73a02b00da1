"""Forced calls by the real engine: whatever the model would say, its output is the call."""

import json

import jsonschema
import pytest

ASK = [{"role": "user", "content": "def add(a, b):"}]
PARAMETERS = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/unit"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {
        "type": "function",
        "function": {
            "name": "now",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_the_output_is_the_call(server, choice, stream):
    with server.openai() as client:
        reply = client.chat.completions.create(
            messages=ASK,
            model="",
            tools=TOOLS,
            tool_choice="required" if choice == "required" else NAMED,
            parallel_tool_calls=False,
            max_tokens=120,
            n=2,
            seed=3,
            temperature=1.0,
            stream=stream,
        )
        calls, finish = _streamed(reply) if stream else _whole(reply)
    for index in range(2):
        name, arguments = calls[index]
        if choice == "named":
            assert name == "weather"
        schema = PARAMETERS if name == "weather" else TOOLS[1]["function"]["parameters"]
        jsonschema.validate(json.loads(arguments), schema)
        assert finish[index] == ("tool_calls" if choice == "required" else "stop")


def _whole(reply):
    calls, finish = {}, {}
    for choice in reply.choices:
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        calls[choice.index] = call.function.name, call.function.arguments
        finish[choice.index] = choice.finish_reason
    return calls, finish


def _streamed(reply):
    names, arguments, finish = {}, {0: "", 1: ""}, {}
    for chunk in reply:
        for choice in chunk.choices:
            assert not choice.delta.content
            for call in choice.delta.tool_calls or []:
                names.setdefault(choice.index, call.function.name)
                arguments[choice.index] += call.function.arguments or ""
            finish[choice.index] = choice.finish_reason
    return {index: (names[index], arguments[index]) for index in names}, finish
