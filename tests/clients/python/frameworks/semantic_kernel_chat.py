"""Semantic Kernel: its OpenAI connector, with functions that it calls itself."""

import asyncio
import json
from enum import StrEnum
from typing import Annotated

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, FunctionCallContent
from semantic_kernel.functions import kernel_function

from tests.clients.scenarios import (
    PERSON_FORMAT,
    PROMPT,
    SYSTEM,
    WEATHER_RESULT,
    check_person,
    check_weather_arguments,
)


class City(StrEnum):
    ULM = "Ulm"
    BONN = "Bonn"


class Weather:
    @kernel_function(description="The weather in a city.")
    def get_weather(self, city: Annotated[City, "its name"]) -> str:
        return WEATHER_RESULT


def _history():
    history = ChatHistory(system_message=SYSTEM)
    history.add_user_message(PROMPT)
    return history


def _run(url, model, use, **fields):
    async def run():
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            service = OpenAIChatCompletion(ai_model_id=model, async_client=client)
            settings = OpenAIChatPromptExecutionSettings(**{"max_tokens": 60, **fields})
            return await use(service, settings)

    return asyncio.run(run())


def chat(url, model):
    async def use(service, settings):
        return await service.get_chat_message_content(_history(), settings)

    reply = _run(url, model, use)
    assert str(reply) and reply.metadata["usage"].completion_tokens


def chat_stream(url, model):
    async def use(service, settings):
        pieces = service.get_streaming_chat_message_content(_history(), settings)
        return "".join([str(piece) async for piece in pieces])

    assert _run(url, model, use)


def json_schema(url, model):
    async def use(service, settings):
        return await service.get_chat_message_content(_history(), settings)

    reply = _run(url, model, use, response_format=PERSON_FORMAT, max_tokens=200)
    check_person(json.loads(str(reply)))


def tools_required(url, model):
    """The call itself, which the kernel is told not to run."""

    async def use(service, settings):
        kernel = Kernel()
        kernel.add_plugin(Weather(), "place")
        settings.function_choice_behavior = FunctionChoiceBehavior.Required(auto_invoke=False)
        return await service.get_chat_message_content(_history(), settings, kernel=kernel)

    reply = _run(url, model, use, max_tokens=300)
    calls = [item for item in reply.items if isinstance(item, FunctionCallContent)]
    assert calls and calls[0].name == "place-get_weather"
    check_weather_arguments(calls[0].parse_arguments())


def tools_run_by_the_kernel(url, model):
    """A call that the kernel runs, and an answer to its result."""

    async def use(service, settings):
        kernel = Kernel()
        kernel.add_plugin(Weather(), "place")
        behavior = FunctionChoiceBehavior.Required(auto_invoke=True)
        behavior.maximum_auto_invoke_attempts = 1
        settings.function_choice_behavior = behavior
        history = _history()
        return await service.get_chat_message_content(history, settings, kernel=kernel)

    assert _run(url, model, use, max_tokens=300) is not None
