"""Tools with a model whose chat template knows none: the first calls of an agent, by the real
clients, against the embedded model and against a model that follows a script.
"""

import json

import anthropic
import pytest

from quire.server.output_parsing import plan_parsers
from quire.text.chat_tools import CALL, describe_tools
from tests.server.openai.test_tools import ask, gathered, said, without_ids
from tests.server.scripted_server import scripted

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Ulm"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ASK = {"role": "user", "content": "How is it in Bonn?"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call-1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call-1", "content": "Rain."}

each_choice = pytest.mark.parametrize("choice", ["auto", "required", "named"])
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def script():
    with scripted(plan_parsers("generic", "qwen3")) as running:
        yield running


def check_call(choice, calls):
    """Forced, there is one call as its schema says; free, the embedded model hardly makes one."""
    if choice != "auto":
        [(name, arguments)] = calls
        assert name == "weather" and json.loads(arguments)["city"] in ("Bonn", "Ulm")


@each_way
@each_choice
def test_chat_with_the_embedded_model(server, choice, stream):
    options = {
        "model": "", "tools": [WEATHER], "tool_choice": NAMED if choice == "named" else choice,
        "parallel_tool_calls": False, "max_tokens": 60, "temperature": 0, "stream": stream,
    }  # fmt: skip
    with server.openai() as client:
        for messages in ([ASK], [ASK, CALLED, RESULT]):
            reply = client.chat.completions.create(messages=messages, **options)
            found = gathered(reply) if stream else said(reply)
            check_call(choice, [call[1:] for call in found["calls"]])


@each_way
@each_choice
def test_responses_with_the_embedded_model(server, choice, stream):
    options = {
        "model": "", "tools": [{"type": "function", **WEATHER["function"]}],
        "tool_choice": {"type": "function", "name": "weather"} if choice == "named" else choice,
        "parallel_tool_calls": False, "max_output_tokens": 60, "temperature": 0, "stream": stream,
    }  # fmt: skip
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "Rain."}
    with server.openai() as client:
        for items in ([ASK], [ASK, call, result]):
            reply = client.responses.create(input=items, **options)
            response = list(reply)[-1].response if stream else reply
            calls = [item for item in response.output if item.type == "function_call"]
            check_call(choice, [(item.name, item.arguments) for item in calls])


@each_way
@each_choice
def test_messages_with_the_embedded_model(server, choice, stream):
    kinds = {"auto": "auto", "required": "any", "named": "tool"}
    options = {
        "model": "", "max_tokens": 60, "stream": stream,
        "tools": [{"name": "weather", "input_schema": PARAMETERS}],
        "tool_choice": {"type": kinds[choice], "disable_parallel_tool_use": True}
        | ({"name": "weather"} if choice == "named" else {}),
    }  # fmt: skip
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bonn"}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "Rain."}
    later = [
        ASK,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        for messages in ([ASK], later):
            reply = client.messages.create(messages=messages, **options)
            if stream:
                assert [event.type for event in reply][-1] == "message_stop"
            else:
                calls = [block for block in reply.content if block.type == "tool_use"]
                check_call(choice, [(block.name, json.dumps(block.input)) for block in calls])


def test_the_log_names_the_form(server):
    assert "tool parser: generic, reasoning parser: none" in server.log


@each_way
def test_calls_are_described_and_read(script, stream):
    says = (
        f"<think>hm</think>I look.\n{CALL.format(json.dumps({'name': 'weather', 'arguments': {}}))}"
    )
    reply = ask(script, says, tools=[WEATHER], messages=[ASK], stream=stream)
    assert without_ids(gathered(reply) if stream else said(reply)) == {
        "content": "I look.\n", "reasoning": "hm", "calls": [["weather", "{}"]],
        "finish": "tool_calls",
    }  # fmt: skip
    assert (
        script.prompt() == f"<system>{describe_tools([WEATHER])}<user>{ASK['content']}<assistant>"
    )


@each_way
def test_the_model_s_own_form_comes_back_in_the_history(script, stream):
    reply = ask(script, "Wet.", tools=[WEATHER], messages=[ASK, CALLED, RESULT], stream=stream)
    assert (gathered(reply) if stream else said(reply))["content"] == "Wet."
    written = CALL.format('{"name": "weather", "arguments": {"city": "Bonn"}}')
    assert script.prompt().endswith(
        f"<assistant>{written}<user><tool_response>\nRain.\n</tool_response><assistant>"
    )


@each_way
def test_anything_but_a_call_of_these_tools_stays_content(script, stream):
    for says in ('{"name": "clock", "arguments": {}}', "[1, 2]", "```json\n{}\n```\n"):
        reply = ask(script, says, tools=[WEATHER], messages=[ASK], stream=stream)
        found = gathered(reply) if stream else said(reply)
        assert (found["content"], found["calls"], found["finish"]) == (says, [], "stop")


def test_without_tools_nothing_is_described_or_read(script):
    says = '{"name": "weather", "arguments": {}}'
    found = said(ask(script, says, messages=[ASK]))
    assert (found["content"], found["calls"]) == (says, [])
    assert script.prompt() == f"<user>{ASK['content']}<assistant>"


FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "sum",
        "schema": {
            "type": "object",
            "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}},
            "required": ["sum"],
            "additionalProperties": False,
        },
    },
}


@each_way
@each_choice
def test_a_response_format_with_the_embedded_model(server, choice, stream):
    options = {
        "model": "", "tools": [WEATHER], "tool_choice": NAMED if choice == "named" else choice,
        "parallel_tool_calls": False, "max_tokens": 60, "seed": 1, "stream": stream,
        "response_format": FORMAT,
    }  # fmt: skip
    with server.openai() as client:
        reply = client.chat.completions.create(messages=[ASK], **options)
        found = gathered(reply) if stream else said(reply)
    check_call(choice, [call[1:] for call in found["calls"]])
    if choice == "auto" and not found["content"].startswith("<tool_call>"):
        assert 0 <= json.loads(found["content"])["sum"] <= 99
    elif choice != "auto":
        assert found["content"] == ""
