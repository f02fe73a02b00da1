"""Forms begin after the reasoning that `structured_outputs_config` names."""

import asyncio
import json

import pytest

from quire import LLM, AsyncLLM, EngineArgs, SamplingParams
from quire.errors import InvalidParameter, NotBuiltYet
from quire.params import StructuredOutputsParams as Form
from quire.server.output_parsing import FormsAfterReasoning

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
QUESTION = "What is 1 + 1?"


def greedy(**form):
    form = Form(**(form or {"json": SCHEMA}))
    return SamplingParams(temperature=0, max_tokens=16, structured_outputs=form)


@pytest.fixture(scope="module")
def llm():
    with LLM(structured_outputs_config={"reasoning_parser": "deepseek_r1"}) as made:
        yield made


def texts(llm, *prompts, **form):
    return [found.outputs[0].text for found in llm.generate(list(prompts), greedy(**form))]


def test_a_form_begins_after_the_reasoning_of_a_prompt(llm):
    """What the prompt opened goes on, what it closed is over, else an output chooses."""
    prompts = [QUESTION, f"{QUESTION}<think>\n", f"{QUESTION}<think>\nEasy.</think>\n\n"]
    free, inside, over = texts(llm, *prompts)
    assert free.lstrip().startswith(("<think>", "{"))
    [as_usual] = LLM().generate(prompts[1], SamplingParams(temperature=0, max_tokens=16))
    assert inside == as_usual.outputs[0].text
    assert set(json.loads(over)) == {"n"}
    ids = [{"prompt_token_ids": llm.get_tokenizer().encode(each)} for each in prompts]
    assert texts(llm, *ids) == [free, inside, over]


def test_a_request_that_says_where_its_form_begins_is_left_alone(llm):
    [text] = texts(llm, f"{QUESTION}<think>\n", choice=["yes"], starts_after="W")
    assert text == texts(LLM(), f"{QUESTION}<think>\n", choice=["yes"], starts_after="W")[0]


def test_with_enable_in_reasoning_it_begins_at_once():
    config = {"reasoning_parser": "deepseek_r1", "enable_in_reasoning": True}
    with LLM(structured_outputs_config=config) as llm:
        assert texts(llm, f"{QUESTION}<think>\n", choice=["yes"]) == ["yes"]


@pytest.mark.parametrize(
    ("prompt_end", "opens", "ends"),
    [
        ("Hello", ["<think>"], ["</think>"]),
        ("Hello<think>\n", None, ["</think>"]),
        ("</think>", None, None),
    ],
)
def test_places(prompt_end, opens, ends):
    form = FormsAfterReasoning("qwen3").placed(Form(regex="a"), prompt_end)
    assert (form.opens_with, form.starts_after) == (opens, ends)


def test_a_format_of_whole_outputs_is_a_tag():
    form = FormsAfterReasoning("openai_gptoss").placed(Form(regex="a"), "<|start|>assistant")
    assert form.kind == "structural_tag" and "<|channel|>final" in form.structural_tag


def test_names_that_nobody_knows_and_faces_that_place_nothing():
    with pytest.raises(InvalidParameter, match="structured_outputs_config.*'reasoning_parser'.*no"):
        LLM(structured_outputs_config={"reasoning_parser": "no_such"})

    async def ask():
        args = EngineArgs(structured_outputs_config={"reasoning_parser": "qwen3"})
        engine = AsyncLLM.from_engine_args(args)
        try:
            async for _ in engine.generate("a", greedy(), "r"):
                """Nothing comes."""
        finally:
            engine.shutdown()

    with pytest.raises(NotBuiltYet, match="give a starts_after"):
        asyncio.run(ask())
