"""Outputs that are given (`trace_decode_token_ids`) and scored by the model."""

import pytest

from quire import LLM, SamplingParams
from quire.errors import InvalidParameter

PROMPT = "def add(a, b):"
IDS = [5, 2, 0, 1, 77, 2]
"""Among them the model's EOS."""


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32") as made:
        yield made


def traced(ids, **more):
    return SamplingParams(temperature=1.0, logprobs=2, trace_decode_token_ids=ids, **more)


def scores(llm, prompt, ids):
    """The log-probabilities of ids after a prompt, as those of a longer prompt."""
    known = llm.get_tokenizer().encode(prompt)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [found] = llm.generate({"prompt_token_ids": known + ids}, params)
    rows = found.prompt_logprobs[len(known) :]
    return [row[token].logprob for row, token in zip(rows, ids, strict=True)]


def test_an_output_is_scored_as_a_prompt_is(llm):
    """Whatever would forbid its tokens or end it, and next to requests that draw."""
    against = {"logit_bias": {77: -100.0}, "stop": ["a"], "min_p": 0.9, "repetition_penalty": 2.0}
    drawn = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
    given, free = llm.generate([PROMPT] * 2, [traced(IDS, stop_token_ids=[0], **against), drawn])
    [output] = given.outputs
    assert (output.token_ids, output.finish_reason) == (IDS, "length")
    found = [row[token].logprob for row, token in zip(output.logprobs, IDS, strict=True)]
    assert found == scores(llm, PROMPT, IDS)
    [again] = llm.generate(PROMPT, traced(free.outputs[0].token_ids))
    assert again.outputs[0].logprobs == free.outputs[0].logprobs
    assert again.outputs[0].text == free.outputs[0].text


def test_drafts_are_measured_by_it():
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with LLM(dtype="float32", speculative_config=config) as llm:
        ids = llm.get_tokenizer().encode("a b c a b c a b d")
        [found] = llm.generate("a b c a b c", traced(ids))
        assert found.outputs[0].token_ids == ids
        rows = found.outputs[0].logprobs
        assert [row[token].logprob for row, token in zip(rows, ids, strict=True)] == pytest.approx(
            scores(llm, "a b c a b c", ids), abs=1e-5
        )


def test_it_ends_with_the_context_and_with_max_tokens():
    with LLM(max_model_len=16, enable_trace_replay=True) as llm:
        room = 16 - len(llm.get_tokenizer().encode(PROMPT))
        given = [traced(list(range(30)), max_tokens=most) for most in (None, 2)]
        whole, short = llm.generate([PROMPT] * 2, given)
        assert whole.outputs[0].token_ids == list(range(room))
        assert short.outputs[0].token_ids == [0, 1]


def test_processed_logprobs_would_say_nothing():
    with LLM(logprobs_mode="processed_logprobs") as llm:
        params = SamplingParams(trace_decode_token_ids=IDS)
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == IDS
        with pytest.raises(InvalidParameter, match="the logprobs of a given output say nothing"):
            llm.generate(PROMPT, traced(IDS))


def test_ids_of_another_model_are_refused(llm):
    with pytest.raises(InvalidParameter, match="out of vocabulary"):
        llm.generate(PROMPT, traced([10**6]))


def test_a_prompt_that_comes_in_parts_has_no_given_output(llm):
    inputs = llm.llm_engine.front_end.inputs.generation
    with pytest.raises(InvalidParameter, match="parts are still to come"):
        inputs.open(traced(IDS))
