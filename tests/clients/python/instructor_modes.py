"""instructor in each mode for OpenAI's API, responses and Anthropic's messages."""

import asyncio
import warnings
from collections.abc import Iterable
from typing import Literal

import anthropic
import instructor
import openai
from instructor.core import IncompleteOutputException, InstructorRetryException
from pydantic import BaseModel, ConfigDict, ValidationError

from tests.clients.scenarios import MESSAGES

MODE = instructor.Mode


class Person(BaseModel):
    """A person."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Alan"]
    age: Literal[36, 41]


def _ask(url, model, mode, **fields):
    warnings.simplefilter("ignore")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=mode)
        given = {"response_model": Person, "max_retries": 0, "max_tokens": 200, **fields}
        return client.chat.completions.create(model=model, messages=MESSAGES, **given)


def tools(url, model):
    assert isinstance(_ask(url, model, MODE.TOOLS), Person)


def tools_strict(url, model):
    assert isinstance(_ask(url, model, MODE.TOOLS_STRICT), Person)


def functions(url, model):
    """The mode of `functions`; a warning says that it is old."""
    assert isinstance(_ask(url, model, MODE.FUNCTIONS), Person)


def parallel_tools(url, model):
    """`auto` with tools of several classes: the model may call none."""
    try:
        assert list(_ask(url, model, MODE.PARALLEL_TOOLS, response_model=Iterable[Person]))
    except (TypeError, IncompleteOutputException, InstructorRetryException) as error:
        assert "Error code" not in str(error), error


def json_schema(url, model):
    assert isinstance(_ask(url, model, MODE.JSON_SCHEMA), Person)


def _asked_in_the_prompt(url, model, mode):
    """The form is a wish in the prompt, which a tiny model may not fulfil: no fault of anyone."""
    try:
        assert isinstance(_ask(url, model, mode), Person)
    except (IncompleteOutputException, InstructorRetryException) as error:
        assert "Error code" not in str(error), error


def json_object(url, model):
    _asked_in_the_prompt(url, model, MODE.JSON)


def json_o1(url, model):
    _asked_in_the_prompt(url, model, MODE.JSON_O1)


def markdown_json(url, model):
    _asked_in_the_prompt(url, model, MODE.MD_JSON)


def partial_stream(url, model):
    """`Partial[Person]`, streamed, in the modes whose form is sure."""
    for mode in (MODE.TOOLS, MODE.JSON_SCHEMA):
        *_, last = _ask(url, model, mode, response_model=instructor.Partial[Person], stream=True)
        assert last.name in ("Ada", "Alan") and last.age is not None


def iterable_stream(url, model):
    """instructor's form of several requires nothing, so the tiny model may leave it empty."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=MODE.TOOLS)
        people = client.chat.completions.create_iterable(
            model=model, messages=MESSAGES, response_model=Person, stream=True, max_tokens=400,
            max_retries=0,
        )  # fmt: skip
        try:
            assert isinstance(next(iter(people)), Person)
        except ValidationError as error:
            assert "Field required" in str(error), error


def responses_tools(url, model):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=MODE.RESPONSES_TOOLS)
        answer = client.chat.completions.create(
            model=model, messages=MESSAGES, response_model=Person, max_retries=0, max_tokens=200
        )
    assert isinstance(answer, Person)


def _ask_anthropic(url, model, mode):
    warnings.simplefilter("ignore")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as plain:
        client = instructor.from_anthropic(plain, mode=mode)
        return client.chat.completions.create(
            model=model, messages=MESSAGES, response_model=Person, max_retries=0, max_tokens=200
        )


def anthropic_tools(url, model):
    assert isinstance(_ask_anthropic(url, model, MODE.ANTHROPIC_TOOLS), Person)


def anthropic_json(url, model):
    try:
        assert isinstance(_ask_anthropic(url, model, MODE.ANTHROPIC_JSON), Person)
    except (IncompleteOutputException, InstructorRetryException) as error:
        assert "Error code" not in str(error), error


def asynchronous(url, model):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as plain:
            client = instructor.from_openai(plain, mode=MODE.TOOLS)
            one = lambda: client.chat.completions.create(  # noqa: E731
                model=model, messages=MESSAGES, response_model=Person, max_tokens=200
            )
            return await asyncio.gather(*(one() for _ in range(4)))

    assert all(isinstance(person, Person) for person in asyncio.run(ask()))
