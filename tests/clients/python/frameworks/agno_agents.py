"""Agno: `OpenAILike` and its `VLLM` model in agents."""

from agno.agent import Agent
from agno.models.openai.like import OpenAILike
from agno.models.vllm import VLLM
from pydantic import BaseModel

from tests.clients.scenarios import PROMPT, WEATHER_RESULT


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER_RESULT


def _model(url, model, kind=OpenAILike, **fields):
    given = {"max_tokens": 60, "temperature": 0, **fields}
    return kind(id=model, base_url=f"{url}/v1", api_key="none", **given)


def chat(url, model):
    answer = Agent(model=_model(url, model), telemetry=False).run(PROMPT)
    assert answer.content and answer.metrics.output_tokens


def chat_vllm(url, model):
    """The class for vLLM sends `top_k` and `enable_thinking` as its server takes them."""
    made = _model(url, model, VLLM, top_k=5, enable_thinking=False)
    assert Agent(model=made, telemetry=False).run(PROMPT).content


def chat_stream(url, model):
    events = Agent(model=_model(url, model), telemetry=False).run(PROMPT, stream=True)
    assert "".join(getattr(event, "content", None) or "" for event in events)


def json_schema(url, model):
    made = _model(url, model, max_tokens=300)
    agent = Agent(model=made, output_schema=Person, structured_outputs=True, telemetry=False)
    answer = agent.run(PROMPT)
    assert isinstance(answer.content, Person) or answer.content  # a name may be endless


def agent_with_a_tool(url, model):
    """The tiny model may not call it; a forced call would be forced in each turn."""
    made = _model(url, model, max_tokens=300)
    answer = Agent(model=made, tools=[get_weather], telemetry=False).run("Is it sunny in Ulm?")
    assert answer.content or answer.tools
