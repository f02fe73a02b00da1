"""`/v1/responses` through the official client."""

import json

import openai
import pytest

from tests.server.scripted_app import with_app

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as made:
        yield made


def create(client, **fields):
    given = {"model": "", "input": "def add(a, b):", "max_output_tokens": 12, "temperature": 0}
    return client.responses.create(**{**given, **fields})


def test_a_response_is_the_answer_of_chat(client):
    response = create(client, instructions="Be short.", metadata={"a": "b"})
    chat = client.chat.completions.create(
        model="", max_tokens=12, temperature=0,
        messages=[{"role": "system", "content": "Be short."},
                  {"role": "user", "content": "def add(a, b):"}],
    )  # fmt: skip
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.incomplete_details.reason) == (
        "incomplete", "max_output_tokens")  # fmt: skip
    assert response.usage.output_tokens == 12
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.metadata == {"a": "b"}


def test_all_that_the_model_reads_and_writes_is_shown_if_asked_for(client, server):
    asked = {"extra_body": {"enable_response_messages": True}}
    plain, shown = create(client), create(client, **asked)
    [read], [written] = shown.input_messages, shown.output_messages
    assert read["type"] == written["type"] == "raw_message_tokens"
    tokenized = server.post(
        "/tokenize", {"messages": [{"role": "user", "content": "def add(a, b):"}]}
    )
    assert read["tokens"] == tokenized.json()["tokens"] and "def add(a, b):" in read["message"]
    assert len(written["tokens"]) == 12 and written["message"] == shown.output_text
    assert "input_messages" not in plain.model_dump() and shown.output_text == plain.output_text
    *_, last = create(client, stream=True, **asked)
    assert last.response.output_messages == shown.output_messages


def test_the_events_tell_of_the_response(client):
    events = list(create(client, stream=True))
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:4] == ["response.created", "response.in_progress",
                         "response.output_item.added", "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done",
                          "response.output_item.done", "response.incomplete"]  # fmt: skip
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text == create(client).output_text


def test_the_events_have_all_fields_that_the_client_declares(client):
    """The client does not check that, but others generate their types from the same description."""
    for event in create(client, stream=True):
        type(event).model_validate_json(event.model_dump_json(exclude_unset=True))


def test_a_response_is_kept_and_gone_on_from(client):
    first = create(client)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = create(client, input="And now?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.total_tokens
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    unkept = create(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    with pytest.raises(openai.NotFoundError):
        create(client, previous_response_id="resp_none")


def test_in_the_background_a_response_is_followed_and_cancelled(client):
    extra = {"ignore_eos": True}
    started = create(client, background=True, max_output_tokens=3000, extra_body=extra)
    assert started.status == "queued"
    follows = client.responses.retrieve(started.id, stream=True, starting_after=1)
    numbers = []
    for event in follows:
        numbers.append(event.sequence_number)
        if len(numbers) == 5:
            client.responses.cancel(started.id)
    assert numbers == list(range(2, 2 + len(numbers)))
    assert client.responses.retrieve(started.id).status == "cancelled"
    with pytest.raises(
        openai.BadRequestError, match=r"Cannot cancel a synchronous response\. Only"
    ):
        client.responses.cancel(create(client).id)


def test_the_input_of_a_response_is_listed_page_by_page(client):
    items = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "three"}]},
    ]
    made = create(client, input=items)
    listed = list(client.responses.input_items.list(made.id, limit=2))  # the client turns pages
    assert [item.content[0].text for item in listed] == ["three", "two", "one"]
    assert len({item.id for item in listed}) == 3
    upward = client.responses.input_items.list(made.id, order="asc", limit=1)
    assert upward.data[0].content[0].text == "one"
    assert upward.has_more
    text = client.responses.input_items.list(create(client, input="plain").id).data
    assert [(item.role, item.content[0].text) for item in text] == [("user", "plain")]
    for query in ({"limit": 0}, {"limit": 101}, {"after": "msg_none"}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(made.id, **query)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")


def test_responses_are_their_key_s_own(guarded):
    with guarded.openai("first-key") as mine, guarded.openai("second-key") as other:
        made = create(mine)
        assert mine.responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            other.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            other.responses.input_items.list(made.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": []}, "input"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools.type"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"include": ["no_such"]}, "include"),
        ({"background": True, "store": False}, "background"),
        ({"no_such": 1}, "no_such"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, fields, param):
    reply = server.post("/v1/responses", {"input": "a", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def ask(text, *, stream=False, **fields):
    async def use(http):
        client = openai.AsyncOpenAI(base_url="http://app/v1", api_key="-", http_client=http)
        reply = await client.responses.create(model="", stream=stream, **fields)
        return [event async for event in reply] if stream else reply

    return with_app(use, text, tool_parser="hermes", reasoning_parser="qwen3")


def test_calls_and_reasoning_are_items():
    text = f"<think>hm</think>Let me see.{CALL}"
    response = ask(text, input="Weather?", tools=[WEATHER])
    reasoning, message, call = response.output
    assert reasoning.content[0].text == "hm"
    assert message.content[0].text == "Let me see."
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call", "weather", {"city": "Ulm"})  # fmt: skip
    assert response.status == "completed"
    events = ask(text, input="Weather?", tools=[WEATHER], stream=True)
    streamed = events[-1].response.output
    assert [item.type for item in streamed] == ["reasoning", "message", "function_call"]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert [e.output_index for e in events if e.type == "response.output_item.added"] == [0, 1, 2]


def test_results_of_calls_go_back_in():
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sun"},
    ]  # fmt: skip
    assert ask("Nice.", input=items, tools=[WEATHER]).output_text == "Nice."


def test_a_namespace_of_functions_is_called_by_both_names(server):
    empty = {"type": "object", "additionalProperties": False}
    tools = [{"type": "namespace", "name": "agents", "description": "Agents.",
              "tools": [{"type": "function", "name": "stop", "parameters": empty}]}]  # fmt: skip
    body = {"input": "hello", "tools": tools, "tool_choice": "required", "max_output_tokens": 60}
    reply = server.post("/v1/responses", {**body, "parallel_tool_calls": False}).json()
    [call] = reply["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "agents", "stop")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "stopped"}
    again = {**body, "input": [{"role": "user", "content": "hello"}, call, result]}
    again["tool_choice"] = "none"
    assert server.post("/v1/responses", again).status_code == 200
    for wrong in ({"type": "namespace"}, {"type": "namespace", "name": "a", "tools": [1]}):
        assert server.post("/v1/responses", {**body, "tools": [wrong]}).status_code == 400
