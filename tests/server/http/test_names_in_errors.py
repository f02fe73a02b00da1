"""Errors name the field that the sender wrote, whatever the engine calls it."""

import pytest

HELLO = [{"role": "user", "content": "hello"}]
NO_SCHEMA = {"type": "wrong"}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": NO_SCHEMA}}
FLAT = {"type": "json_schema", "name": "x", "schema": NO_SCHEMA}
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"logprobs": 10**6}, "logprobs"),
        ("/v1/completions", {"guided_json": NO_SCHEMA}, "guided_json"),
        ("/v1/completions", {"structured_outputs": {"regex": "(["}}, "structured_outputs.regex"),
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ("/v1/chat/completions", {"response_format": JSON_SCHEMA}, "response_format"),
        ("/v1/responses", {"top_logprobs": 10**6}, "top_logprobs"),
        ("/v1/responses", {"text": {"format": FLAT}}, "text.format"),
        ("/v1/responses", {"text": {"format": {"type": "yaml"}}}, "text.format"),
        ("/v1/messages", {"stop_sequences": [""]}, "stop_sequences"),
        ("/v1/messages", {"output_config": {"format": FLAT}}, "output_config.format"),
    ],
)
def test_the_field_of_the_request_is_named(server, path, fields, name):
    reply = server.post(path, {**BODIES[path], **fields})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert name in error["message"].replace("=", " ").split()
    assert error.get("param", name) == name


@pytest.mark.parametrize(
    ("path", "left_out"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "max_tokens"),
        ("/detokenize", "tokens"),
    ],
)
def test_a_field_that_is_missing_is_named(server, path, left_out):
    sent = {name: value for name, value in BODIES.get(path, {}).items() if name != left_out}
    error = server.post(path, sent).json()["error"]
    assert error["message"] == f"{left_out}: This required field is missing."
    assert error.get("param", left_out) == left_out


def test_a_field_that_is_missing_further_down_is_named_with_its_place(server):
    sent = {**BODIES["/v1/messages"], "thinking": {}}
    message = server.post("/v1/messages", sent).json()["error"]["message"]
    assert message == "thinking.type: This required field is missing."
