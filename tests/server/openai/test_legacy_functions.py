"""`functions` and `function_call`, by the `openai` client."""

import json

import openai
import pytest

from quire.server.output_parsing import plan_parsers
from tests.server.openai.test_tools import ARGUMENTS, CALL, SECOND, WEATHER, ask
from tests.server.scripted_server import scripted

FUNCTION = WEATHER["function"]
SMALL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Bonn", "Ulm"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
NAMED = {"name": "weather"}
each_way = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@pytest.fixture(scope="module")
def script():
    with scripted(plan_parsers("hermes", "qwen3")) as running:
        yield running


def found(reply, stream):
    """(content, name, arguments, finish reason), by the client's rules."""
    if not stream:
        [choice] = reply.choices
        call, message = choice.message.function_call, choice.message
        assert message.tool_calls is None
        content = message.content or ""
        return content, call and call.name, call and call.arguments, choice.finish_reason
    content, name, arguments, finish = "", None, None, None
    for chunk in reply:
        [choice] = chunk.choices
        assert choice.delta.tool_calls is None
        content += choice.delta.content or ""
        if (call := choice.delta.function_call) is not None:
            assert (call.name is None) == (name is not None)
            name = name or call.name
            arguments = (arguments or "") + (call.arguments or "")
        finish = choice.finish_reason or finish
    return content, name, arguments, finish


@each_way
def test_a_call_is_a_function_call(script, stream):
    reply = ask(script, f"I look.\n{CALL}{SECOND}", functions=[FUNCTION], stream=stream)
    assert found(reply, stream) == ("I look.\n", "weather", ARGUMENTS, "function_call")
    assert script.prompt().startswith("[tool weather]")


@each_way
def test_a_function_by_its_name(script, stream):
    options = {"functions": [FUNCTION, {"name": "now"}], "function_call": NAMED}
    reply = ask(script, '<think></think>{"city": "Bonn"}', stream=stream, **options)
    assert found(reply, stream) == ("", "weather", '{"city": "Bonn"}', "stop")
    assert script.seen[-1].sampling_params.structured_outputs.json == FUNCTION["parameters"]


@each_way
@pytest.mark.parametrize("choice", ["none", "auto"])
def test_words_are_content(script, stream, choice):
    reply = ask(script, "Yes.", functions=[FUNCTION], function_call=choice, stream=stream)
    assert found(reply, stream) == ("Yes.", None, None, "stop")


@pytest.mark.parametrize("form", ["hermes", "generic"])
def test_calls_and_results_go_back(form):
    messages = [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": None,
         "function_call": {"name": "weather", "arguments": '{"city": "Bonn"}'}},
        {"role": "function", "name": "weather", "content": "Rain."},
    ]  # fmt: skip
    with scripted(plan_parsers(form)) as server:
        reply = ask(server, "Wet.", functions=[FUNCTION], messages=messages)
        assert found(reply, stream=False) == ("Wet.", None, None, "stop")
        prompt = server.prompt()
    if form == "hermes":
        assert '<assistant>[weather {"city": "Bonn"}]<tool>Rain.<assistant>' in prompt
    else:
        assert "<tool_response>\nRain.\n</tool_response><assistant>" in prompt


@each_way
def test_the_embedded_model_makes_the_call(server, stream):
    options = {"functions": [SMALL], "function_call": NAMED, "max_tokens": 60, "stream": stream}
    messages = [{"role": "user", "content": "How is it?"}]
    with server.openai() as client:
        reply = client.chat.completions.create(model="", messages=messages, **options)
        _, name, arguments, _ = found(reply, stream)
    assert name == "weather" and json.loads(arguments)["city"] in ("Bonn", "Ulm")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"functions": [FUNCTION], "tools": [WEATHER]}, "do not go with tools"),
        ({"functions": [FUNCTION], "function_call": {"name": "clock"}}, "the tools are weather"),
        ({"functions": [FUNCTION], "function_call": {}}, "with the name of a function"),
        ({"functions": [FUNCTION], "function_call": "required"}, "function_call"),
        ({"function_call": NAMED}, "it goes with tools only"),
        ({"functions": [{}]}, "name"),
    ],
)
def test_what_cannot_be_served_is_refused(script, options, complaint):
    with pytest.raises(openai.BadRequestError, match=complaint):
        ask(script, "x", **options)


def test_no_functions_mean_nothing(script):
    for options in ({"functions": []}, {"function_call": "auto"}, {"function_call": "none"}):
        assert found(ask(script, CALL, **options), stream=False) == (CALL, None, None, "stop")
