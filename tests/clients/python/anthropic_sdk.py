"""`anthropic` for Python."""

import asyncio
import json
import urllib.request
from functools import cache
from typing import Literal

import anthropic
from pydantic import BaseModel

from tests.clients.scenarios import (
    CITIES,
    PERSON,
    PROMPT,
    SYSTEM,
    TOO_LONG,
    WEATHER_PARAMETERS,
    WEATHER_RESULT,
    check_person,
    check_weather_arguments,
)

MESSAGES = [{"role": "user", "content": PROMPT}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": WEATHER_PARAMETERS,
}
CACHED = {"type": "ephemeral"}


class Person(BaseModel):
    """The form as clients of today write it."""

    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


@cache
def _client(url):
    """One for all modes: making one takes as long as a request."""
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=100)


def _create(url, model, **fields):
    given = {"messages": MESSAGES, "max_tokens": 24, **fields}
    return _client(url).messages.create(model=model, **given)


def models(url, model):
    """The list, as OpenAI's and Anthropic's client read it."""
    client = _client(url)
    [served] = client.models.list().data
    assert served.id == model and served.type == "model" and served.display_name


def message(url, model):
    answer = _create(url, model, system=SYSTEM)
    assert answer.type == "message" and answer.role == "assistant"
    assert answer.content[0].text and answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 24


def message_stream(url, model):
    client = _client(url)
    events = list(
        client.messages.create(model=model, max_tokens=24, messages=MESSAGES, stream=True)
    )
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    with client.messages.stream(model=model, max_tokens=24, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        assert text and stream.get_final_text() == text


def stopped_stream(url, model):
    with _client(url).messages.stream(model=model, max_tokens=4000, messages=MESSAGES) as stream:
        next(iter(stream.text_stream))
    for _ in range(60):
        with urllib.request.urlopen(f"{url}/load") as reply:
            if json.load(reply)["server_load"] == 0:
                return
    raise AssertionError("the request still runs")


def sampling(url, model):
    """temperature, top_p, top_k and stop sequences (which a newer client may send as extra)."""
    extra = {"temperature": 0.5, "top_p": 0.9, "top_k": 10}
    assert _create(url, model, extra_body=extra).content
    answer = _create(url, model, stop_sequences=["\n"], max_tokens=200)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "\n")


def prefill(url, model):
    """The answer goes on from an assistant's turn at the end."""
    prefilled = [*MESSAGES, {"role": "assistant", "content": "def add(a, b):\n    return"}]
    extra = {"temperature": 0}
    answer = _create(url, model, messages=prefilled, extra_body=extra)
    assert not answer.content[0].text.startswith("def add")
    plain = _create(url, model, messages=MESSAGES, extra_body=extra)
    assert answer.usage.input_tokens > plain.usage.input_tokens


def blocks_and_cache_control(url, model):
    """Text as blocks with `cache_control`, in the system prompt, messages and tools."""
    block = {"type": "text", "text": PROMPT, "cache_control": CACHED}
    answer = _create(
        url, model, system=[{"type": "text", "text": SYSTEM, "cache_control": CACHED}],
        messages=[{"role": "user", "content": [block, {"type": "text", "text": "Go."}]}],
        tools=[{**WEATHER, "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        tool_choice={"type": "none"},
    )  # fmt: skip
    assert answer.content


def json_schema(url, model):
    """Structured output as `output_config.format`."""
    form = {"type": "json_schema", "schema": PERSON}
    answer = _create(url, model, max_tokens=200, extra_body={"output_config": {"format": form}})
    check_person(json.loads(answer.content[0].text))


def parse(url, model):
    """`messages.parse` with a Pydantic class."""
    client = _client(url)
    answer = client.messages.parse(
        model=model, max_tokens=200, messages=MESSAGES, output_format=Person
    )
    assert isinstance(answer.parsed_output, Person)


def tools_auto(url, model):
    answer = _create(url, model, tools=[WEATHER])
    assert answer.content
    assert _create(url, model, tools=[WEATHER], tool_choice={"type": "auto"}).content


def tools_any(url, model):
    answer = _create(url, model, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=200)
    [call, *_] = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.id and call.name == "get_weather"
    check_weather_arguments(call.input)


def tools_named(url, model):
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    answer = _create(url, model, tools=[WEATHER], tool_choice=choice, max_tokens=200)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use"
    check_weather_arguments(call.input)


def tools_strict(url, model):
    """`strict`, `eager_input_streaming` and `input_examples` of a tool."""
    strict = {**WEATHER, "strict": True, "type": "custom", "input_examples": [{"city": CITIES[0]}],
              "eager_input_streaming": True}  # fmt: skip
    answer = _create(url, model, tools=[strict], tool_choice={"type": "any"}, max_tokens=200)
    assert answer.stop_reason == "tool_use"


def tools_result_sent_back(url, model):
    first = _create(url, model, tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=200)
    [call, *_] = [block for block in first.content if block.type == "tool_use"]
    contents = (WEATHER_RESULT, [{"type": "text", "text": WEATHER_RESULT}])
    for content in contents:
        result = {"type": "tool_result", "tool_use_id": call.id, "content": content,
                  "is_error": False}  # fmt: skip
        spoken = {"role": "assistant", "content": [call.model_dump(exclude_none=True)]}
        history = [*MESSAGES, spoken, {"role": "user", "content": [result]}]
        assert _create(url, model, messages=history, tools=[WEATHER]).content


def tools_streamed(url, model):
    with (
        _client(url).messages.stream(
            model=model, max_tokens=200, messages=MESSAGES, tools=[WEATHER],
            tool_choice={"type": "any"},
        ) as stream,
    ):  # fmt: skip
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    [call, *_] = [block for block in final.content if block.type == "tool_use"]
    assert parts and final.stop_reason == "tool_use"
    check_weather_arguments(call.input)


def tools_of_anthropic_are_left_out(url, model):
    """Tools of Anthropic's server are left out, and refused by name where one is demanded."""
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    assert _create(url, model, tools=tools).content
    try:
        _create(url, model, tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    except anthropic.BadRequestError as error:
        assert "web_search" in str(error), error.body
    else:
        raise AssertionError("a demanded web search was accepted")


def thinking(url, model):
    """`thinking` of a model that cannot: disabled, adaptive and enabled are harmless."""
    for given in (
        {"type": "disabled"},
        {"type": "adaptive"},
        {"type": "enabled", "budget_tokens": 1024},
    ):
        answer = _create(url, model, max_tokens=1500, stop_sequences=["\n"], thinking=given)
        assert answer.type == "message", given


def effort(url, model):
    assert _create(url, model, extra_body={"output_config": {"effort": "low"}}).content


def harmless_fields(url, model):
    answer = _create(
        url, model, metadata={"user_id": "ada"}, service_tier="auto",
        extra_body={"context_management": {"edits": []}, "container": None, "mcp_servers": []},
        extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14"},
    )  # fmt: skip
    assert answer.content


def beta_client(url, model):
    """`client.beta.messages`, which asks with `?beta=true`."""
    client = _client(url)
    answer = client.beta.messages.create(
        model=model, max_tokens=8, messages=MESSAGES, betas=["token-efficient-tools-2025-02-19"]
    )
    assert answer.content
    counted = client.beta.messages.count_tokens(model=model, messages=MESSAGES)
    assert counted.input_tokens == answer.usage.input_tokens


def tool_runner(url, model):
    """`client.beta.messages.tool_runner`, the loop of this client."""

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        return WEATHER_RESULT

    client = _client(url)
    runner = client.beta.messages.tool_runner(
        model=model, max_tokens=60, messages=MESSAGES, tools=[get_weather], max_iterations=2
    )
    assert runner.until_done().content


def count_tokens(url, model):
    client = _client(url)
    counted = client.messages.count_tokens(
        model=model, messages=MESSAGES, system=SYSTEM, tools=[WEATHER]
    )
    assert counted.input_tokens > 5


def batches(url, model):
    """Create, wait, results, delete."""
    params = {"model": model, "max_tokens": 8, "messages": MESSAGES}
    client = _client(url)
    batch = client.messages.batches.create(
        requests=[{"custom_id": name, "params": params} for name in ("a", "b")]
    )
    while client.messages.batches.retrieve(batch.id).processing_status != "ended":
        pass
    results = {entry.custom_id: entry.result for entry in client.messages.batches.results(batch.id)}
    assert set(results) == {"a", "b"}
    assert all(result.type == "succeeded" for result in results.values())


def overflow(url, model):
    """Anthropic's type of error and the phrase that its clients look for."""
    try:
        _create(url, model, messages=[{"role": "user", "content": TOO_LONG}])
    except anthropic.BadRequestError as error:
        assert error.type == "invalid_request_error", error.body
        assert "prompt is too long" in str(error), error.body
    else:
        raise AssertionError("4,096 tokens are not enough for this prompt")


def errors(url, model):
    """A field's error and an unknown model have Anthropic's shape."""
    try:
        _create(url, model, extra_body={"temprature": 1})
    except anthropic.BadRequestError as error:
        assert error.body["type"] == "error", error.body
        assert error.body["error"]["type"] == "invalid_request_error", error.body
        assert "temperature" in error.body["error"]["message"], error.body
    else:
        raise AssertionError("temprature was accepted")
    try:
        _create(url, "no-such-model")
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error", error.body
    else:
        raise AssertionError("a model that is not there answered")


def asynchronous(url, model):
    async def ask():
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
            one = lambda: client.messages.create(  # noqa: E731
                model=model, max_tokens=8, messages=MESSAGES
            )
            return await asyncio.gather(*(one() for _ in range(8)))

    assert all(answer.content for answer in asyncio.run(ask()))
