"""`/v1/chat/completions` through the official client."""

import json

import openai
import pytest

from tests.server.scripted_app import with_app

HELLO = [{"role": "user", "content": "def add(a, b):"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as made:
        yield made


def chat(client, messages=None, **fields):
    given = {"model": "", "max_tokens": 12, "temperature": 0, **fields}
    return client.chat.completions.create(messages=messages or HELLO, **given)


def test_the_answer_is_that_of_the_rendered_prompt(client, server):
    body = {"messages": HELLO, "max_tokens": 12, "temperature": 0}
    rendered = server.post("/v1/chat/completions/render", body).json()
    assert "def add(a, b):" in rendered["prompt"]
    assert rendered["sampling_params"]["max_tokens"] == 12
    plain = server.post("/v1/completions", {**body_of(rendered), "temperature": 0}).json()
    reply = chat(client)
    assert reply.choices[0].message.content == plain["choices"][0]["text"]
    assert reply.choices[0].message.role == "assistant"
    assert reply.usage.prompt_tokens == len(rendered["token_ids"])
    assert reply.system_fingerprint.startswith("quire-")


def body_of(rendered):
    return {"prompt": rendered["token_ids"], "max_tokens": 12}


def test_a_stream_adds_up_to_the_whole(client):
    fields = {"n": 2, "temperature": 1, "seed": 5, "max_tokens": 24, "logprobs": True,
              "top_logprobs": 2}  # fmt: skip
    whole = chat(client, **fields)
    texts, tokens, ends = {}, {}, {}
    for chunk in chat(client, stream=True, **fields):
        for choice in chunk.choices:
            if choice.index not in texts:
                assert choice.delta.role == "assistant"
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.content)
            ends[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.message.content
        assert ends[choice.index] == choice.finish_reason
        for streamed, token in zip(tokens[choice.index], choice.logprobs.content, strict=True):
            assert streamed.token == token.token and streamed.bytes == token.bytes
            assert odds(streamed) == pytest.approx(odds(token), abs=1e-5)
            assert len(token.top_logprobs) == 2


def odds(token):
    """Its log probabilities; without the native kernels a crowd moves their last bits."""
    return {"": token.logprob, **{top.token: top.logprob for top in token.top_logprobs}}


def test_the_default_length_is_what_fits(client):
    reply = chat(client, max_tokens=openai.omit, stop=["\n"])
    assert reply.choices[0].finish_reason == "stop"
    both = chat(client, max_tokens=3, max_completion_tokens=5)
    assert both.usage.completion_tokens == 5


def test_an_answer_is_continued(client, server):
    messages = [*HELLO, {"role": "assistant", "content": "def add(a, b):\n    return"}]
    rendered = server.post(
        "/v1/chat/completions/render", {"messages": messages, "continue_final_message": True}
    ).json()
    assert rendered["prompt"].endswith("return")
    extra = {"continue_final_message": True, "echo": True, "return_prompt_text": True}
    reply = chat(client, messages, extra_body=extra)
    assert reply.choices[0].message.content.startswith("def add(a, b):\n    return")
    assert reply.model_extra["prompt_text"] == rendered["prompt"]


def test_ids_come_along_where_asked(client, server):
    extra = {"return_token_ids": True}
    reply = chat(client, extra_body=extra)
    ids = reply.choices[0].model_extra["token_ids"]
    text = server.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text == reply.choices[0].message.content
    chunks = list(chat(client, stream=True, extra_body=extra))
    first = chunks[0].model_extra["prompt_token_ids"]
    assert first == reply.model_extra["prompt_token_ids"]
    streamed = [i for c in chunks[1:] for i in c.choices[0].model_extra["token_ids"]]
    assert streamed == ids


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 500}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"n": 1000, "temperature": 1}, "n"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"guided_json": {}, "response_format": {"type": "json_object"},
          "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"nothing": 1}}, "structured_outputs.nothing"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_by_name(server, fields, param, stream):
    body = {"messages": HELLO, "max_tokens": 4, "stream": stream, **fields}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_request_cannot_stall_the_server_with_its_messages(server):
    """T12: a long conversation is rendered beside the loop, and refused where it does not fit."""
    many = [{"role": "user", "content": "x" * 1000}] * 200
    reply = server.post("/v1/chat/completions", {"messages": many})
    assert reply.status_code == 400
    assert "tokens" in reply.json()["error"]["message"]


def ask(text, *, stream=False, tool_parser="hermes", reasoning_parser=None, **fields):
    """What the client of a model that says `text` is given: a message, or the chunks."""

    async def use(http):
        client = openai.AsyncOpenAI(base_url="http://app/v1", api_key="-", http_client=http)
        reply = await client.chat.completions.create(
            model="", messages=HELLO, stream=stream, **fields
        )
        return [chunk async for chunk in reply] if stream else reply

    options = {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    return with_app(use, text, **options)


def test_calls_of_tools_are_found():
    reply = ask(f"Let me see.{CALL}{CALL}", tools=[WEATHER])
    [choice] = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    first, second = choice.message.tool_calls
    assert first.id != second.id
    assert (first.type, first.function.name) == ("function", "weather")
    assert json.loads(first.function.arguments) == {"city": "Ulm"}


def test_streamed_calls_add_up():
    chunks = ask(f"Let me see.{CALL}", tools=[WEATHER], stream=True)
    content, names, ids, arguments = "", [], [], ""
    for chunk in chunks:
        delta = chunk.choices[0].delta
        content += delta.content or ""
        for call in delta.tool_calls or ():
            assert call.index == 0
            names += [call.function.name] if call.function.name else []
            ids += [call.id] if call.id else []
            arguments += call.function.arguments or ""
    assert (content, names, len(ids)) == ("Let me see.", ["weather"], 1)
    assert json.loads(arguments) == {"city": "Ulm"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tools_that_may_not_be_called_are_text():
    reply = ask(CALL, tools=[WEATHER], tool_choice="none")
    assert reply.choices[0].message.content == CALL
    assert reply.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="tool-call-parser"):
        ask(CALL, tools=[WEATHER], tool_parser=None)


def test_reasoning_is_told_from_the_answer():
    reply = ask("<think>two and two</think>four", reasoning_parser="qwen3")
    message = reply.choices[0].message
    assert message.content == "four"
    assert message.model_extra["reasoning"] == "two and two"
    assert message.model_extra["reasoning_content"] == "two and two"
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0
    hidden = ask(
        "<think>two</think>four", reasoning_parser="qwen3", extra_body={"include_reasoning": False}
    )
    assert hidden.choices[0].message.model_extra["reasoning"] is None
    chunks = ask("<think>two and two</think>four", reasoning_parser="qwen3", stream=True)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(d.model_extra.get("reasoning", "") for d in deltas) == "two and two"
    assert "".join(d.content or "" for d in deltas) == "four"


def test_a_reasoning_without_an_answer_is_the_answer_where_a_request_asks_for_one():
    asked = {"extra_body": {"chat_template_kwargs": {"force_nonempty_content": True}}}
    for text in ("<think>four", "<think>four</think>"):
        message = ask(text, reasoning_parser="nemotron_v3", **asked).choices[0].message
        assert (message.content, message.model_extra["reasoning"]) == ("four", None)
        assert ask(text, reasoning_parser="nemotron_v3").choices[0].message.content is None
        chunks = ask(text, reasoning_parser="nemotron_v3", stream=True, **asked)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert "".join(d.model_extra.get("reasoning", "") for d in deltas) == "four"
        assert "".join(d.content or "" for d in deltas) == "four"


def test_a_form_begins_behind_the_reasoning():
    body = {"messages": HELLO, "max_tokens": 5, "response_format": {"type": "json_object"}}

    async def use(http):
        return (await http.post("/v1/chat/completions/render", json=body)).json()

    plain = with_app(use, "x")["sampling_params"]["structured_outputs"]
    assert plain == {"json_object": True}
    form = with_app(use, "x", reasoning_parser="qwen3")["sampling_params"]["structured_outputs"]
    assert (form["opens_with"], form["starts_after"]) == (["<think>"], ["</think>"])


def test_cached_tokens_are_told_without_a_flag(server):
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "cached " * 60}]}
    server.post("/v1/chat/completions", body)
    usage = server.post("/v1/chat/completions", body).json()["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
