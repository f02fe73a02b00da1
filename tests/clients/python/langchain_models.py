"""LangChain: `ChatOpenAI` over chat and responses, `OpenAI`, `ChatAnthropic`, and an agent."""

import asyncio

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from tests.clients.scenarios import (
    PERSON,
    PROMPT,
    SYSTEM,
    TOO_LONG,
    WEATHER,
    WEATHER_RESULT,
    check_person,
    check_weather_arguments,
)

MESSAGES = [SystemMessage(SYSTEM), HumanMessage(PROMPT)]
FORM = {"title": "person", "description": "A person.", **PERSON}


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER_RESULT


def _chat(url, model, **fields):
    given = {"max_tokens": 60, "max_retries": 0, **fields}
    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", **given)


def _anthropic(url, model, **fields):
    given = {"max_tokens": 60, "max_retries": 0, **fields}
    return ChatAnthropic(model=model, base_url=url, api_key="none", **given)


def chat(url, model):
    answer = _chat(url, model).invoke(MESSAGES)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0


def chat_stream(url, model):
    """With a base URL of its own the framework asks for the usage only if it is told to."""
    chunks = list(_chat(url, model, stream_usage=True).stream(MESSAGES))
    assert "".join(chunk.text for chunk in chunks)
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) > 0


def chat_sampling(url, model):
    fields = {"temperature": 0.5, "seed": 3, "logprobs": True, "top_logprobs": 2, "top_p": 0.9}
    answer = _chat(url, model, stop_sequences=["\n"], **fields).invoke(MESSAGES)
    assert answer.response_metadata["logprobs"]["content"] and "\n" not in answer.content
    result = _chat(url, model, n=2, temperature=1).generate([MESSAGES])
    assert len(result.generations[0]) == 2


def chat_batch_and_async(url, model):
    assert all(a.content for a in _chat(url, model).batch([MESSAGES] * 3))
    assert asyncio.run(_chat(url, model).ainvoke(MESSAGES)).content


def chat_reasoning_effort(url, model):
    assert _chat(url, model, reasoning_effort="low").invoke(MESSAGES).content
    assert _chat(url, model, verbosity="low").invoke(MESSAGES).content


def structured_output(url, model):
    """Each method of `with_structured_output`."""
    for method in ("json_schema", "function_calling"):
        form = _chat(url, model, max_tokens=200).with_structured_output(FORM, method=method)
        check_person(form.invoke(MESSAGES))
    strict = _chat(url, model, max_tokens=200).with_structured_output(
        FORM, method="json_schema", strict=True, include_raw=True
    )
    check_person(strict.invoke(MESSAGES)["parsed"])


def structured_output_with_tools(url, model):
    """`with_structured_output(tools=...)`: a form and tools that are not forced."""
    form = _chat(url, model, max_tokens=200).with_structured_output(
        FORM, method="json_schema", tools=[get_weather], include_raw=True, strict=True
    )
    answer = form.invoke(MESSAGES)
    assert answer["parsed"] or answer["raw"].tool_calls


def tools_auto(url, model):
    answer = _chat(url, model).bind_tools([get_weather]).invoke(MESSAGES)
    assert answer.content or answer.tool_calls


def tools_required(url, model):
    for choice in ("any", "required", "get_weather", True):
        bound = _chat(url, model, max_tokens=200).bind_tools([WEATHER], tool_choice=choice)
        [call, *_] = bound.invoke(MESSAGES).tool_calls
        check_weather_arguments(call["args"])


def _stream_a_call(chat):
    bound = chat.bind_tools([WEATHER], tool_choice="any")
    chunks = list(bound.stream(MESSAGES))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    check_weather_arguments(whole.tool_calls[0]["args"])


def tools_streamed(url, model):
    _stream_a_call(_chat(url, model, max_tokens=200))


def tools_result_sent_back(url, model):
    for made in (_chat, _anthropic):
        bound = made(url, model, max_tokens=200)
        spoken = bound.bind_tools([WEATHER], tool_choice="any").invoke(MESSAGES)
        results = [ToolMessage(WEATHER_RESULT, tool_call_id=c["id"]) for c in spoken.tool_calls]
        answer = bound.bind_tools([WEATHER]).invoke([*MESSAGES, spoken, *results])
        assert answer.content or answer.tool_calls, made


def agent(url, model):
    """`create_agent`: its first request has the tools and `auto`."""
    for made in (_chat, _anthropic):
        runner = create_agent(made(url, model), tools=[get_weather], system_prompt=SYSTEM)
        state = runner.invoke(
            {"messages": [{"role": "user", "content": PROMPT}]}, {"recursion_limit": 12}
        )
        assert len(state["messages"]) >= 2


def overflow(url, model):
    for made in (_chat, _anthropic):
        try:
            made(url, model).invoke(TOO_LONG)
        except ContextOverflowError:
            continue
        raise AssertionError(made)


def responses(url, model):
    """`use_responses_api`: plain, streamed, with a form and with tools."""
    made = _chat(url, model, use_responses_api=True, max_tokens=200)
    assert made.invoke(MESSAGES).text
    assert "".join(chunk.text for chunk in made.stream(MESSAGES))
    check_person(made.with_structured_output(FORM, method="json_schema").invoke(MESSAGES))
    [call, *_] = made.bind_tools([WEATHER], tool_choice="any").invoke(MESSAGES).tool_calls
    check_weather_arguments(call["args"])


def anthropic_chat(url, model):
    assert _anthropic(url, model).invoke(MESSAGES).content
    assert "".join(chunk.text for chunk in _anthropic(url, model).stream(MESSAGES))


def anthropic_structured_output(url, model):
    for method in ("function_calling", "json_schema"):
        form = _anthropic(url, model, max_tokens=200).with_structured_output(FORM, method=method)
        check_person(form.invoke(MESSAGES))


def anthropic_tools_streamed(url, model):
    _stream_a_call(_anthropic(url, model, max_tokens=200))


def completion(url, model):
    made = OpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=12, max_retries=0)
    assert made.invoke(PROMPT)
    assert "".join(made.stream(PROMPT))


def completion_best_of(url, model):
    made = OpenAI(
        model=model, base_url=f"{url}/v1", api_key="none", max_tokens=12, best_of=2, temperature=1
    )
    assert made.invoke(PROMPT)


def embeddings_are_refused(url, model):
    made = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False,
        max_retries=0,
    )  # fmt: skip
    try:
        made.embed_query("text")
    except Exception as error:
        assert getattr(error, "status_code", None) in (400, 404, 501), error
    else:
        raise AssertionError("this server has no embeddings")
