"""dspy: `LM` with its engines, adapters, a signature with a typed output, and ReAct."""

import asyncio
from contextlib import suppress
from typing import Literal

import dspy
from pydantic import BaseModel, ConfigDict

from tests.clients.scenarios import MESSAGES, PROMPT, TOO_LONG, WEATHER_RESULT


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


class WhoWrote(dspy.Signature):
    """Who wrote the first program?"""

    question: str = dspy.InputField()
    author: Person = dspy.OutputField()


def get_weather(city: Literal["Ulm", "Bonn"]) -> str:
    """The weather in a city."""
    return WEATHER_RESULT


class _FormLM(dspy.LM):
    """dspy looks a model's abilities up in a list of names; of others it believes nothing."""

    @property
    def supports_response_schema(self):
        return True

    @property
    def supported_params(self):
        return {"response_format", *super().supported_params}


def _lm(url, model, kind=dspy.LM, **fields):
    given = {"max_tokens": 200, "num_retries": 0, "cache": False, **fields}
    return kind(f"openai/{model}", api_base=f"{url}/v1", api_key="none", **given)


def chat(url, model):
    for engine in ("auto", "litellm"):
        [text] = _lm(url, model, engine=engine)(messages=MESSAGES)
        assert text, engine


def chat_n(url, model):
    assert len(_lm(url, model, n=2, temperature=0.9)(messages=MESSAGES)) == 2


def responses(url, model):
    assert _lm(url, model, model_type="responses")(messages=MESSAGES)


def text(url, model):
    """`model_type="text"` asks for completions."""
    assert _lm(url, model, model_type="text", max_tokens=12)(PROMPT)


def _predict(lm, adapter):
    """The tiny model may not follow the layout that the prompt asks for: no fault of the server."""
    with dspy.context(lm=lm, adapter=adapter):
        try:
            answer = dspy.Predict(WhoWrote)(question="Who?")
        except dspy.utils.exceptions.AdapterParseError:
            return None
    assert isinstance(answer.author, Person)
    return answer


def chat_adapter(url, model):
    _predict(_lm(url, model), dspy.ChatAdapter())


def json_adapter(url, model):
    """Asks with a form, which is kept."""
    assert _predict(_lm(url, model, _FormLM), dspy.JSONAdapter()) is not None


def react(url, model):
    """A loop whose steps are forms; the arguments of its tools are open, so a step may be cut."""
    made = dspy.context(lm=_lm(url, model, _FormLM), adapter=dspy.JSONAdapter())
    with made, suppress(dspy.utils.exceptions.AdapterParseError):
        answer = dspy.ReAct("question -> answer", tools=[get_weather], max_iters=2)(question="Who?")
        assert hasattr(answer, "answer")


def native_function_calling(url, model):
    """Tools go to the server as such."""

    class Call(dspy.Signature):
        """Call a tool."""

        question: str = dspy.InputField()
        tools: list[dspy.Tool] = dspy.InputField()
        calls: dspy.ToolCalls = dspy.OutputField()

    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    unparsed = suppress(dspy.utils.exceptions.AdapterParseError)
    with dspy.context(lm=_lm(url, model), adapter=adapter), unparsed:
        dspy.Predict(Call)(question="Who?", tools=[dspy.Tool(get_weather)])


def stream(url, model):
    async def ask():
        program = dspy.streamify(dspy.Predict("question -> answer"))
        return [part async for part in program(question="Who?")]

    with dspy.context(lm=_lm(url, model)), suppress(dspy.utils.exceptions.AdapterParseError):
        assert asyncio.run(ask())


def asynchronous(url, model):
    async def ask():
        lm = _lm(url, model)
        return await asyncio.gather(*(lm.acall(messages=MESSAGES) for _ in range(4)))

    assert all(asyncio.run(ask()))


def overflow(url, model):
    for engine in ("auto", "litellm"):
        try:
            _lm(url, model, engine=engine)(TOO_LONG)
        except dspy.utils.exceptions.ContextWindowExceededError:
            continue
        raise AssertionError(engine)
