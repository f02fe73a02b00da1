"""`openai` for Python, versions 2 and 3."""

import asyncio
import json
import urllib.request
from functools import cache
from typing import Literal

import openai
from pydantic import BaseModel

from tests.clients.scenarios import (
    MESSAGES,
    PERSON_FORMAT,
    PROMPT,
    TOO_LONG,
    WEATHER,
    WEATHER_CHOICE,
    WEATHER_RESULT,
    check_person,
    check_weather_arguments,
)

CUSTOM = {
    "type": "custom",
    "custom": {
        "name": "digits",
        "description": "Takes digits.",
        "format": {
            "type": "grammar",
            "grammar": {"syntax": "regex", "definition": "[0-9]{3,5}"},
        },
    },
}


class Person(BaseModel):
    """The form as clients of today write it."""

    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


@cache
def _client(url):
    """One for all modes: making one takes as long as a request."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100)


def _chat(url, model, **fields):
    given = {"messages": MESSAGES, "max_tokens": 24, **fields}
    return _client(url).chat.completions.create(model=model, **given)


def _stream(url, model, **fields):
    given = {"messages": MESSAGES, "max_tokens": 24, **fields}
    client = _client(url)
    return list(client.chat.completions.create(model=model, stream=True, **given))


def _respond(url, model, **fields):
    given = {"input": PROMPT, "max_output_tokens": 24, **fields}
    return _client(url).responses.create(model=model, **given)


def models(url, model):
    """List and retrieve."""
    client = _client(url)
    assert model in [served.id for served in client.models.list()]
    assert client.models.retrieve(model).id == model
    try:
        client.models.retrieve("no-such-model")
    except openai.NotFoundError as error:
        assert error.type == "NotFoundError" and "no-such-model" in error.message, error.body
    else:
        raise AssertionError("a model that is not there was found")


def chat(url, model):
    answer = _chat(url, model)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens == 24 and answer.choices[0].finish_reason == "length"


def chat_stream(url, model):
    chunks = _stream(url, model, stream_options={"include_usage": True})
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 24
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def chat_stream_helper(url, model):
    """`client.chat.completions.stream`, which keeps a snapshot and checks every event. It takes a
    length as an error, with or without a form, so the answer has one that ends it.
    """
    with _client(url).chat.completions.stream(
        model=model, messages=MESSAGES, max_tokens=200, response_format=Person
    ) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        message = stream.get_final_completion().choices[0].message
    assert "".join(texts) == message.content and isinstance(message.parsed, Person)


def chat_stopped_stream(url, model):
    """The client closes; soon afterwards no request runs."""
    client = _client(url)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=4000, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for _ in zip(range(3), stream, strict=False):
        pass
    stream.close()
    for _ in range(60):
        with urllib.request.urlopen(f"{url}/load") as reply:
            if json.load(reply)["server_load"] == 0:
                return
    raise AssertionError("the request still runs")


def chat_sampling(url, model):
    """n, seed, stop, logprobs, penalties and logit_bias."""
    fields = {
        "n": 2, "seed": 7, "temperature": 0.8, "top_p": 0.9, "logprobs": True, "top_logprobs": 3,
        "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {"5": -100},
    }  # fmt: skip
    first, second = (_chat(url, model, **fields) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(texts) == 2 and texts == [choice.message.content for choice in second.choices]
    tokens = first.choices[0].logprobs.content
    assert len(tokens) == 24 and all(len(token.top_logprobs) == 3 for token in tokens)
    stopped = _chat(url, model, stop=["\n"], max_tokens=200, temperature=0)
    assert "\n" not in stopped.choices[0].message.content
    assert stopped.choices[0].finish_reason == "stop"


def chat_max_completion_tokens(url, model):
    answer = _chat(url, model, max_tokens=None, max_completion_tokens=5)
    assert answer.usage.completion_tokens == 5


def chat_json_schema(url, model):
    answer = _chat(url, model, response_format=PERSON_FORMAT, max_tokens=200)
    check_person(json.loads(answer.choices[0].message.content))


def chat_json_object(url, model):
    answer = _chat(
        url, model, response_format={"type": "json_object"}, max_tokens=2000, temperature=0
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


def chat_parse(url, model):
    """`client.chat.completions.parse` with a Pydantic class."""
    client = _client(url)
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Person, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def tools_auto(url, model):
    """The model may call or not."""
    answer = _chat(url, model, tools=[WEATHER], tool_choice="auto", max_tokens=200).choices[0]
    assert answer.message.content or answer.message.tool_calls
    assert (answer.finish_reason == "tool_calls") == bool(answer.message.tool_calls)


def tools_default_choice(url, model):
    """`tools` without `tool_choice`, as most frameworks send them."""
    answer = _chat(url, model, tools=[WEATHER]).choices[0]
    assert answer.message.content or answer.message.tool_calls


def tools_none(url, model):
    answer = _chat(url, model, tools=[WEATHER], tool_choice="none").choices[0]
    assert answer.message.content and not answer.message.tool_calls


def tools_required(url, model):
    answer = _chat(url, model, tools=[WEATHER], tool_choice="required", max_tokens=200).choices[0]
    assert answer.finish_reason in ("tool_calls", "stop") and not answer.message.content
    [call] = answer.message.tool_calls[:1]
    assert call.id and call.type == "function" and call.function.name == "get_weather"
    check_weather_arguments(json.loads(call.function.arguments))


def tools_named(url, model):
    answer = _chat(url, model, tools=[WEATHER], tool_choice=WEATHER_CHOICE, max_tokens=200).choices[
        0
    ]
    [call] = answer.message.tool_calls
    assert not answer.message.content and call.function.name == "get_weather"
    check_weather_arguments(json.loads(call.function.arguments))


def tools_strict_not_parallel(url, model):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    answer = _chat(
        url, model, tools=[strict], tool_choice="required", parallel_tool_calls=False,
        max_tokens=200,
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    check_weather_arguments(json.loads(call.function.arguments))


def tools_result_sent_back(url, model):
    """The call of a first request and its result are the history of a second."""
    first = _chat(url, model, tools=[WEATHER], tool_choice="required", max_tokens=200).choices[0]
    [call, *_] = first.message.tool_calls
    spoken = first.message.model_dump(exclude_none=True)
    spoken["tool_calls"] = [call.model_dump(exclude_none=True)]
    result = {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
    second = _chat(url, model, messages=[*MESSAGES, spoken, result], tools=[WEATHER]).choices[0]
    assert second.message.content or second.message.tool_calls
    # Many clients leave the tools out of the last request.
    assert _chat(url, model, messages=[*MESSAGES, spoken, result]).choices[0].message.content


def tools_streamed(url, model):
    for choice in ("required", WEATHER_CHOICE):
        chunks = _stream(url, model, tools=[WEATHER], tool_choice=choice, max_tokens=200)
        deltas = [c.choices[0].delta for c in chunks if c.choices]
        assert not any(delta.content for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or [] if call.index == 0]
        assert calls[0].id and calls[0].function.name == "get_weather"
        assert not any(call.function.name for call in calls[1:])
        check_weather_arguments(json.loads("".join(c.function.arguments or "" for c in calls)))
        assert chunks[-1].choices[0].finish_reason in ("tool_calls", "stop")


def tools_streamed_without_empty_content(url, model):
    """A call forced in a stream has no content deltas, not even empty ones."""
    chunks = _stream(url, model, tools=[WEATHER], tool_choice="required", max_tokens=200)
    contents = [c.choices[0].delta.content for c in chunks[1:] if c.choices]
    assert all(content is None for content in contents), contents


def tools_streamed_auto(url, model):
    chunks = _stream(url, model, tools=[WEATHER])
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert any(delta.content or delta.tool_calls for delta in deltas)


def tools_with_response_format(url, model):
    """A forced call wins; the form is for content."""
    answer = _chat(
        url,
        model,
        tools=[WEATHER],
        tool_choice="required",
        response_format=PERSON_FORMAT,
        max_tokens=200,
    ).choices[0]
    check_weather_arguments(json.loads(answer.message.tool_calls[0].function.arguments))


def tools_allowed(url, model):
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [WEATHER_CHOICE]},
    }
    answer = _chat(url, model, tools=[WEATHER], tool_choice=allowed, max_tokens=200).choices[0]
    check_weather_arguments(json.loads(answer.message.tool_calls[0].function.arguments))


def tools_custom(url, model):
    """A tool whose input is text of a grammar."""
    answer = _chat(url, model, tools=[CUSTOM], tool_choice="required", max_tokens=60).choices[0]
    [call, *_] = answer.message.tool_calls
    assert call.type == "custom" and call.custom.name == "digits"
    assert call.custom.input.isdigit() and 3 <= len(call.custom.input) <= 5, call.custom.input


def functions(url, model):
    """The form before `tools`: `functions` and `function_call`."""
    named = {"name": "get_weather"}
    answer = _chat(
        url, model, functions=[WEATHER["function"]], function_call=named, max_tokens=200
    ).choices[0]
    call = answer.message.function_call
    assert call.name == "get_weather" and not answer.message.tool_calls
    check_weather_arguments(json.loads(call.arguments))
    spoken = {"role": "assistant", "content": None, "function_call": call.model_dump()}
    result = {"role": "function", "name": "get_weather", "content": WEATHER_RESULT}
    assert _chat(url, model, messages=[*MESSAGES, spoken, result]).choices[0].message.content


def no_tools_at_all(url, model):
    """`tools: []`, and `tool_choice` without tools."""
    assert _chat(url, model, tools=[]).choices
    assert _chat(url, model, tool_choice="auto").choices
    assert _chat(url, model, tools=[], tool_choice="none", parallel_tool_calls=True).choices


def roles_and_parts(url, model):
    """developer, name, parts of text, and an assistant's turn in the middle."""
    messages = [
        {"role": "developer", "content": "Be terse."},
        {"role": "user", "name": "ada", "content": [{"type": "text", "text": PROMPT}]},
        {"role": "assistant", "content": [{"type": "text", "text": "    return 1"}]},
        {"role": "user", "content": "Go on."},
    ]
    assert _chat(url, model, messages=messages).choices[0].message.content


def reasoning_effort(url, model):
    """Fields that a model without reasoning can honour by doing nothing."""
    for effort in ("none", "minimal", "low", "medium", "high"):
        assert _chat(url, model, reasoning_effort=effort).choices
    assert _chat(url, model, verbosity="low").choices


def harmless_fields(url, model):
    """Fields of OpenAI's API that change no answer here."""
    answer = _chat(
        url, model, store=False, metadata={"a": "b"}, user="u", service_tier="auto",
        safety_identifier="s", prompt_cache_key="k",
        extra_body={"prompt_cache_retention": "24h"},
    )  # fmt: skip
    assert answer.choices
    assert _chat(url, model, store=True).choices


def fields_of_other_servers(url, model):
    """What clients of OpenRouter, Ollama and Qwen's models send."""
    extra = {
        "provider": {"order": ["x"]}, "usage": {"include": True}, "num_ctx": 4096,
        "enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False},
    }  # fmt: skip
    assert _chat(url, model, extra_body=extra).choices
    assert _chat(url, model, extra_body={"no_such_field": None}).choices


def misspelt_fields(url, model):
    """A near miss of a field's name is refused with the name."""
    try:
        _chat(url, model, extra_body={"temprature": 0})
    except openai.BadRequestError as error:
        assert "temperature" in error.message, error.body
        assert error.param == "temprature", error.body
    else:
        raise AssertionError("temprature was accepted")


def audio_is_refused(url, model):
    """Fields that would change the answer are refused by name."""
    for fields in (
        {"modalities": ["text", "audio"], "audio": {"voice": "ash", "format": "wav"}},
        {"prediction": {"type": "content", "content": "x"}},
        {"web_search_options": {}},
    ):
        try:
            _chat(url, model, **fields)
        except openai.BadRequestError as error:
            assert any(name in error.message for name in fields), error.body
        else:
            raise AssertionError(f"{fields} was accepted")


def overflow(url, model):
    """A prompt that does not fit has OpenAI's code."""
    for call in (
        lambda: _chat(url, model, messages=[{"role": "user", "content": TOO_LONG}]),
        lambda: _stream(url, model, messages=[{"role": "user", "content": TOO_LONG}]),
        lambda: _respond(url, model, input=TOO_LONG),
    ):
        try:
            call()
        except openai.BadRequestError as error:
            assert error.code == "context_length_exceeded", error.body
            assert "maximum context length" in error.message, error.body
        else:
            raise AssertionError("4,096 tokens are not enough for this prompt")


def completions(url, model):
    """Text, several prompts, echo with log-probabilities, stream."""
    client = _client(url)
    answer = client.completions.create(model=model, prompt=[PROMPT, "class A:"], max_tokens=8)
    assert [choice.index for choice in answer.choices] == [0, 1]
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=1, echo=True, logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text.startswith(PROMPT)
    assert logprobs.token_logprobs[0] is None and len(logprobs.tokens) > 3
    assert "".join(logprobs.tokens).endswith(answer.choices[0].text)
    stream = client.completions.create(model=model, prompt=PROMPT, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream)
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, suffix=None, best_of=1, user="u"
    )
    assert answer.choices


def completions_best_of(url, model):
    client = _client(url)
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, n=1, best_of=3, temperature=1
    )
    assert len(answer.choices) == 1


def completions_max_completion_tokens(url, model):
    client = _client(url)
    answer = client.completions.create(
        model=model, prompt=PROMPT, extra_body={"max_completion_tokens": 3}
    )
    assert answer.usage.completion_tokens == 3


def embeddings_are_refused(url, model):
    client = _client(url)
    try:
        client.embeddings.create(model=model, input="text")
    except openai.APIStatusError as error:
        assert error.status_code in (400, 404, 501) and error.message, error.body
    else:
        raise AssertionError("this server has no embeddings")


def responses(url, model):
    answer = _respond(url, model, instructions="Be terse.")
    assert answer.output_text and answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage.output_tokens == 24


def responses_stream(url, model):
    client = _client(url)
    events = list(
        client.responses.create(
            model=model, input=PROMPT, max_output_tokens=24, stream=True, store=False
        )
    )
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert events[0].type == "response.created" and text
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert events[-1].response.output_text == text
    assert [e.sequence_number for e in events] == list(range(len(events)))


def responses_stream_helper(url, model):
    """`client.responses.stream`, which keeps a snapshot. It knows no incomplete end, so the answer
    has a form that ends it.
    """
    with _client(url).responses.stream(
        model=model, input=PROMPT, max_output_tokens=200, text_format=Person
    ) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Person)


def responses_parse(url, model):
    client = _client(url)
    answer = client.responses.parse(
        model=model, input=PROMPT, text_format=Person, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Person)


def responses_tools(url, model):
    """A forced call, and its result sent back in the next input."""
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    first = _respond(
        url, model, tools=[tool], tool_choice="required", max_output_tokens=200, store=False
    )
    [call, *_] = [item for item in first.output if item.type == "function_call"]
    check_weather_arguments(json.loads(call.arguments))
    history = [
        {"role": "user", "content": PROMPT},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": WEATHER_RESULT},
    ]
    second = _respond(url, model, input=history, tools=[tool], store=False)
    assert second.output


def responses_tools_streamed(url, model):
    tool = {"type": "function", "strict": True, **WEATHER["function"]}
    client = _client(url)
    events = list(
        client.responses.create(
            model=model, input=PROMPT, tools=[tool], tool_choice="required",
            max_output_tokens=200, stream=True,
        )
    )  # fmt: skip
    kinds = [event.type for event in events]
    assert "response.function_call_arguments.done" in kinds, kinds
    [call, *_] = events[-1].response.output
    check_weather_arguments(json.loads(call.arguments))


def responses_go_on(url, model):
    """`store`, retrieve, `previous_response_id`, delete."""
    client = _client(url)
    first = client.responses.create(model=model, input=PROMPT, max_output_tokens=8)
    assert client.responses.retrieve(first.id).id == first.id
    second = client.responses.create(
        model=model, input="Go on.", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens
    client.responses.delete(first.id)


def responses_harmless_fields(url, model):
    answer = _respond(
        url, model, truncation="auto", metadata={"a": "b"}, service_tier="auto", include=[],
        parallel_tool_calls=True, reasoning={"effort": "low"}, text={"verbosity": "low"},
        max_tool_calls=3, prompt_cache_key="k", safety_identifier="s", top_logprobs=0,
    )  # fmt: skip
    assert answer.output_text
    assert _respond(url, model, include=["reasoning.encrypted_content"], store=False).output


def responses_conversation(url, model):
    """Conversations and the tokens of an input."""
    client = _client(url)
    counted = client.responses.input_tokens.count(model=model, input=PROMPT)
    assert counted.input_tokens > 0
    conversation = client.conversations.create()
    for text in (PROMPT, "Go on."):
        answer = client.responses.create(
            model=model, input=text, conversation=conversation.id, max_output_tokens=8
        )
    assert answer.usage.input_tokens > counted.input_tokens
    client.conversations.delete(conversation.id)


def asynchronous(url, model):
    """`AsyncOpenAI`, eight requests at a time."""

    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            one = lambda: client.chat.completions.create(  # noqa: E731
                model=model, messages=MESSAGES, max_tokens=8
            )
            return await asyncio.gather(*(one() for _ in range(8)))

    assert all(answer.choices[0].message.content for answer in asyncio.run(ask()))


def raw_headers(url, model):
    """The id of a request comes back in the header that the client reads."""
    client = _client(url)
    reply = client.chat.completions.with_raw_response.create(
        model=model, messages=MESSAGES, max_tokens=4
    )
    assert reply.request_id and reply.parse()._request_id == reply.request_id
