"""`/v1/messages` through Anthropic's client."""

import anthropic
import httpx2  # what this client is made of
import jiter
import pytest

from quire.server.anthropic.blocks import conversation
from quire.server.anthropic.cut_json import readable_part
from tests.server.scripted_app import tokenizer, with_app

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
HELLO = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture(scope="module")
def client(server):
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as made:
        yield made


def create(client, **fields):
    given = {"model": "quire-embedded", "max_tokens": 12, "messages": HELLO}
    return client.messages.create(**{**given, **fields})


def test_a_message_is_the_answer_of_chat(client, server):
    message = create(client, system="Be short.", extra_body={"temperature": 0})
    chat = server.post("/v1/chat/completions", {
        "max_tokens": 12, "temperature": 0,
        "messages": [{"role": "system", "content": "Be short."}, *HELLO],
    }).json()  # fmt: skip
    assert message.content[0].text == chat["choices"][0]["message"]["content"]
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert message.usage.output_tokens == 12


def test_a_stream_adds_up(client):
    with client.messages.stream(
        model="", max_tokens=12, messages=HELLO, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert text == create(client, extra_body={"temperature": 0}).content[0].text
    assert final.usage.output_tokens == 12


def test_stop_sequences_are_named(client):
    message = create(client, stop_sequences=["\n"], max_tokens=200)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "\n")


def test_an_answer_whose_time_is_over_is_cut_off(server):
    """Its stop reason in the engine, "timeout", is not a sequence of the request."""
    messages, extra = [{"role": "user", "content": "a"}], {"timeout_s": 1e-6}
    body = {"max_tokens": 3000, "messages": messages, "vllm_xargs": extra}
    reply = server.post("/v1/messages", body).json()
    assert (reply["stop_reason"], reply.get("stop_sequence")) == ("max_tokens", None)


def test_tokens_are_counted(client):
    counted = client.messages.count_tokens(model="quire-embedded", messages=HELLO)
    assert counted.input_tokens == create(client).usage.input_tokens


def test_the_key_of_this_client_opens_the_server(guarded):
    with anthropic.Anthropic(base_url=guarded.url, api_key="first-key") as client:
        assert create(client).content
    with (
        anthropic.Anthropic(base_url=guarded.url, api_key="x", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        create(client)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ({"messages": [{"role": "king", "content": "x"}]}, "role"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"extra_body": {"no_such": 1}}, "no_such"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client, fields, word):
    with pytest.raises(anthropic.BadRequestError, match=word) as refusal:
        create(client, **fields)
    assert refusal.value.body["type"] == "error"
    assert refusal.value.body["error"]["type"] == "invalid_request_error"


def ask(text, *, stream=False, **fields):
    async def use(http):
        client = anthropic.AsyncAnthropic(base_url="http://app", api_key="-", http_client=http)
        given = {"model": "", "max_tokens": 500, "messages": HELLO, **fields}
        if not stream:
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as events:
            return await events.get_final_message()

    return with_app(use, text, httpx2, tool_parser="hermes", reasoning_parser="qwen3")


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_thinking_are_blocks(stream):
    text = f"<think>hm</think>Let me see.{CALL}"
    message = ask(text, tools=[WEATHER], stream=stream)
    thinking, said, call = message.content
    assert thinking.thinking == "hm"
    assert said.text == "Let me see."
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Ulm"})
    assert message.stop_reason == "tool_use"


def test_results_of_calls_go_back_in():
    messages = [
        *HELLO,
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [
                {"type": "text", "text": "sun"}]},
            {"type": "text", "text": "So?"}]},
    ]  # fmt: skip
    message = ask("Nice.", messages=messages, tools=[WEATHER])
    assert message.content[0].text == "Nice."
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("given", "arguments"),
    [({"a": 1}, '{"a":1}'), ({}, "{}"), (None, "{}"), ([], "[]"), ("", '""'), (0, "0")],
)
def test_the_input_of_an_earlier_call_is_never_made_up(given, arguments):
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": given}
    [message] = conversation([{"role": "assistant", "content": [call]}])
    assert message["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize("arguments", ['{"city": }', "[1]", '{"city": "U'])
def test_arguments_that_are_not_an_object_are_shown_as_they_stand(arguments):
    text = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}'
    message = ask(text, tools=[WEATHER])
    assert [block.text for block in message.content] == [arguments]
    assert message.stop_reason == "end_turn"


def test_a_model_without_reasoning_thinks_within_any_budget(client):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = create(client, max_tokens=1100, stop_sequences=["e"], thinking=thinking)
    assert [block.type for block in message.content] == ["text"]


def test_fields_that_clients_send_by_themselves_are_accepted(client):
    tool = {"name": "f", "input_schema": {"type": "object", "additionalProperties": False},
            "input_examples": [{}], "eager_input_streaming": True}  # fmt: skip
    extra = {"context_management": {"edits": []}, "container": None, "mcp_servers": []}
    message = create(
        client,
        max_tokens=200,
        tools=[tool],
        tool_choice={"type": "tool", "name": "f"},
        extra_body=extra,
    )
    assert message.content[0].name == "f"


def test_a_thread_is_refused_so_that_clients_go_on_without(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, extra_body={"thread": {"type": "create"}})
    assert caught.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"


def test_a_whole_request_can_be_counted(server):
    conversation = {"messages": [{"role": "user", "content": "hello"}]}
    whole = {**conversation, "max_tokens": 9, "stream": True, "temperature": 0.5, "top_k": 3,
             "stop_sequences": ["x"], "metadata": {"user_id": "u"}}  # fmt: skip
    reply = server.post("/v1/messages/count_tokens", whole)
    assert reply.status_code == 200, reply.text
    assert reply.json() == server.post("/v1/messages/count_tokens", conversation).json()
    assert "max_tokens" in reply.headers["x-ignored-fields"]


OPEN = [
    *HELLO,
    {"role": "assistant", "content": [{"type": "text", "text": "    return"}]},
]


def test_the_last_message_of_an_assistant_is_continued(client, server):
    """The prompt ends within it, as that of a chat which asks for it by name."""
    chat = [*HELLO, {"role": "assistant", "content": "    return"}]
    flags = {"add_generation_prompt": False, "continue_final_message": True}
    known = server.post("/v1/chat/completions", {
        "messages": chat, "max_tokens": 12, "temperature": 0, **flags,
    }).json()  # fmt: skip
    message = create(client, messages=OPEN, extra_body={"temperature": 0})
    assert message.content[0].text == known["choices"][0]["message"]["content"]
    assert message.usage.input_tokens == known["usage"]["prompt_tokens"]
    counted = client.messages.count_tokens(model="", messages=OPEN)
    assert counted.input_tokens == known["usage"]["prompt_tokens"]


def test_a_message_that_ends_with_a_call_is_not_continued():
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Ulm"}}
    text = {"type": "text", "text": "Let me see."}
    messages = [*HELLO, {"role": "assistant", "content": [text, call]}]
    assert ask("Sun.", messages=messages, tools=[WEATHER]).content[0].text == "Sun."


def test_cached_tokens_are_told_at_both_ends_of_a_stream(client):
    system = "Always answer with one word, in lower case and without a full stop. " * 4
    given = {"model": "", "max_tokens": 3, "system": system, "messages": HELLO}
    client.messages.create(**given)  # fills the cache
    whole = client.messages.create(**given).usage
    events = {}
    for event in client.messages.create(**given, stream=True):
        events[event.type] = event
    start, end = events["message_start"].message.usage, events["message_delta"].usage
    assert whole.cache_read_input_tokens > 0
    assert whole.cache_creation_input_tokens == 0
    for usage in (start, end):
        assert usage.cache_read_input_tokens == whole.cache_read_input_tokens
        assert usage.cache_creation_input_tokens == 0
        assert usage.input_tokens == whole.input_tokens
    counted = client.messages.count_tokens(model="", system=system, messages=HELLO).input_tokens
    assert whole.input_tokens + whole.cache_read_input_tokens == counted


def test_a_prompt_that_is_not_cached_says_so(server):
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "b"}]}
    usage = server.post("/v1/messages", body).json()["usage"]
    assert usage["cache_read_input_tokens"] == usage["cache_creation_input_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_has_the_same_blocks_streamed_and_whole(stream):
    arguments = '{"city": "Ulm", "days": [1, 2, 3], "note": "the beginning of something long"}'
    text = f'Well.<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    written = text[: text.index("of something")]
    num_tokens = len(tokenizer().encode(written, add_special_tokens=False))
    said, call = ask(text, tools=[WEATHER], stream=stream, max_tokens=num_tokens).content
    assert said.text == "Well."
    assert (call.type, call.name) == ("tool_use", "weather")
    assert call.input == {"city": "Ulm", "days": [1, 2, 3]}


@pytest.mark.parametrize(
    "text",
    [
        *("{", '{"a":', '{"a": 12', '{"a": 1.', '{"a": "x"', '{"a": "x,}', '{"a": "x\\'),
        *('{"a": 1, "b"', '{"a": [1, {"b": tr', '{"a": [1, {"b": true', '{"a": {"b": 1, "c'),
        *('{"a": "},", "b": ["c"', '{"a": "q\\"'),
    ],
)
def test_cut_json_is_read_as_clients_read_it(text):
    assert readable_part(text) == jiter.from_json(text.encode(), partial_mode=True)


def test_what_does_not_begin_an_object_has_no_members():
    assert readable_part("[1, 2") is None
    assert readable_part("") is None
