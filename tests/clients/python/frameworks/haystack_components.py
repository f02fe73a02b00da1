"""Haystack: its chat generator, whole, streamed, with tools and forms, alone and in a pipeline."""

import json

from haystack import Pipeline
from haystack.components.builders import ChatPromptBuilder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

from tests.clients.scenarios import (
    PERSON_FORMAT,
    PROMPT,
    WEATHER_CHOICE,
    WEATHER_PARAMETERS,
    WEATHER_RESULT,
    check_person,
    check_weather_arguments,
)

MESSAGES = [ChatMessage.from_system("You are terse."), ChatMessage.from_user(PROMPT)]


def _generator(url, model, **fields):
    given = {"max_completion_tokens": 60, **fields.pop("generation_kwargs", {})}
    return OpenAIChatGenerator(
        api_key=Secret.from_token("none"), model=model, api_base_url=f"{url}/v1",
        generation_kwargs=given, **fields,
    )  # fmt: skip


def _weather():
    return Tool(
        name="get_weather", description="The weather in a city.", parameters=WEATHER_PARAMETERS,
        function=lambda city: WEATHER_RESULT,
    )  # fmt: skip


def chat(url, model):
    [reply] = _generator(url, model).run(MESSAGES)["replies"]
    assert reply.text and reply.meta["finish_reason"] in ("stop", "length")
    assert reply.meta["usage"]["completion_tokens"] <= 60


def chat_n_seed_stop(url, model):
    fields = {"n": 2, "temperature": 1.0, "seed": 3, "stop": ["zzz"]}
    replies = _generator(url, model, generation_kwargs=fields).run(MESSAGES)["replies"]
    assert len(replies) == 2


def chat_stream(url, model):
    pieces = []
    whole = _generator(url, model).run(MESSAGES)["replies"][0].text
    made = _generator(
        url, model, streaming_callback=lambda chunk: pieces.append(chunk.content),
        generation_kwargs={"stream_options": {"include_usage": True}},
    )  # fmt: skip
    [reply] = made.run(MESSAGES)["replies"]
    assert reply.text == "".join(pieces) == whole
    assert reply.meta["usage"]["completion_tokens"]


def json_schema(url, model):
    fields = {"response_format": PERSON_FORMAT, "max_completion_tokens": 200}
    [reply] = _generator(url, model, generation_kwargs=fields).run(MESSAGES)["replies"]
    check_person(json.loads(reply.text))


def tools_named(url, model):
    fields = {"tool_choice": WEATHER_CHOICE, "max_completion_tokens": 200}
    made = _generator(url, model, tools=[_weather()], generation_kwargs=fields)
    [reply] = made.run(MESSAGES)["replies"]
    [call] = reply.tool_calls
    assert call.tool_name == "get_weather"
    check_weather_arguments(call.arguments)


def tools_streamed_and_result_sent_back(url, model):
    fields = {"tool_choice": "required", "max_completion_tokens": 300, "parallel_tool_calls": False}
    made = _generator(
        url, model, tools=[_weather()], generation_kwargs=fields, streaming_callback=lambda _: None
    )
    [reply] = made.run(MESSAGES)["replies"]
    [call] = reply.tool_calls
    check_weather_arguments(call.arguments)
    result = ChatMessage.from_tool(tool_result=WEATHER_RESULT, origin=call)
    [end] = _generator(url, model).run([*MESSAGES, reply, result])["replies"]
    assert end.text


def pipeline(url, model):
    made = Pipeline()
    made.add_component("prompt", ChatPromptBuilder(template=[ChatMessage.from_user("def {{ n }}")]))
    made.add_component("model", _generator(url, model))
    made.connect("prompt.prompt", "model.messages")
    found = made.run({"prompt": {"n": "add(a, b):"}})
    assert found["model"]["replies"][0].text
