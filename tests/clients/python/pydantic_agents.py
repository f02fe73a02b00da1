"""pydantic-ai: agents over chat, responses and Anthropic's messages, in each output mode."""

import asyncio
from contextlib import suppress
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError, UnexpectedModelBehavior
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.scenarios import PROMPT, SYSTEM, TOO_LONG, WEATHER_RESULT


class Person(BaseModel):
    """A person."""

    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


def get_weather(city: Literal["Ulm", "Bonn"]) -> str:
    """The weather in a city."""
    return WEATHER_RESULT


def _chat(url, model):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return OpenAIChatModel(model, provider=provider)


def _responses(url, model):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    return OpenAIResponsesModel(model, provider=provider)


def _anthropic(url, model):
    return AnthropicModel(model, provider=AnthropicProvider(base_url=url, api_key="none"))


MODELS = (_chat, _responses, _anthropic)


def _agent(made, url, model, **fields):
    settings = {"max_tokens": 200, **fields.pop("settings", {})}
    return Agent(
        made(url, model), system_prompt=SYSTEM, model_settings=ModelSettings(**settings), **fields
    )


def _text(made, url, model):
    result = _agent(made, url, model).run_sync(PROMPT)
    assert result.output and result.usage.output_tokens


def _stream(made, url, model):
    async def ask():
        async with _agent(made, url, model).run_stream(PROMPT) as result:
            return [text async for text in result.stream_text(delta=True)]

    assert "".join(asyncio.run(ask()))


def _form(made, url, model, kind):
    result = _agent(made, url, model, output_type=kind(Person)).run_sync(PROMPT)
    assert isinstance(result.output, Person)


def _tools(made, url, model):
    """Tools and a text, so `tool_choice` is `auto`."""
    result = _agent(made, url, model, tools=[get_weather]).run_sync(PROMPT)
    assert result.output is not None


def _tools_and_form(made, url, model):
    """Tools and a form that is a tool: every call is required, until the form's is made."""
    agent = _agent(made, url, model, tools=[get_weather], output_type=ToolOutput(Person))
    with suppress(UnexpectedModelBehavior):  # the tiny model may call the weather for ever
        assert isinstance(agent.run_sync(PROMPT).output, Person)


def _overflow(made, url, model):
    try:
        _agent(made, url, model).run_sync(TOO_LONG)
    except ModelContextWindowExceededError:
        return
    raise AssertionError("4,096 tokens are not enough for this prompt")


def chat_text(url, model):
    _text(_chat, url, model)


def chat_stream(url, model):
    _stream(_chat, url, model)


def chat_tool_output(url, model):
    _form(_chat, url, model, ToolOutput)


def chat_native_output(url, model):
    _form(_chat, url, model, NativeOutput)


def chat_prompted_output(url, model):
    """`json_object` and a prompt: what comes back may not have the form, which is not a fault."""
    with suppress(UnexpectedModelBehavior):
        _form(_chat, url, model, PromptedOutput)


def chat_tools(url, model):
    _tools(_chat, url, model)


def chat_tools_and_form(url, model):
    _tools_and_form(_chat, url, model)


def chat_settings(url, model):
    """Every setting that the framework has for OpenAI's models."""
    settings = {
        "temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 0.1,
        "frequency_penalty": 0.1, "logit_bias": {"5": -100}, "stop_sequences": ["\n\n\n"],
        "parallel_tool_calls": True, "openai_reasoning_effort": "low", "openai_user": "u",
        "openai_service_tier": "auto", "openai_logprobs": True, "openai_top_logprobs": 2,
        "openai_store": False, "openai_prompt_cache_key": "k",
        "openai_prompt_cache_retention": "24h",
    }  # fmt: skip
    assert _agent(_chat, url, model, settings=settings).run_sync(PROMPT).output


def chat_overflow(url, model):
    _overflow(_chat, url, model)


def responses_text(url, model):
    _text(_responses, url, model)


def responses_stream(url, model):
    _stream(_responses, url, model)


def responses_tool_output(url, model):
    _form(_responses, url, model, ToolOutput)


def responses_native_output(url, model):
    _form(_responses, url, model, NativeOutput)


def responses_tools(url, model):
    _tools(_responses, url, model)


def responses_overflow(url, model):
    _overflow(_responses, url, model)


def anthropic_text(url, model):
    _text(_anthropic, url, model)


def anthropic_stream(url, model):
    _stream(_anthropic, url, model)


def anthropic_tool_output(url, model):
    _form(_anthropic, url, model, ToolOutput)


def anthropic_tools(url, model):
    _tools(_anthropic, url, model)


def anthropic_overflow(url, model):
    _overflow(_anthropic, url, model)
