"""AutoGen: its OpenAI client, and an agent over it."""

import asyncio
import json

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, SystemMessage, UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from pydantic import BaseModel

from tests.clients.scenarios import PROMPT, SYSTEM, WEATHER_RESULT

INFO = {
    "vision": False, "function_calling": True, "json_output": True, "structured_output": True,
    "family": ModelFamily.UNKNOWN,
}  # fmt: skip
MESSAGES = [SystemMessage(content=SYSTEM), UserMessage(content=PROMPT, source="user")]


class Flag(BaseModel):
    value: bool


def get_weather(city: str) -> str:
    return WEATHER_RESULT


def _run(url, model, use, **fields):
    async def run():
        client = OpenAIChatCompletionClient(
            model=model, base_url=f"{url}/v1", api_key="none", model_info=INFO,
            **{"max_tokens": 60, **fields},
        )  # fmt: skip
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


def chat(url, model):
    answer = _run(url, model, lambda client: client.create(MESSAGES))
    assert answer.content and answer.usage.completion_tokens
    assert answer.finish_reason in ("stop", "length")


def chat_logprobs(url, model):
    more = {"logprobs": True, "top_logprobs": 2}
    answer = _run(url, model, lambda client: client.create(MESSAGES, extra_create_args=more))
    assert all(len(each.top_logprobs) == 2 for each in answer.logprobs)


def chat_stream(url, model):
    async def use(client):
        more = {"stream_options": {"include_usage": True}}
        return [piece async for piece in client.create_stream(MESSAGES, extra_create_args=more)]

    *pieces, answer = _run(url, model, use)
    assert "".join(pieces) == answer.content and answer.usage.completion_tokens


def json_schema(url, model):
    answer = _run(url, model, lambda client: client.create(MESSAGES, json_output=Flag))
    assert json.loads(answer.content)["value"] in (True, False)


def tools_required(url, model):
    tool = FunctionTool(get_weather, description="The weather in a city.")

    async def use(client):
        return await client.create(MESSAGES, tools=[tool], tool_choice="required")

    answer = _run(url, model, use, max_tokens=300)
    assert answer.content[0].name == "get_weather"
    assert set(json.loads(answer.content[0].arguments)) == {"city"}


def agent_with_a_tool(url, model):
    """The tiny model may not call it; each turn has to be answered."""

    async def use(client):
        agent = AssistantAgent("helper", client, tools=[get_weather])
        return await agent.run(task="What is the weather in Ulm?")

    assert _run(url, model, use, max_tokens=300).messages[-1].content
