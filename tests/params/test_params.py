"""SamplingParams and its kin: every rule, its words, and what a value becomes."""

import copy
import math
import sys
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import EngineError, InvalidParameter, InvalidType, UnknownParameter
from quire.params import (
    BeamSearchParams,
    PoolingParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    SamplingType,
    StructuredOutputsParams,
)

COUNT = "it must be None or an int of at least 1"
BIAS = "each bias must be a number from -1e+30 to 1e+30, or -inf"
TOP_K = "it must be an int of at least 1, or 0 or -1 for no limit"
LOGPROBS = "it must be None, an int of at least 0, or -1 for the whole vocabulary"

REFUSED = [
    ({"n": 0}, "n=0 is not allowed: it must be an int from 1 to 16384."),
    ({"n": 16385}, "n=16385 is not allowed: it must be an int from 1 to 16384."),
    ({"n": 1.0}, "n=1.0 is not allowed: it must be an int from 1 to 16384."),
    ({"n": True}, "n=True is not allowed: it must be an int from 1 to 16384."),
    (
        {"n": 2, "temperature": 0},
        "n=2 is not allowed: it must be 1 when temperature is 0, because greedy completions are "
        "equal.",
    ),
    (
        {"presence_penalty": 2.1},
        "presence_penalty=2.1 is not allowed: it must be a number from -2 to 2.",
    ),
    (
        {"frequency_penalty": -2.1},
        "frequency_penalty=-2.1 is not allowed: it must be a number from -2 to 2.",
    ),
    (
        {"repetition_penalty": 0},
        "repetition_penalty=0 is not allowed: it must be a finite number above 0.",
    ),
    (
        {"repetition_penalty": math.inf},
        "repetition_penalty=inf is not allowed: it must be a finite number above 0.",
    ),
    (
        {"repetition_penalty": 1e300},
        "repetition_penalty=1e+300 is not allowed: it must be a finite number above 0.",
    ),
    ({"temperature": -0.1}, "temperature=-0.1 is not allowed: it must be a number from 0 to 2."),
    ({"temperature": 2.5}, "temperature=2.5 is not allowed: it must be a number from 0 to 2."),
    ({"temperature": math.nan}, "temperature=nan is not allowed: it must be a number from 0 to 2."),
    ({"temperature": None}, "temperature=None is not allowed: it must be a number from 0 to 2."),
    ({"temperature": "1"}, "temperature='1' is not allowed: it must be a number from 0 to 2."),
    ({"top_p": 0}, "top_p=0 is not allowed: it must be a number above 0 and at most 1."),
    ({"top_p": 1.01}, "top_p=1.01 is not allowed: it must be a number above 0 and at most 1."),
    ({"top_k": -2}, f"top_k=-2 is not allowed: {TOP_K}."),
    ({"top_k": 1.5}, f"top_k=1.5 is not allowed: {TOP_K}."),
    ({"min_p": 1.5}, "min_p=1.5 is not allowed: it must be a number from 0 to 1."),
    ({"max_tokens": 0}, f"max_tokens=0 is not allowed: {COUNT}."),
    ({"min_tokens": -1}, "min_tokens=-1 is not allowed: it must be an int of at least 0."),
    (
        {"min_tokens": 2**31},
        "min_tokens=2147483648 is not allowed: it must be an int of at least 0, at most "
        "2147483647.",
    ),
    (
        {"min_tokens": 5, "max_tokens": 4},
        "min_tokens=5 is not allowed: it must be at most max_tokens, which is 4.",
    ),
    ({"stream_interval": 0}, f"stream_interval=0 is not allowed: {COUNT}."),
    ({"logprobs": -2}, f"logprobs=-2 is not allowed: {LOGPROBS}."),
    ({"prompt_logprobs": 0.5}, f"prompt_logprobs=0.5 is not allowed: {LOGPROBS}."),
    (
        {"logprob_token_ids": list(range(129))},
        "logprob_token_ids='<129 items>' is not allowed: it must be a list of at most 128 ints.",
    ),
    (
        {"prompt_logprob_start": 3},
        "prompt_logprob_start=3 is not allowed: it must be None or an int of at least 0, together "
        "with prompt_logprob_token_ids.",
    ),
    (
        {"prompt_logprob_token_ids": [[1.5]]},
        "prompt_logprob_token_ids=1.5 is not allowed: each item must be an int.",
    ),
    ({"stop": ""}, "stop='' is not allowed: no string in it may be empty."),
    ({"stop": ["a", ""]}, "stop=['a', ''] is not allowed: no string in it may be empty."),
    ({"stop": [1]}, "stop=1 is not allowed: it must be a str."),
    ({"stop": 5}, "stop=5 is not allowed: it must be a str or a list of at most 256 strings."),
    (
        {"stop": ["\ud800"]},
        "stop=\"'\\\\ud800'\" is not allowed: it must be valid Unicode without lone surrogates.",
    ),
    (
        {"stop": "a", "detokenize": False},
        "stop=['a'] is not allowed: stop strings need detokenize=True. Or give stop_token_ids.",
    ),
    ({"stop_token_ids": ["a"]}, "stop_token_ids='a' is not allowed: each item must be an int."),
    (
        {"stop_token_ids": 7},
        "stop_token_ids=7 is not allowed: it must be a list of at most 1024 ints.",
    ),
    ({"bad_words": [""]}, "bad_words=[''] is not allowed: no string in it may be empty."),
    (
        {"logit_bias": [1]},
        "logit_bias=[1] is not allowed: it must be a dict from token id to number.",
    ),
    ({"logit_bias": {"a": 1}}, "logit_bias='a' is not allowed: each item must be an int."),
    ({"logit_bias": {1: math.nan}}, f"logit_bias=nan is not allowed: {BIAS}."),
    ({"logit_bias": {1: math.inf}}, f"logit_bias=inf is not allowed: {BIAS}."),
    (
        {"allowed_token_ids": []},
        "allowed_token_ids=[] is not allowed: it must be None or have an id.",
    ),
    (
        {"extra_args": {"a": [{"b": 2**64}]}},
        "extra_args=18446744073709551616 is not allowed: extra_args integers must fit 64 bits.",
    ),
    ({"extra_args": 3}, "extra_args=3 is not allowed: it must be a dict."),
    (
        {"thinking_token_budget": True},
        "thinking_token_budget=True is not allowed: it must be None, -1 or an int of at least 0.",
    ),
    (
        {"thinking_token_budget": -2},
        "thinking_token_budget=-2 is not allowed: it must be None, -1 or an int of at least 0.",
    ),
    (
        {"trace_decode_token_ids": []},
        "trace_decode_token_ids=[] is not allowed: it must be None or have an id.",
    ),
    (
        {"seed": 2**64},
        "seed=18446744073709551616 is not allowed: it must be None or an int that fits 64 bits.",
    ),
    ({"seed": "x"}, "seed='x' is not allowed: it must be None or an int that fits 64 bits."),
    ({"ignore_eos": 1}, "ignore_eos=1 is not allowed: it must be True or False."),
    ({"output_kind": 2}, "output_kind=2 is not allowed: it must be a RequestOutputKind."),
    (
        {"structured_outputs": {"json": "{}"}},
        "structured_outputs={'json': '{}'} is not allowed: it must be a StructuredOutputsParams.",
    ),
    (
        {"repetition_detection": 1},
        "repetition_detection=1 is not allowed: it must be a RepetitionDetectionParams.",
    ),
    (
        {"routed_experts_prompt_start": -1},
        "routed_experts_prompt_start=-1 is not allowed: it must be an int of at least 0.",
    ),
]


@pytest.mark.parametrize(("fields", "text"), REFUSED, ids=lambda value: str(value)[:40])
def test_refuses_with_these_words(fields, text):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields)
    assert str(caught.value) == text
    assert isinstance(caught.value, (EngineError, ValueError))
    assert caught.value.parameter in fields


def test_wrong_types_are_type_errors_too():
    with pytest.raises(TypeError) as caught:
        SamplingParams(n="two")
    assert isinstance(caught.value, InvalidType)


def test_unknown_keyword_is_named():
    with pytest.raises(UnknownParameter, match=r"^'best_of' is not a parameter here: ") as caught:
        SamplingParams(best_of=3)
    assert isinstance(caught.value, TypeError)
    with pytest.raises(UnknownParameter):
        SamplingParams.from_optional(best_of=3)
    with pytest.raises(UnknownParameter, match=r"StructuredOutputsParams\(...\)\.$"):
        SamplingParams(guided_decoding={"regex": "a"})


def test_every_field_is_annotated():
    """Callers keep of their keywords those that stand there (LangChain)."""
    names = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert names <= SamplingParams.__annotations__.keys()
    assert "tag" not in SamplingParams.__annotations__


def test_a_former_name_may_be_none():
    assert SamplingParams(best_of=None) == SamplingParams()


ACCEPTED = [
    ({"seed": -1}, "seed", None),
    ({"seed": 0}, "seed", 0),
    ({"logprobs": True}, "logprobs", 1),
    ({"prompt_logprobs": True}, "prompt_logprobs", 1),
    ({"logprobs": -1}, "logprobs", -1),
    ({"stop": "a"}, "stop", ["a"]),
    ({"stop": ["b", "a", "b"]}, "stop", ["b", "a"]),
    ({}, "stop", []),
    ({}, "stop_token_ids", []),
    ({}, "bad_words", []),
    ({"stop_token_ids": (3, 1, 3)}, "stop_token_ids", [3, 1]),
    ({"bad_words": ["x", "x"]}, "bad_words", ["x"]),
    ({"temperature": 1e-6}, "temperature", 0.01),
    ({"temperature": 0.0099}, "temperature", 0.01),
    ({"temperature": 0}, "temperature", 0.0),
    ({"temperature": 0, "top_p": 0.5}, "top_p", 1.0),
    ({"temperature": 0, "top_k": 5}, "top_k", 0),
    ({"temperature": 0, "min_p": 0.5}, "min_p", 0.0),
    ({"top_k": -1}, "top_k", -1),
    ({"top_k": np.int64(4)}, "top_k", 4),
    ({"temperature": np.float32(0.5)}, "temperature", 0.5),
    ({"max_tokens": None, "min_tokens": 9}, "min_tokens", 9),
    ({"thinking_token_budget": -1}, "thinking_token_budget", None),
    ({}, "skip_reading_prefix_cache", False),
    ({"prompt_logprobs": 0}, "skip_reading_prefix_cache", True),
    ({"logit_bias": {1: -math.inf}}, "logit_bias", {1: -math.inf}),
]


@pytest.mark.parametrize(("fields", "name", "value"), ACCEPTED, ids=lambda value: str(value)[:40])
def test_values_take_their_plain_form(fields, name, value):
    found = getattr(SamplingParams(**fields), name)
    assert found == value
    assert type(found) is type(value)


def test_raising_the_temperature_is_warned_of(caplog):
    SamplingParams(temperature=0.001)
    assert caplog.messages == ["temperature=0.001 is raised to 0.01; 0 is greedy"]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"temperature": 0}, SamplingType.GREEDY),
        ({}, SamplingType.RANDOM),
        ({"seed": 1}, SamplingType.RANDOM_SEED),
    ],
)
def test_sampling_type(fields, kind):
    assert SamplingParams(**fields).sampling_type is kind


def test_from_optional():
    made = SamplingParams.from_optional(temperature=None, logit_bias={"7": 300, 8: -300.0, 9: 1})
    assert made.temperature == 1.0
    assert made.logit_bias == {7: 100.0, 8: -100.0, 9: 1.0}
    with pytest.raises(InvalidParameter, match="the digits 0 to 9 alone"):
        SamplingParams.from_optional(logit_bias={"seven": 1})
    with pytest.raises(InvalidParameter, match="logit_bias=.'b', 'c'. is not allowed"):
        SamplingParams.from_optional(logit_bias={"1": 1, "b": 1, "c": 1})
    assert SamplingParams.from_optional(logit_bias={"0": 1}).logit_bias == {0: 1.0}
    for key in ("١", "1_0", " 1", "+1", "-1", "1.0", "01", "", "9" * 11, 1.0, True):
        with pytest.raises(InvalidParameter, match="logit_bias=.* the digits 0 to 9 alone"):
            SamplingParams.from_optional(logit_bias={key: 1})
    for bias in (math.nan, "1", None, True):
        with pytest.raises(InvalidParameter, match="each bias must be a number"):
            SamplingParams.from_optional(logit_bias={"1": bias})


def test_assigning_is_free_and_validate_checks():
    params = SamplingParams()
    params.temperature = 9
    with pytest.raises(InvalidParameter):
        params.validate()


def test_clone_owns_its_containers_unless_told_otherwise():
    params = SamplingParams(stop=["a"], extra_args={"x": [1]}, logit_bias={1: 2})
    params.update_from_generation_config({}, 5)
    twin = params.clone()
    assert twin == params
    twin.stop.append("b")
    twin.extra_args["x"].append(2)
    twin._all_stop_token_ids.add(9)
    assert params.stop == ["a"]
    assert params.extra_args == {"x": [1]}
    assert params.all_stop_token_ids == {5}
    params.skip_clone = True
    assert params.clone().stop is params.stop


def test_the_ids_that_stop_a_request_are_known_before_an_engine_has_it():
    assert SamplingParams(stop_token_ids=[42, 7, 42]).all_stop_token_ids == {7, 42}


def test_an_array_of_ids_is_copied():
    ids = np.array([[1, 2], [3, 4]])
    twin = SamplingParams(prompt_logprob_token_ids=ids).clone()
    ids[0, 0] = 9
    assert twin.prompt_logprob_token_ids.tolist() == [[1, 2], [3, 4]]


def test_survives_the_wire_and_copies():
    params = SamplingParams(
        stop=["a"], logit_bias={3: 1.5}, repetition_detection=RepetitionDetectionParams(3, 1, 2)
    )
    params.update_from_generation_config({"eos_token_id": [1, 2]}, 1)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    assert copy.deepcopy(params) == params
    assert decoded.eos_token_id == 1
    assert decoded.all_stop_token_ids == {1, 2}


@pytest.mark.parametrize(
    ("fields", "config", "eos", "stops", "masked"),
    [
        ({}, {}, None, [], set()),
        ({}, {}, 7, [], {7}),
        ({"stop_token_ids": [3]}, {"eos_token_id": 7}, 7, [3], {3, 7}),
        ({"stop_token_ids": [3]}, {"eos_token_id": [7, 8, 3]}, 7, [3, 8], {3, 7, 8}),
        ({"ignore_eos": True}, {"eos_token_id": [7, 8]}, 7, [], {7, 8}),
    ],
)
def test_generation_config_names_what_ends_a_text(fields, config, eos, stops, masked):
    params = SamplingParams(**fields)
    for _ in range(2):  # the second time changes nothing
        params.update_from_generation_config(config, eos)
        assert params.stop_token_ids == stops
        assert params.all_stop_token_ids == masked
        assert params.eos_token_id == (None if params.ignore_eos else eos)


class Letters:
    """A tokenizer with a token per character, one for " x", and none for "?"."""

    vocab_size = 300

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        if text.startswith(" x"):
            return [256, *map(ord, text[2:])]
        return [ord(letter) for letter in text if letter != "?"]


@pytest.mark.parametrize(
    ("words", "sequences"),
    [
        (["x"], [[120], [256]]),
        (["xy"], [[120, 121], [256, 121]]),
        (["ab"], [[97, 98]]),  # " ab" has a token more
        ([" ab"], [[97, 98]]),
        (["x", "ab"], [[120], [256], [97, 98]]),
    ],
)
def test_bad_words_with_and_without_a_space(words, sequences):
    params = SamplingParams(bad_words=words)
    params.update_from_tokenizer(Letters())
    assert params.bad_words_token_ids == sequences


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["?"], "bad_words='?' is not allowed: the tokenizer makes no token of it."),
        (
            ["\u1000"],
            "bad_words=4096 is not allowed: it is out of vocabulary: ids are 0 to 299.",
        ),
        (
            ["a" * 600, "b" * 600],
            "the words may become 128 sequences and 1024 tokens, and these become 2 and 1200.",
        ),
    ],
    ids=["no token", "outside the vocabulary", "too many"],
)
def test_bad_words_that_cannot_be(words, text):
    params = SamplingParams(bad_words=words)
    with pytest.raises(InvalidParameter) as caught:
        params.update_from_tokenizer(Letters())
    assert str(caught.value).endswith(text)


NOT_OF_THIS_MODEL = [
    (
        {"logprobs": 21},
        "logprobs=21 is not allowed: at most 20 can be asked for. Raise the engine's max_logprobs.",
    ),
    (
        {"logprobs": -1},
        "logprobs=-1 is not allowed: at most 20 can be asked for. Raise the engine's max_logprobs.",
    ),
    (
        {"prompt_logprobs": 21},
        "prompt_logprobs=21 is not allowed: at most 20 can be asked for. Raise the engine's "
        "max_logprobs.",
    ),
    (
        {"logprob_token_ids": [1, 100]},
        "logprob_token_ids=100 is not allowed: it is out of vocabulary: ids are 0 to 99.",
    ),
    (
        {"logprob_token_ids": [1, 2], "logprobs": 3},
        "logprobs=3 is not allowed: with logprob_token_ids it must be None or their number, 2.",
    ),
    (
        {"stop_token_ids": [-1]},
        "stop_token_ids=-1 is not allowed: it is out of vocabulary: ids are 0 to 99.",
    ),
    (
        {"allowed_token_ids": [100]},
        "allowed_token_ids=100 is not allowed: it is out of vocabulary: ids are 0 to 99.",
    ),
    (
        {"logit_bias": {100: 1}},
        "logit_bias=100 is not allowed: it is out of vocabulary: ids are 0 to 99.",
    ),
    (
        {"prompt_logprob_token_ids": [[100]]},
        "prompt_logprob_token_ids=100 is not allowed: it is out of vocabulary: ids are 0 to 99, or "
        "-1.",
    ),
    (
        {"prompt_logprob_token_ids": [1]},
        "prompt_logprob_token_ids=1 is not allowed: it must be a list of at most 1048576 ints.",
    ),
    (
        {"prompt_logprob_token_ids": [[1] * 21, []]},
        "prompt_logprob_token_ids='<a row of 21 ids>' is not allowed: a row may have at most 20 "
        "ids. Raise the engine's max_logprobs to at least 21.",
    ),
    (
        {"prompt_logprob_token_ids": [[], []]},
        "prompt_logprob_token_ids=[[], []] is not allowed: it must have at least one id.",
    ),
    (
        {"trace_decode_token_ids": [100]},
        "trace_decode_token_ids=100 is not allowed: it is out of vocabulary: ids are 0 to 99.",
    ),
    (
        {"trace_decode_token_ids": [1], "n": 2},
        "trace_decode_token_ids=[1] is not allowed: it cannot be used together with n.",
    ),
    (
        {"trace_decode_token_ids": [1], "bad_words": "a"},
        "trace_decode_token_ids=[1] is not allowed: it cannot be used together with bad_words.",
    ),
]


@pytest.mark.parametrize(("fields", "text"), NOT_OF_THIS_MODEL, ids=lambda value: str(value)[:40])
def test_verify_knows_the_model(fields, text):
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**fields).check_for_model(vocab_size=100, max_logprobs=20)
    assert str(caught.value) == text

    most = SamplingParams(logprobs=-1, prompt_logprobs=100)
    most.check_for_model(vocab_size=100, max_logprobs=-1)
    SamplingParams(logprobs=-1, prompt_logprobs=100).check_for_model(
        vocab_size=100, max_logprobs=-1
    )
    with pytest.raises(InvalidParameter, match="at most 100 can be asked for.$"):
        SamplingParams(logprobs=101).check_for_model(vocab_size=100, max_logprobs=-1)


def test_verify_takes_a_config_as_it_is_documented():
    config = SimpleNamespace(max_logprobs=4, get_vocab_size=lambda: 100)
    SamplingParams(logprobs=4).verify(config, None, None, None)
    with pytest.raises(InvalidParameter, match="at most 4 can be asked for"):
        SamplingParams(logprobs=5).verify(
            config, speculative_config=None, structured_outputs_config=None, tokenizer=None
        )
    with pytest.raises(InvalidParameter, match="out of vocabulary"):
        SamplingParams(logprob_token_ids=[100]).verify(config)


def test_limit_output_checks_min_tokens_again():
    params = SamplingParams(max_tokens=None, min_tokens=8)
    with pytest.raises(InvalidParameter, match="at most max_tokens, which is 7"):
        params.clone().limit_output(7)
    params.limit_output(8)
    assert params.max_tokens == 8
    params.limit_output(3)
    assert params.max_tokens == 8


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, 0),
        ({"stop": ["ab", "abcd"]}, 3),
        ({"stop": "abcd", "include_stop_str_in_output": True}, 0),
    ],
)
def test_how_much_text_is_held_back(fields, held):
    assert SamplingParams(**fields).output_text_buffer_length == held


HOSTILE = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.booleans(),
    st.none(),
    st.lists(st.integers(-(2**70), 2**70), max_size=4),
    st.lists(st.text(max_size=2), max_size=3),
    st.dictionaries(st.integers(-5, 5), st.floats(), max_size=3),
)
PUBLIC = [name for name in SamplingParams.__struct_fields__ if not name.startswith("_")]


@given(st.dictionaries(st.sampled_from(PUBLIC), HOSTILE, max_size=4))
def test_anything_is_taken_or_refused_by_name(fields):
    fields.pop("watermarking", None)  # opaque, and refused as a whole by the input processor
    try:
        params = SamplingParams(**fields)
        params.check_for_model(vocab_size=50, max_logprobs=5)
    except InvalidParameter as error:
        assert error.parameter in PUBLIC
        return
    again = params.clone()
    again.validate()
    assert again == params
    if params.prompt_logprob_token_ids is None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {},
            "structured_outputs=None is not allowed: give exactly one of json, regex, "
            "choice, grammar, json_object, structural_tag.",
        ),
        (
            {"json": "{}", "regex": "a"},
            "structured_outputs='json and regex' is not allowed: give exactly one of json, "
            "regex, choice, grammar, json_object, structural_tag.",
        ),
        (
            {"choice": []},
            "structured_outputs.choice=[] is not allowed: there must be at least one choice.",
        ),
        ({"grammar": " "}, "structured_outputs.grammar=' ' is not allowed: it must not be empty."),
        (
            {"json_object": False},
            "structured_outputs.json_object=False is not allowed: it can only be True. Leave "
            "it out instead.",
        ),
        (
            {"regex": "a\0"},
            "structured_outputs.regex='a\\x00' is not allowed: it must not contain the NUL "
            "character.",
        ),
    ],
)
def test_structured_outputs(fields, text):
    with pytest.raises(InvalidParameter) as caught:
        StructuredOutputsParams(**fields)
    assert str(caught.value) == text


def test_structured_outputs_take_a_schema_as_dict_or_text():
    assert StructuredOutputsParams(json={"type": "object"}).json == {"type": "object"}
    assert StructuredOutputsParams(json='{"type": "object"}').regex is None


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"max_pattern_size": -1},
            "repetition_detection.max_pattern_size=-1 is not allowed: it must be an int of "
            "at least 0.",
        ),
        (
            {"min_pattern_size": 2, "max_pattern_size": 1},
            "repetition_detection.min_pattern_size=2 is not allowed: it must be at most "
            "max_pattern_size, which is 1.",
        ),
        (
            {"max_pattern_size": 1, "min_count": 1},
            "repetition_detection.min_count=1 is not allowed: with a max_pattern_size it "
            "must be at least 2.",
        ),
    ],
)
def test_repetition_detection(fields, text):
    with pytest.raises(InvalidParameter) as caught:
        RepetitionDetectionParams(**fields)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"beam_width": 0, "max_tokens": 1},
            "beam_width=0 is not allowed: it must be an int from 1 to 16384.",
        ),
        (
            {"beam_width": 2, "max_tokens": 0},
            "max_tokens=0 is not allowed: it must be an int of at least 1.",
        ),
        (
            {"beam_width": 2, "max_tokens": 1, "length_penalty": math.nan},
            "length_penalty=nan is not allowed: it must be a number from -100 to 100.",
        ),
        (
            {"beam_width": 2, "max_tokens": 1, "length_rule": "vllm"},
            'length_rule=\'vllm\' is not allowed: it must be "sequence" or "output".',
        ),
    ],
)
def test_beam_search_params(fields, text):
    with pytest.raises(InvalidParameter) as caught:
        BeamSearchParams(**fields)
    assert str(caught.value) == text


def test_beam_search_params_need_width_and_length():
    with pytest.raises(TypeError, match="Missing required argument 'beam_width'"):
        BeamSearchParams()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"task": "score"},
            "task='score' is not allowed: there is no such task any more. Use classify.",
        ),
        (
            {"task": "reward"},
            "task='reward' is not allowed: the tasks are embed, token_embed, classify, "
            "token_classify, plugin, embed&token_classify.",
        ),
        (
            {"task": "classify", "dimensions": 3},
            "dimensions=3 is not allowed: the task classify does not take it.",
        ),
        (
            {"dimensions": 0},
            "dimensions=0 is not allowed: it must be None or an int of at least 1.",
        ),
        (
            {"output_kind": RequestOutputKind.DELTA},
            "output_kind=<RequestOutputKind.DELTA: 1> is not allowed: pooling has only "
            "FINAL_ONLY outputs.",
        ),
    ],
)
def test_pooling_params(fields, text):
    with pytest.raises(InvalidParameter) as caught:
        PoolingParams(**fields)
    assert str(caught.value) == text


def test_what_a_request_lists_costs_no_time_that_others_wait_for():
    """No function of Python is called for each id of a long list; for the entries of a short one,
    several are.
    """
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        for names in (
            {"logit_bias": {str(i): 1.0 for i in range(2**14)}},
            {"allowed_token_ids": list(range(2**20))},
        ):
            params = SamplingParams.from_optional(**names).clone()
            params.validate()
            params.check_for_model(vocab_size=2**20, max_logprobs=1)
    finally:
        sys.setprofile(None)
    assert calls < 2**18
    with pytest.raises(InvalidParameter, match="at most 16384 entries. Name the ids"):
        SamplingParams.from_optional(logit_bias=dict.fromkeys(map(str, range(2**14 + 1)), 1.0))
    with pytest.raises(InvalidParameter, match="at most 16384 entries"):
        SamplingParams(logit_bias=dict.fromkeys(range(2**14 + 1), 1.0))
