"""openai-agents over chat completions and responses."""

import asyncio
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.clients.scenarios import PROMPT, TOO_LONG, WEATHER_RESULT

set_tracing_disabled(True)


class Person(BaseModel):
    """A person."""

    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


@function_tool
def get_weather(city: Literal["Ulm", "Bonn"]) -> str:
    """The weather in a city."""
    return WEATHER_RESULT


def _agent(api, url, model, settings=None, **fields):
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chosen = ModelSettings(max_tokens=200, **(settings or {}))
    # Without instructions the small model ends its answer, which this client wants over responses.
    return Agent(
        name="Terse", model=api(model=model, openai_client=client),
        model_settings=chosen, **fields,
    )  # fmt: skip


def _text(api, url, model):
    result = asyncio.run(Runner.run(_agent(api, url, model), PROMPT))
    assert result.final_output and result.context_wrapper.usage.output_tokens


def _stream(api, url, model):
    async def ask():
        result = Runner.run_streamed(_agent(api, url, model), PROMPT)
        kinds = [event.type async for event in result.stream_events()]
        assert "raw_response_event" in kinds and result.final_output

    asyncio.run(ask())


def _form(api, url, model):
    result = asyncio.run(Runner.run(_agent(api, url, model, output_type=Person), PROMPT))
    assert isinstance(result.final_output, Person)


def _tools(api, url, model, is_streamed=False):
    """First a call that is required, then its result with the choice reset to `auto`."""
    agent = _agent(api, url, model, {"tool_choice": "required"}, tools=[get_weather])

    async def ask():
        if not is_streamed:
            return await Runner.run(agent, PROMPT, max_turns=4)
        result = Runner.run_streamed(agent, PROMPT, max_turns=4)
        async for _ in result.stream_events():
            pass
        return result

    try:
        result = asyncio.run(ask())
    except MaxTurnsExceeded:
        return  # the tiny model goes on calling
    except ModelBehaviorError as error:
        assert "response.incomplete" in str(error), error
        return  # its answer is long, which this client takes as an error over responses
    kinds = [item.type for item in result.new_items]
    assert "tool_call_output_item" in kinds, kinds


def _named_tool(api, url, model):
    agent = _agent(
        api, url, model, {"tool_choice": "get_weather", "parallel_tool_calls": False},
        tools=[get_weather], tool_use_behavior=StopAtTools(stop_at_tool_names=["get_weather"]),
    )  # fmt: skip
    assert asyncio.run(Runner.run(agent, PROMPT)).final_output == WEATHER_RESULT


def _handoff(api, url, model):
    """A handoff is a tool without parameters."""
    other = _agent(api, url, model)
    other.name = "Other"
    agent = _agent(api, url, model, {"tool_choice": "required"}, handoffs=[handoff(other)])
    try:
        result = asyncio.run(Runner.run(agent, PROMPT, max_turns=3))
    except ModelBehaviorError as error:
        assert "response.incomplete" in str(error), error  # the second agent's, as above
    else:
        assert result.last_agent.name == "Other"


def _settings(api, url, model):
    """What agents set for models of OpenAI."""
    settings = {
        "temperature": 0.5, "top_p": 0.9, "truncation": "auto", "store": False,
        "metadata": {"a": "b"}, "reasoning": Reasoning(effort="low"), "verbosity": "low",
        "prompt_cache_retention": "24h", "include_usage": True,
    }  # fmt: skip
    assert asyncio.run(Runner.run(_agent(api, url, model, settings), PROMPT)).final_output


def _overflow(api, url, model):
    """No exception of its own: `openai`'s with its code."""
    try:
        asyncio.run(Runner.run(_agent(api, url, model), TOO_LONG))
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded", error.body
    else:
        raise AssertionError("4,096 tokens are not enough for this prompt")


def chat_text(url, model):
    _text(OpenAIChatCompletionsModel, url, model)


def chat_stream(url, model):
    _stream(OpenAIChatCompletionsModel, url, model)


def chat_form(url, model):
    _form(OpenAIChatCompletionsModel, url, model)


def chat_tools(url, model):
    _tools(OpenAIChatCompletionsModel, url, model)


def chat_tools_streamed(url, model):
    _tools(OpenAIChatCompletionsModel, url, model, is_streamed=True)


def chat_named_tool(url, model):
    _named_tool(OpenAIChatCompletionsModel, url, model)


def chat_handoff(url, model):
    _handoff(OpenAIChatCompletionsModel, url, model)


def chat_settings(url, model):
    _settings(OpenAIChatCompletionsModel, url, model)


def chat_overflow(url, model):
    _overflow(OpenAIChatCompletionsModel, url, model)


def responses_text(url, model):
    _text(OpenAIResponsesModel, url, model)


def responses_stream(url, model):
    _stream(OpenAIResponsesModel, url, model)


def responses_form(url, model):
    _form(OpenAIResponsesModel, url, model)


def responses_tools(url, model):
    _tools(OpenAIResponsesModel, url, model)


def responses_tools_streamed(url, model):
    _tools(OpenAIResponsesModel, url, model, is_streamed=True)


def responses_named_tool(url, model):
    _named_tool(OpenAIResponsesModel, url, model)


def responses_handoff(url, model):
    _handoff(OpenAIResponsesModel, url, model)


def responses_settings(url, model):
    _settings(OpenAIResponsesModel, url, model)


def responses_overflow(url, model):
    _overflow(OpenAIResponsesModel, url, model)
