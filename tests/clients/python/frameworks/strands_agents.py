"""Strands Agents: its OpenAI model, streamed, with tools and structured output."""

from contextlib import suppress

from pydantic import BaseModel
from strands import Agent, tool
from strands.models.openai import OpenAIModel
from strands.types.exceptions import MaxTokensReachedException

from tests.clients.scenarios import PROMPT, WEATHER_RESULT


class Flag(BaseModel):
    """A yes or no."""

    value: bool


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return WEATHER_RESULT


def _agent(url, model, **fields):
    params = {"max_tokens": 400, "temperature": 0, "stop": ["\n"]}  # a cut answer is an exception
    made = OpenAIModel(
        client_args={"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0},
        model_id=model, params=params,
    )  # fmt: skip
    return Agent(model=made, callback_handler=None, **fields)


def chat(url, model):
    answer = _agent(url, model, system_prompt="You are terse.")(PROMPT)
    assert str(answer).strip() and answer.metrics.accumulated_usage["outputTokens"]


def json_schema(url, model):
    """The form is sent by openai's `parse`."""
    answer = _agent(url, model).structured_output(Flag, PROMPT)
    assert answer.value in (True, False)


def tools_auto(url, model):
    """Whether the model calls the tool is its choice; the turns have to be taken."""
    agent = _agent(url, model, tools=[get_weather])
    with suppress(MaxTokensReachedException):
        agent("What is the weather in Ulm?")
    assert agent.messages[-1]["role"] == "assistant"


def result_sent_back(url, model):
    use = {"toolUseId": "call_1", "name": "get_weather", "input": {"city": "Ulm"}}
    result = {"toolUseId": "call_1", "status": "success", "content": [{"text": WEATHER_RESULT}]}
    turns = [
        {"role": "user", "content": [{"text": PROMPT}]},
        {"role": "assistant", "content": [{"toolUse": use}]},
        {"role": "user", "content": [{"toolResult": result}]},
        {"role": "assistant", "content": [{"text": "It is sunny."}]},
    ]
    assert str(_agent(url, model, tools=[get_weather], messages=turns)("And in Bonn?"))
