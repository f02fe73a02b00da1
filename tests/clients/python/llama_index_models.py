"""LlamaIndex: `OpenAILike`."""

import asyncio
from typing import Literal

from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.program import LLMTextCompletionProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict

from tests.clients.scenarios import CITIES, PROMPT, SYSTEM, TOO_LONG, WEATHER_RESULT

MESSAGES = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=PROMPT)]


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


def get_weather(city: Literal["Ulm", "Bonn"]) -> str:
    """The weather in a city."""
    return WEATHER_RESULT


def _model(url, model, **fields):
    given = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4096,
             "max_tokens": 60, "max_retries": 0, **fields}  # fmt: skip
    return OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", **given)


def chat(url, model):
    answer = _model(url, model).chat(MESSAGES)
    assert answer.message.content and answer.raw.usage.completion_tokens


def chat_stream(url, model):
    assert "".join(chunk.delta for chunk in _model(url, model).stream_chat(MESSAGES))


def chat_async(url, model):
    async def ask():
        made = _model(url, model)
        return await asyncio.gather(*(made.achat(MESSAGES) for _ in range(4)))

    assert all(answer.message.content for answer in asyncio.run(ask()))


def completion(url, model):
    """A model that is not a chat model is asked for completions."""
    made = _model(url, model, is_chat_model=False)
    assert made.complete(PROMPT).text
    assert "".join(chunk.delta for chunk in made.stream_complete(PROMPT))


def sampling(url, model):
    made = _model(
        url, model, temperature=0.5, logprobs=True, top_logprobs=2,
        additional_kwargs={"seed": 3, "stop": ["\n"], "extra_body": {"top_k": 5}},
    )  # fmt: skip
    answer = made.chat(MESSAGES)
    assert answer.logprobs and "\n" not in answer.message.content


def reasoning_effort(url, model):
    assert _model(url, model, reasoning_effort="low").chat(MESSAGES).message is not None


def json_schema(url, model):
    """`as_structured_llm` of a model with structured output."""
    made = _model(url, model, max_tokens=200, should_use_structured_outputs=True)
    answer = made.as_structured_llm(Person).chat(MESSAGES)
    assert isinstance(answer.raw, Person)


def structured_predict_by_tool(url, model):
    """Without structured output the form is a tool that is required."""
    made = _model(url, model, max_tokens=200)
    answer = made.as_structured_llm(Person).chat(MESSAGES)
    assert isinstance(answer.raw, Person)


def structured_predict_by_text(url, model):
    """A program that asks in the prompt; the form itself is held by `response_format`."""
    form = {"type": "json_schema",
            "json_schema": {"name": "person", "schema": Person.model_json_schema()}}  # fmt: skip
    made = _model(
        url, model, max_tokens=200, is_function_calling_model=False,
        additional_kwargs={"response_format": form},
    )  # fmt: skip
    program = LLMTextCompletionProgram.from_defaults(
        output_cls=Person, prompt_template_str="Who? {hint}", llm=made
    )
    assert isinstance(program(hint="Ada"), Person)


def tools_auto(url, model):
    tools = [FunctionTool.from_defaults(get_weather)]
    answer = _model(url, model).chat_with_tools(tools, user_msg=PROMPT)
    assert answer.message.blocks


def tools_required(url, model):
    made = _model(url, model, max_tokens=200)
    tools = [FunctionTool.from_defaults(get_weather)]
    answer = made.chat_with_tools(tools, user_msg=PROMPT, tool_required=True)
    [call, *_] = made.get_tool_calls_from_response(answer)
    assert call.tool_kwargs["city"] in CITIES


def tools_streamed(url, model):
    made = _model(url, model, max_tokens=200)
    tools = [FunctionTool.from_defaults(get_weather)]
    *_, last = made.stream_chat_with_tools(tools, user_msg=PROMPT, tool_required=True)
    [call, *_] = made.get_tool_calls_from_response(last)
    assert call.tool_kwargs["city"] in CITIES


def tools_result_sent_back(url, model):
    """`predict_and_call` runs the tool; then its result is part of the history."""
    made = _model(url, model, max_tokens=200)
    tools = [FunctionTool.from_defaults(get_weather)]
    first = made.chat_with_tools(tools, user_msg=PROMPT, tool_required=True)
    [call, *_] = made.get_tool_calls_from_response(first)
    result = ChatMessage(
        role="tool", content=WEATHER_RESULT, additional_kwargs={"tool_call_id": call.tool_id}
    )
    answer = made.chat_with_tools(tools, chat_history=[*MESSAGES, first.message, result])
    assert answer.message.blocks


def function_agent(url, model):
    """Its first request has the tools and `auto`, streamed."""

    async def ask():
        agent = FunctionAgent(tools=[get_weather], llm=_model(url, model), system_prompt=SYSTEM)
        return await agent.run(PROMPT, max_iterations=3, early_stopping_method="generate")

    assert asyncio.run(ask()) is not None


def react_agent(url, model):
    """An agent that needs no tools of the server; a tiny model may never end its loop well."""

    async def ask():
        agent = ReActAgent(tools=[get_weather], llm=_model(url, model))
        return await agent.run(PROMPT, max_iterations=2, early_stopping_method="generate")

    try:
        asyncio.run(ask())
    except Exception as error:
        assert not hasattr(error, "status_code"), error  # not the server's


def overflow(url, model):
    """LlamaIndex has no exception of its own: the one of `openai` with its code."""
    try:
        _model(url, model).complete(TOO_LONG)
    except Exception as error:
        assert getattr(error, "code", None) == "context_length_exceeded", error
    else:
        raise AssertionError("4,096 tokens are not enough for this prompt")
