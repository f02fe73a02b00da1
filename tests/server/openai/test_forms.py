"""Outputs with a form over HTTP: a server of the embedded model, the `openai` client."""

import json
import re

import openai
import pytest

from quire.engine.frontend.output_stream import raise_error
from quire.errors import RequestError
from quire.outputs import CompletionOutput, RequestOutput
from quire.params.structured import GRAMMAR_FAILED

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": CITY}}


def ask(server, **options):
    options = {"model": "", "max_tokens": 120, "seed": 3, **options}
    with server.openai() as client:
        [choice] = client.chat.completions.create(
            messages=[{"role": "user", "content": "A city."}], **options
        ).choices
    return choice


def is_city(value):
    return value.keys() == {"name", "size"} and 1 <= value["size"] <= 99


def test_response_format(server):
    schema = {"name": "city", "schema": CITY, "strict": True}
    choice = ask(server, response_format={"type": "json_schema", "json_schema": schema})
    assert choice.finish_reason == "stop" and is_city(json.loads(choice.message.content))


@pytest.mark.parametrize(
    ("field", "form", "pattern"),
    [
        ("structured_outputs", {"choice": ["red", "green"]}, "red|green"),
        ("structured_outputs", {"regex": r"\d\d:\d\d"}, r"\d\d:\d\d"),
        ("structured_outputs", {"grammar": 'start: "a" "b"*  "."'}, r"ab*\."),
        ("guided_choice", ["up", "down"], "up|down"),
        ("guided_regex", "[xyz]{3}", "[xyz]{3}"),
    ],
)
def test_the_fields_of_the_field(server, field, form, pattern):
    choice = ask(server, extra_body={field: form})
    assert re.fullmatch(pattern, choice.message.content)


def test_forced_calls_follow_their_schema(server):
    required = ask(server, tools=[LOOK_UP, OTHER], tool_choice="required", max_tokens=300)
    named = {"type": "function", "function": {"name": "other"}}
    chosen = ask(server, tools=[LOOK_UP, OTHER], tool_choice=named)
    for call in required.message.tool_calls + chosen.message.tool_calls:
        assert is_city(json.loads(call.function.arguments))
    assert [call.function.name for call in chosen.message.tool_calls] == ["other"]
    assert {call.function.name for call in required.message.tool_calls} <= {"look_up", "other"}


@pytest.mark.parametrize(
    "form",
    [{"regex": "(a"}, {"json": {"type": "object", "not": {}}}, {"grammar": "start: b"}],
    ids=lambda form: next(iter(form)),
)
def test_a_bad_form_is_the_sender_s_error(server, form):
    [kind] = form
    with pytest.raises(openai.BadRequestError, match=f"structured_outputs.{kind}"):
        ask(server, extra_body={"structured_outputs": form})
    assert ask(server, extra_body={"guided_choice": ["ok"]}).message.content == "ok"


@pytest.mark.parametrize("form", [{"regex": "a{1000000}"}, {"grammar": 'start: "a"{1000000}'}])
def test_t40_a_form_that_proves_too_large_is_refused_on_every_route(server, form):
    with server.openai() as client, pytest.raises(openai.BadRequestError, match="too large"):
        client.completions.create(model="", prompt="a", extra_body={"structured_outputs": form})
    with pytest.raises(openai.BadRequestError, match="too large"):
        ask(server, extra_body={"structured_outputs": form})


def test_t40_a_grammar_that_fails_while_it_runs_is_its_senders_error():
    completion = CompletionOutput(0, "", [], finish_reason="error", error=f"{GRAMMAR_FAILED}: why")
    with pytest.raises(RequestError, match="grammar failed: why"):
        raise_error(RequestOutput("1", "a", [1], None, [completion], finished=True))


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_request_that_forbids_every_token_is_its_senders_error(server, is_streamed):
    given = {"prompt": "a", "guided_regex": "[0-9]+", "allowed_token_ids": [70], "max_tokens": 4}
    reply = server.post("/v1/completions", {**given, "stream": is_streamed})
    assert reply.status_code == (200 if is_streamed else 400)
    assert "no token can be drawn" in reply.text and "BadRequestError" in reply.text
