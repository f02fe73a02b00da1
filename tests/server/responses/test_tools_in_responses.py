"""Tools and reasoning in `/v1/responses`, with the `openai` client and a scripted model."""

import openai
import pytest

from quire.server.output_parsing import plan_parsers
from tests.server.scripted_server import scripted

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SAYS = '<think>hm</think>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n'
SAYS += "</tool_call>"
ARGUMENTS = '{"city": "Bonn"}'


@pytest.fixture(scope="module")
def server():
    with scripted(plan_parsers("hermes", "qwen3")) as running:
        yield running


def ask(server, says, **options):
    server.says = says
    options = {"input": "How is it in Bonn?", "model": "scripted", "tools": [WEATHER], **options}
    return server.openai.responses.create(**options)


def test_the_output_has_reasoning_a_message_and_a_call(server):
    reply = ask(server, SAYS)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    reasoning, message, call = reply.output
    assert reasoning.content[0].text == "hm"
    assert message.content[0].text == "I look.\n"
    assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "completed")
    assert call.call_id.startswith("chatcmpl-tool-")
    assert reply.status == "completed"


def test_a_stream_tells_of_the_same(server):
    events = list(ask(server, SAYS, stream=True))
    whole = events[-1].response
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    deltas = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in deltas) == ARGUMENTS
    [done] = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert done.arguments == ARGUMENTS == whole.output[2].arguments
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_result_of_a_call_goes_back(server):
    call = ask(server, SAYS).output[2]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    asked = [{"role": "user", "content": "How is it?"}, call.model_dump(exclude_none=True), result]
    asked[1].pop("status")
    reply = ask(server, "It rains.", input=asked)
    assert reply.output_text == "It rains."
    assert '[weather {"city": "Bonn"}]<tool>Rain.' in server.prompt()


def test_what_cannot_be_served_is_refused(server):
    for options, complaint in (
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "web_search"),
        ({"tool_choice": {"type": "function", "name": "clock"}}, "the tools are weather"),
    ):
        with pytest.raises(openai.BadRequestError, match=complaint):
            ask(server, "x", **options)


def test_allowed_tools_and_an_empty_list(server):
    now = {"type": "function", "name": "now"}
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "function", "name": "weather"}],
    }
    reply = ask(server, SAYS, tools=[now, WEATHER], tool_choice=allowed)
    assert reply.output[2].name == "weather"
    assert server.prompt().startswith("[tool weather]<user>")
    for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        reply = ask(server, SAYS, tools=[], **choice)
        assert "<tool_call>" in reply.output_text
    with pytest.raises(openai.BadRequestError, match="it goes with tools only"):
        ask(server, SAYS, tools=[], tool_choice="required")


@pytest.mark.parametrize("stream", [False, True])
def test_later_calls_than_max_tool_calls_are_left_out(server, stream):
    says = SAYS[SAYS.index("<tool_call>") :] * 3
    for most in (1, 2, 5):
        reply = ask(server, says, max_tool_calls=most, stream=stream)
        response = list(reply)[-1].response if stream else reply
        assert [item.type for item in response.output] == ["function_call"] * min(most, 3)
        assert response.max_tool_calls == most
    ask(server, "[]", tool_choice="required", max_tool_calls=2)
    assert server.seen[-1].sampling_params.structured_outputs.json["maxItems"] == 2
    with pytest.raises(openai.BadRequestError, match="max_tool_calls"):
        ask(server, says, max_tool_calls=0)
