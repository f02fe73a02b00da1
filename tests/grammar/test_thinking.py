"""thinking_token_budget: a reasoning ends where it must, whatever the model would have drawn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.errors import InvalidParameter
from quire.grammar.thinking import ThinkingBudget, num_thinking
from quire.params import StructuredOutputsParams as Form
from quire.params.thinking import Thinking

START, END = "<think>", "</think>"
MARKS = {"reasoning_start_str": START, "reasoning_end_str": END}


def expected(ids, limit):
    """What may come behind these ids, found by looking at all of them."""
    start, end = limit.start_ids, limit.end_ids
    whole = ([0] * limit.num_before if limit.num_before is not None else []) + ids
    begun = 0 if limit.num_before is not None else None
    place = limit.num_before or 0
    while place < len(whole):
        place += 1
        if begun is not None and place - begun > 0 and whole[:place][-len(end) :] == end:
            begun = None
        elif begun is None and whole[:place][-len(start) :] == start:
            begun = place
    if begun is None or len(whole) - begun < limit.budget:
        return None
    new = whole[max(begun, limit.num_before or 0) :]
    for length in range(len(end) - 1, 0, -1):
        if new[-length:] == end[:length]:
            return end[length]
    return end[0]


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 9]), max_size=30),
    st.integers(0, 5),
    st.sampled_from([[1], [1, 2]]),
    st.sampled_from([[3], [3, 4], [3, 3, 4]]),
    st.sampled_from([None, 0, 3]),
)
def test_the_bound_is_a_function_of_the_output(ids, budget, start, end, num_before):
    limit = Thinking(budget, start, end, num_before)
    step_by_step = ThinkingBudget(limit)
    for length in range(len(ids) + 1):
        step_by_step.take_in(ids[:length])
        assert step_by_step.forced == expected(ids[:length], limit), ids[:length]
    at_once = ThinkingBudget(limit)
    at_once.take_in(ids)
    assert at_once.forced == step_by_step.forced


def test_a_mask_leaves_the_one_token():
    budget = ThinkingBudget(Thinking(0, [1], [63], 0))
    mask = np.full(3, -1, dtype=np.int32)
    budget.restrict(mask)
    assert [i for i in range(96) if mask[i // 32] >> (i % 32) & 1] == [63]


@pytest.mark.parametrize(
    ("ids", "count"),
    [([], None), ([1], 0), ([9, 1, 5, 5], 2), ([1, 5, 3], None), ([1, 3, 1, 5], 1), ([3, 1], 0)],
)
def test_a_prompt_may_end_inside_a_reasoning(ids, count):
    assert num_thinking(ids, [1], [3]) == count


@pytest.fixture(scope="module", params=[1, 2], ids=["plain", "ahead"])
def llm(request):
    ahead = request.param == 2
    with LLM(
        max_num_seqs=8, max_model_len=256, reasoning_config=MARKS, async_scheduling=ahead
    ) as made:
        yield made


def texts(llm, prompt, **fields):
    params = SamplingParams(
        **{"max_tokens": 40, "temperature": 1.0, "seed": 3, "ignore_eos": True, **fields}
    )
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return [completion.text for completion in output.outputs]


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_reasoning_that_the_prompt_began_ends_in_time(llm, budget):
    prompt = f"def f():{START}"
    free = texts(llm, prompt)[0]
    for text in texts(llm, prompt, thinking_token_budget=budget, n=3):
        thought, mark, rest = text.partition(END)
        assert mark, text
        assert rest
        assert START not in text.removeprefix(thought + mark) or END in rest
        assert len(llm.get_tokenizer().encode(thought)) <= budget + 1
    assert END not in free


def test_a_begun_prompt_counts_and_others_are_untouched(llm):
    tokenizer = llm.get_tokenizer()
    before = "one two three"
    used = len(tokenizer.encode(START + before)) - len(tokenizer.encode(START))
    [text] = texts(llm, START + before, thinking_token_budget=used)
    assert text.startswith(END)
    plain = texts(llm, "def f():")
    assert texts(llm, "def f():", thinking_token_budget=5) == plain


@pytest.mark.parametrize("before", ["def f(): ", "def f():"])
def test_a_mark_of_the_prompt_counts_in_whatever_tokens(llm, before):
    """A blank before it is one token with its first letter."""
    form = Form(choice=["yes", "no"], starts_after=END)
    [text] = texts(llm, f"{before}{START}", structured_outputs=form, thinking_token_budget=4)
    assert text.partition(END)[2] in ("yes", "no")
    [text] = texts(llm, f"{before}{START}\n{END}\n", thinking_token_budget=4)
    assert text == texts(llm, f"{before}{START}\n{END}\n")[0]


def test_a_form_begins_behind_the_mark_that_was_forced(llm):
    form = Form(choice=["yes", "no"], starts_after=END)
    [text] = texts(llm, f"def f():{START}", structured_outputs=form, thinking_token_budget=4)
    assert text.partition(END)[2] in ("yes", "no")


def test_without_known_marks_it_is_refused_by_name():
    with LLM(max_num_seqs=2, max_model_len=64) as plain:
        with pytest.raises(InvalidParameter, match="thinking_token_budget=3 is not allowed"):
            texts(plain, "a", thinking_token_budget=3)
        assert texts(plain, "a", thinking_token_budget=-1, max_tokens=2)


@pytest.mark.parametrize(
    "given", [{"reasoning_start_str": "a"}, {**MARKS, "x": 1}, {**MARKS, "reasoning_end_str": ""}]
)
def test_a_config_that_says_too_little_is_refused(given):
    with pytest.raises(InvalidParameter, match="reasoning_config"):
        LLM(reasoning_config=given)
