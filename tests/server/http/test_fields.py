"""Fields of bodies that are not declared: left out, accepted without an effect, or refused."""

import httpx
import msgspec
import pytest

from quire.server.http.failures import Refusal
from quire.server.http.fields import HARMLESS
from quire.server.http.json_body import FieldRules, decode
from quire.server.openai.requests import ChatRequest, CompletionRequest
from tests.server.scripted_app import with_app

HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
}


def read(body, kind=ChatRequest, **options):
    return decode(msgspec.json.encode(body), kind, FieldRules(**options))


def chat(**fields):
    return {"messages": HELLO, **fields}


@pytest.mark.parametrize("path", BODIES)
def test_harmless_fields_are_named_in_a_header_of_every_route(server, path):
    sent = {**BODIES[path], "num_ctx": 4096, "provider": {"order": ["a"]}, "no_such": None}
    reply = server.post(path, sent)
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-ignored-fields"].split(", ")) == {"num_ctx", "provider"}
    assert "x-ignored-fields" not in server.post(path, BODIES[path]).headers


@pytest.mark.parametrize("path", BODIES)
def test_a_near_miss_is_refused_with_the_name_that_was_meant(server, path):
    error = server.post(path, {**BODIES[path], "temprature": 0.0}).json()["error"]
    assert 'Did you mean "temperature"?' in error["message"]


def test_a_field_that_is_null_counts_as_left_out():
    body, ignored = read(chat(no_such=None, temprature=None, tools=None))
    assert body.temperature is None
    assert ignored == []


def test_thousands_of_fields_are_refused_before_they_are_read():
    """Each would be looked up and taken out of the object while other requests wait."""
    many = {f"f{number}": None for number in range(1000)}
    with pytest.raises(Refusal, match="The body has more than 256 unknown fields"):
        read(chat(**many))
    with pytest.raises(Refusal, match=r"messages\[0\] has more than 256 unknown fields"):
        read(chat(messages=[{"role": "user", "content": "a", **many}]))
    read(chat(**dict(list(many.items())[:200])))


@pytest.mark.parametrize(
    ("fields", "is_harmless"),
    [
        ({"modalities": ["text"]}, True),
        ({"modalities": ["text", "audio"]}, False),
        ({"truncation": "auto"}, True),
        ({"context_management": []}, True),
        ({"context_management": {"edits": [{"type": "clear_thinking", "keep": "all"}]}}, True),
        ({"context_management": {"edits": [{"type": "clear_tool_uses"}]}}, False),
        ({"typical_p": 1}, True),
        ({"typical_p": 0.9}, False),
        ({"typical_p": True}, False),
        ({"mirostat_mode": 0}, True),
        ({"mirostat_mode": 2}, False),
        ({"web_search_options": {}}, False),
        ({"prediction": {"type": "content", "content": "a"}}, False),
        ({"n_best": 2}, False),
        ({"plugins": []}, True),
        ({"plugins": [{"id": "web"}]}, False),
    ],
)
def test_what_would_change_the_answer_is_refused(fields, is_harmless):
    [name] = fields
    if is_harmless:
        assert read(chat(**fields))[1] == [name]
    else:
        with pytest.raises(Refusal) as caught:
            read(chat(**fields))
        assert caught.value.info.param == name


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": "a", "foo": 1}]}, "messages[0].foo"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
         "messages[0].content[0].b"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
         "tools[0].function.paramters"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn"),
    ],
)  # fmt: skip
def test_inner_objects_are_as_strict(fields, param):
    with pytest.raises(Refusal) as caught:
        read(chat(**fields))
    assert caught.value.info.param == param


def test_what_frameworks_leave_in_messages_is_accepted():
    answer = {"role": "assistant", "content": "a", "annotations": [], "audio": None, "foo": None,
              "provider_specific_fields": {"x": 1}, "refusal": None}  # fmt: skip
    body, ignored = read(chat(messages=[*HELLO, answer]))
    assert ignored == ["messages[1].annotations", "messages[1].provider_specific_fields"]
    assert set(body.messages[1]) == {"role", "content", "refusal"}


@pytest.mark.parametrize("fields", [{"num_ctx": 1}, {"no_such": None}, {"user": "u"}])
def test_strict_fields_refuses_all_that_is_not_declared(fields):
    if "user" in fields:
        assert read(chat(**fields), is_strict=True)[0].user == "u"
        return
    with pytest.raises(Refusal):
        read(chat(**fields), is_strict=True)
    with pytest.raises(Refusal):
        read(chat(messages=[{**HELLO[0], **fields}]), is_strict=True)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_no_harmless_field_is_refused_as_a_near_miss(name):
    """A harmless name that resembles a declared one must not be declared by another type only."""
    for kind, body in ((ChatRequest, chat()), (CompletionRequest, {"prompt": "a"})):
        if name not in kind.__struct_fields__:
            assert read({**body, name: None}, kind)[1] == []


def test_each_name_is_logged_once(caplog):
    rules = FieldRules()
    with caplog.at_level("INFO"):
        for _ in range(3):
            decode(msgspec.json.encode(chat(num_ctx=1)), ChatRequest, rules)
    assert caplog.text.count("num_ctx") == 1


def test_a_body_with_unknown_fields_is_checked_like_any_other():
    with pytest.raises(Refusal, match="temperature"):
        read(chat(num_ctx=1, temperature="hot"))
    with pytest.raises(Refusal, match="missing"):
        read({"num_ctx": 1})
    with pytest.raises(Refusal):
        read([{"num_ctx": 1}])


def test_a_scripted_server_reads_every_field_strictly_if_told_to():
    async def use(client):
        replies = [
            await client.post("/v1/chat/completions", json=chat(**fields, max_tokens=1))
            for fields in ({}, {"num_ctx": 1})
        ]
        return [reply.status_code for reply in replies]

    rules = FieldRules(is_strict=True)
    assert with_app(use, "a", library=httpx, field_rules=rules) == [200, 400]


@pytest.mark.parametrize(
    ("path", "phrase"),
    [
        ("/v1/completions", "This model's maximum context length is"),
        ("/v1/chat/completions", "This model's maximum context length is"),
        ("/v1/responses", "This model's maximum context length is"),
        ("/v1/messages", "prompt is too long:"),
    ],
)
def test_a_prompt_that_is_too_long_is_recognised_by_clients(server, path, phrase):
    long = "a b " * 4096
    body = {
        name: long if value == "a" else [{"role": "user", "content": long}] if value == HELLO
        else value for name, value in BODIES[path].items()
    }  # fmt: skip
    reply = server.post(path, body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert phrase in error["message"]
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "name", "meant"),
    [
        ("/v1/completions", "max_output_tokens", "max_tokens"),
        ("/v1/chat/completions", "stop_sequences", "stop"),
        ("/v1/responses", "max_tokens", "max_output_tokens"),
        ("/v1/responses", "messages", "input"),
        ("/v1/responses", "response_format", "text"),
        ("/v1/messages", "stop", "stop_sequences"),
        ("/v1/messages", "max_completion_tokens", "max_tokens"),
    ],
)
def test_the_name_of_another_api_is_refused_with_the_one_here(server, path, name, meant):
    error = server.post(path, {**BODIES[path], name: 1}).json()["error"]
    assert f'Did you mean "{meant}"?' in error["message"]
