"""Outputs: flat logprobs behave as the list they stand for, deltas join to the whole."""

import dataclasses

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput
from quire.pooling_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
)

ENTRY = st.builds(
    Logprob,
    st.floats(-20, 0),
    st.one_of(st.none(), st.integers(1, 9)),
    st.one_of(st.none(), st.text(max_size=2)),
)
POSITION = st.one_of(st.none(), st.dictionaries(st.integers(0, 99), ENTRY, min_size=1, max_size=4))


@given(st.lists(POSITION, max_size=8), st.lists(POSITION, max_size=8), st.slices(8))
def test_flat_logprobs_read_as_the_list(first, second, part):
    flat = FlatLogprobs(first)
    flat.extend(FlatLogprobs(second))
    plain = [*first, *second]
    assert list(flat) == plain
    assert len(flat) == len(plain)
    assert [flat[i] for i in range(-len(plain), len(plain))] == plain + plain
    assert flat[part] == plain[part]
    assert flat == plain
    assert flat == FlatLogprobs(plain)
    assert [list(position) for position in flat if position] == [list(p) for p in plain if p]


def test_flat_logprobs_only_grow():
    flat = FlatLogprobs([{1: Logprob(-1.0)}])
    with pytest.raises(TypeError, match="cannot be assigned"):
        flat[0] = {}
    with pytest.raises(TypeError, match="cannot be deleted"):
        del flat[0]
    with pytest.raises(TypeError, match="cannot be inserted"):
        flat.insert(0, {})
    with pytest.raises(IndexError):
        flat[1]


def make_output(*completions, finished=False, **fields):
    return RequestOutput(
        "r", None, [1], fields.pop("prompt_logprobs", None), list(completions), finished, **fields
    )


def test_deltas_join():
    first = make_output(
        CompletionOutput(0, "a", [1], -1.0, [{1: Logprob(-1.0)}]), prompt_logprobs=[None]
    )
    given_ids = first.outputs[0].token_ids
    second = CompletionOutput(
        0, "b", [2, 3], -3.0, [{2: Logprob(-1.0)}, {3: Logprob(-1.0)}], "stop", 3
    )
    first.add(make_output(second, finished=True, num_cached_tokens=4), aggregate=True)
    joined = first.outputs[0]
    assert (joined.text, joined.token_ids, joined.cumulative_logprob) == ("ab", [1, 2, 3], -3.0)
    assert joined.logprobs == [{1: Logprob(-1.0)}, {2: Logprob(-1.0)}, {3: Logprob(-1.0)}]
    assert (joined.finish_reason, joined.stop_reason, joined.finished()) == ("stop", 3, True)
    assert (first.finished, first.prompt_logprobs, first.num_cached_tokens) == (True, [None], 4)
    assert given_ids == [1], "what a caller has got already does not change"


def test_cumulative_outputs_replace():
    first = make_output(CompletionOutput(0, "a", [1]), CompletionOutput(1, "x", [9]))
    first.add(make_output(CompletionOutput(0, "ab", [1, 2])), aggregate=False)
    assert [(c.index, c.text) for c in first.outputs] == [(0, "ab"), (1, "x")]
    assert not first.finished


def test_a_new_index_is_appended():
    first = make_output(CompletionOutput(1, "x", [9]))
    first.add(make_output(CompletionOutput(0, "a", [1])), aggregate=True)
    assert [completion.index for completion in first.outputs] == [1, 0]


def test_flat_deltas_join():
    first = make_output(CompletionOutput(0, "a", [1], -1.0, FlatLogprobs([{1: Logprob(-1.0)}])))
    first.add(
        make_output(CompletionOutput(0, "b", [2], -2.0, FlatLogprobs([{2: Logprob(-1.0)}]))),
        aggregate=True,
    )
    assert isinstance(first.outputs[0].logprobs, FlatLogprobs)
    assert first.outputs[0].logprobs == [{1: Logprob(-1.0)}, {2: Logprob(-1.0)}]


def test_results_read_as_dataclasses():
    completion = CompletionOutput(0, "a", [5], -1.5, [{5: Logprob(-1.5, 1, "a")}])
    found = dataclasses.asdict(completion)
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("a", [5], None)
    assert found["logprobs"] == [{5: {"logprob": -1.5, "rank": 1, "decoded_token": "a"}}]
    assert dataclasses.replace(completion, text="b").text == "b" and completion.text == "a"
    for kind in (EmbeddingOutput, ClassificationOutput, ScoringOutput, PoolingOutput):
        [field] = dataclasses.fields(kind)
        assert dataclasses.asdict(kind(0.5)) == {field.name: 0.5}
    assert msgspec.to_builtins(completion) == found
    pooled = PoolingRequestOutput("r", ScoringOutput(0.5), [1, 2], 2, False)
    assert (pooled.num_cached_tokens, pooled.finished) == (2, False), "in the reference's order"
