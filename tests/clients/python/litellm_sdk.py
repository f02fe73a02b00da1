"""litellm as a library: the providers `hosted_vllm`, `openai` and `anthropic`."""

import asyncio
import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no look-ups in the network

import litellm  # noqa: E402

from tests.clients.scenarios import (  # noqa: E402
    CITIES,
    MESSAGES,
    PERSON_FORMAT,
    PROMPT,
    TOO_LONG,
    WEATHER,
    WEATHER_CHOICE,
    WEATHER_RESULT,
    check_person,
)

PROVIDERS = ("hosted_vllm", "openai")

litellm.suppress_debug_info = True


def _ask(url, model, provider="hosted_vllm", **fields):
    base = url if provider == "anthropic" else f"{url}/v1"
    given = {"messages": MESSAGES, "max_tokens": 24, "api_key": "none", "num_retries": 0, **fields}
    return litellm.completion(model=f"{provider}/{model}", api_base=base, **given)


def chat(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        assert _ask(url, model, provider).choices[0].message.content, provider


def chat_stream(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        chunks = list(_ask(url, model, provider, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks), provider
        assert chunks[-1].choices[0].finish_reason in ("stop", "length"), provider


def chat_sampling(url, model):
    for provider in PROVIDERS:
        answer = _ask(
            url, model, provider, n=2, seed=1, temperature=0.7, top_p=0.9, logprobs=True,
            top_logprobs=2, stop=["\n\n\n"], presence_penalty=0.1,
        )  # fmt: skip
        assert len(answer.choices) == 2 and answer.choices[0].logprobs.content, provider


def extra_sampling(url, model):
    """Fields of this kind of server pass through."""
    assert _ask(url, model, top_k=5, min_p=0.01, repetition_penalty=1.1).choices


def reasoning_effort(url, model):
    for provider in PROVIDERS:
        fields = {"reasoning_effort": "low", "allowed_openai_params": ["reasoning_effort"]}
        assert _ask(url, model, provider, **fields).choices, provider


def thinking_of_anthropic(url, model):
    """Anthropic's `thinking` passes through."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    fields = {"thinking": thinking, "max_tokens": 2000, "stop": ["\n"],
              "allowed_openai_params": ["thinking"]}  # fmt: skip
    assert _ask(url, model, "anthropic", **fields).choices


def json_schema(url, model):
    for provider in PROVIDERS:
        answer = _ask(url, model, provider, response_format=PERSON_FORMAT, max_tokens=200)
        check_person(json.loads(answer.choices[0].message.content))


def json_schema_of_anthropic(url, model):
    """litellm asks with a forced tool, or with `output_format`."""
    answer = _ask(url, model, "anthropic", response_format=PERSON_FORMAT, max_tokens=200)
    check_person(json.loads(answer.choices[0].message.content))


def tools_auto(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        message = _ask(url, model, provider, tools=[WEATHER], tool_choice="auto").choices[0].message
        assert message.content or message.tool_calls, provider


def tools_required(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
        [call, *_] = _ask(url, model, provider, **fields).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES


def tools_named(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        fields = {"tools": [WEATHER], "tool_choice": WEATHER_CHOICE, "max_tokens": 200}
        [call, *_] = _ask(url, model, provider, **fields).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES


def tools_result_sent_back(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        fields = {"tools": [WEATHER], "max_tokens": 200}
        spoken = _ask(url, model, provider, tool_choice="required", **fields).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": WEATHER_RESULT}
            for call in spoken.tool_calls
        ]
        second = _ask(url, model, provider, messages=[*MESSAGES, spoken, *results], **fields)
        assert second.choices[0].message.content or second.choices[0].message.tool_calls, provider


def tools_streamed(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
        chunks = list(_ask(url, model, provider, stream=True, **fields))
        whole = litellm.stream_chunk_builder(chunks)
        [call, *_] = whole.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES


def overflow(url, model):
    for provider in (*PROVIDERS, "anthropic"):
        try:
            _ask(url, model, provider, messages=[{"role": "user", "content": TOO_LONG}])
        except litellm.ContextWindowExceededError:
            continue
        raise AssertionError(provider)


def text_completion(url, model):
    answer = litellm.text_completion(
        model=f"hosted_vllm/{model}", api_base=f"{url}/v1", prompt=PROMPT, max_tokens=8
    )
    assert answer.choices[0].text


def responses(url, model):
    """`litellm.responses`, natively and by chat."""
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.responses(
            model=f"{provider}/{model}", api_base=f"{url}/v1", api_key="none", input=PROMPT,
            max_output_tokens=24,
        )  # fmt: skip
        assert answer.output, provider


def embeddings_are_refused(url, model):
    try:
        litellm.embedding(model=f"hosted_vllm/{model}", api_base=f"{url}/v1", input=["text"])
    except litellm.exceptions.APIConnectionError as error:
        raise AssertionError(error) from error
    except Exception as error:
        assert getattr(error, "status_code", None) in (400, 404, 501), error
    else:
        raise AssertionError("this server has no embeddings")


def batch_and_async(url, model):
    async def ask():
        one = lambda: litellm.acompletion(  # noqa: E731
            model=f"hosted_vllm/{model}", api_base=f"{url}/v1", messages=MESSAGES, max_tokens=8
        )
        return await asyncio.gather(*(one() for _ in range(4)))

    assert all(answer.choices[0].message.content for answer in asyncio.run(ask()))
    answers = litellm.batch_completion(
        model=f"hosted_vllm/{model}", api_base=f"{url}/v1", messages=[MESSAGES] * 3, max_tokens=8
    )
    assert all(answer.choices[0].message.content for answer in answers), answers
