"""smolagents: `OpenAIModel` (also called OpenAIServerModel) and its agents."""

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from tests.clients.scenarios import PROMPT, WEATHER_RESULT

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return WEATHER_RESULT


def _model(url, model, **fields):
    given = {"max_tokens": 60, **fields}
    return OpenAIModel(model_id=model, api_base=f"{url}/v1", api_key="none", **given)


def chat(url, model):
    answer = _model(url, model).generate(MESSAGES, stop_sequences=["\n\n\n"])
    assert answer.content and answer.token_usage.output_tokens


def chat_stream(url, model):
    deltas = list(_model(url, model).generate_stream(MESSAGES))
    assert "".join(delta.content or "" for delta in deltas)


def json_schema(url, model):
    form = {"type": "json_schema", "json_schema": {"name": "flag", "schema": {"type": "boolean"}}}
    answer = _model(url, model).generate(MESSAGES, response_format=form)
    assert answer.content.strip() in ("true", "false")


def tools_required(url, model):
    """`tools_to_call_from` makes `tool_choice: "required"`."""
    answer = _model(url, model, max_tokens=300).generate(MESSAGES, tools_to_call_from=[get_weather])
    assert answer.tool_calls[0].function.name == "get_weather"


def tools_streamed(url, model):
    deltas = list(
        _model(url, model, max_tokens=300).generate_stream(
            MESSAGES, tools_to_call_from=[get_weather]
        )
    )
    names = [c.function.name for d in deltas for c in d.tool_calls or [] if c.function]
    assert "get_weather" in names, names


def _run(agent):
    """The tiny model may not do the task; the server has to answer each step."""
    agent.run("What is the weather in Ulm?", max_steps=2)
    errors = [str(step.error) for step in agent.memory.steps if getattr(step, "error", None)]
    assert not any("Error code" in error for error in errors), errors


def tool_calling_agent(url, model):
    for is_streamed in (False, True):
        _run(
            ToolCallingAgent(
                tools=[get_weather], model=_model(url, model, max_tokens=200),
                stream_outputs=is_streamed, verbosity_level=0,
                instructions="Be terse.",
            )
        )  # fmt: skip


def code_agent(url, model):
    """Its prompt alone is long; stop sequences and, in a second run, a form for its code."""
    for is_structured in (False, True):
        _run(
            CodeAgent(
                tools=[get_weather], model=_model(url, model, max_tokens=200), verbosity_level=0,
                use_structured_outputs_internally=is_structured,
            )
        )  # fmt: skip
