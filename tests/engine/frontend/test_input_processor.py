"""What the core is sent, and what is refused before it."""

import pytest

from quire.errors import InvalidParameter, InvalidType, NotBuiltYet, PromptTooLong, RequestError
from quire.params import (
    PoolingParams,
    RepetitionDetectionParams,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.engine.frontend.scripted_engines import embedded_tokenizer, make_engine


def send(prompt="a b", params=None, engine=None, **options):
    engine = engine or make_engine()
    engine.add_request("r", prompt, params or SamplingParams(), **options)
    return engine.front_end.client.seen[-1]


def test_text_is_encoded_with_special_tokens():
    assert send("a b").prompt_token_ids == embedded_tokenizer().encode("a b")
    plain = send("a b", tokenization_kwargs={"add_special_tokens": False}).prompt_token_ids
    assert plain == embedded_tokenizer().encode("a b", add_special_tokens=False)
    assert len(send("a b c d", tokenization_kwargs={"max_length": 2}).prompt_token_ids) == 2


def test_ids_go_as_they_are():
    request = send({"prompt_token_ids": [4, 5], "cache_salt": "salt"}, arrival_time=3.5, priority=7)
    assert request.prompt_token_ids == [4, 5]
    assert (request.cache_salt, request.arrival_time, request.priority) == ("salt", 3.5, 7)


def test_what_ends_a_request_is_filled_in():
    engine = make_engine(eos_token_ids=(8, 9), max_model_len=100)
    eos = embedded_tokenizer().eos_token_id
    given = SamplingParams(max_tokens=None, stop_token_ids=[9, 7])
    own = send([4, 5], given, engine).sampling_params
    assert own.max_tokens == 98
    assert own.eos_token_id == eos
    assert own.stop_token_ids == [9, 7, 8]
    assert own.all_stop_token_ids == {eos, 7, 8, 9}
    assert given.max_tokens is None, "the caller's object stays as it is"
    assert given.stop_token_ids == [9, 7]


def test_without_a_tokenizer_the_generation_config_ends_texts():
    engine = make_engine(eos_token_ids=(8,), tokenizer=None)
    own = send([4], SamplingParams(), engine).sampling_params
    assert (own.eos_token_id, own.stop_token_ids) == (None, [8])


def test_a_token_is_left_to_be_drawn():
    engine = make_engine(eos_token_ids=(8, 9), max_model_len=100)
    fields = {"min_tokens": 2, "allowed_token_ids": [8, 7], "stop_token_ids": [7]}
    with pytest.raises(InvalidParameter, match="min_tokens"):
        send([4], SamplingParams(**fields), engine)
    for change in ({"min_tokens": 0}, {"stop_token_ids": []}, {"allowed_token_ids": [8, 6]}):
        assert send([4], SamplingParams(**fields | change), engine)


def test_bad_words_are_encoded():
    own = send(params=SamplingParams(bad_words=["self"])).sampling_params
    encode = embedded_tokenizer().encode
    assert own.bad_words_token_ids[0] == encode("self", add_special_tokens=False)


def test_prompt_logprobs_never_read_the_cache():
    params = SamplingParams()
    params.prompt_logprobs = 1  # assigned later, so the object has not noticed
    assert send(params=params).sampling_params.skip_reading_prefix_cache is True


def test_seeds_are_given_or_drawn():
    assert send(params=SamplingParams(seed=5)).seed == 5
    assert send(params=SamplingParams(seed=-2)).seed == 2**64 - 2
    engine = make_engine(seed=1)
    drawn = [send(engine=engine).seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert all(0 <= seed < 2**64 for seed in drawn)
    again = make_engine(seed=1)
    send(engine=again)
    send(engine=again, params=SamplingParams(seed=3))  # takes no number away from the others
    assert send(engine=again).seed == drawn[1]
    assert send(engine=make_engine(seed=2)).seed != drawn[0]
    assert send(engine=make_engine(seed=None)).seed != send(engine=make_engine(seed=None)).seed


def test_a_refused_request_takes_no_seed():
    engine, other = make_engine(seed=1), make_engine(seed=1)
    with pytest.raises(InvalidType):
        send(engine=engine, priority="high")
    assert send(engine=engine).seed == send(engine=other).seed


def test_several_completions_are_several_requests():
    engine = make_engine()
    send([4, 5], SamplingParams(n=3, seed=2**64 - 2, logprobs=1), engine)
    seen = engine.front_end.client.seen
    assert [request.handle for request in seen] == [0, 1, 2]
    assert [request.seed for request in seen] == [2**64 - 2, 2**64 - 1, 0]
    assert {request.sampling_params.n for request in seen} == {1}
    send([4, 5], None, engine)
    assert seen[-1].handle == 3


WRONG_HEADERS = ["x", ["traceparent"], {1: "a"}, {"a": 1}, {"a": b"x"}, {"a": "\ud800"}, 0.5]
WRONG_OPTIONS = [
    "x", [1], {1: 2}, {"no_such": 1}, {"add_special_tokens": "no"}, {"add_special_tokens": None},
    {"max_length": "3"}, {"max_length": True}, {"max_length": -1}, {"max_length": 2**70},
    {"truncation": []}, {"truncation": "some"}, {"truncation": 1.5}, {"truncation_side": 5},
    {"truncation_side": "up"}, {"truncate_prompt_tokens": "3"}, {"truncate_prompt_tokens": 0},
]  # fmt: skip


@pytest.mark.parametrize("prompt", ["a b", [4, 5]], ids=["text", "ids"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("trace_headers", value) for value in WRONG_HEADERS),
        *(("tokenization_kwargs", value) for value in WRONG_OPTIONS),
    ],
    ids=str,
)
def test_headers_and_options_of_another_type_are_the_request_s_errors(name, value, prompt):
    """Whether there are traces or not, and whether a text is encoded or not."""
    engine = make_engine()
    inputs, params = engine.input_processor, SamplingParams()
    for call in (
        lambda: engine.add_request("r", prompt, params, **{name: value}),
        lambda: inputs.process_inputs("r", prompt, params, **{name: value}),
    ):
        with pytest.raises(RequestError) as caught:
            call()
        inner = value if isinstance(value, dict) and name == "tokenization_kwargs" else ()
        assert caught.value.parameter in (name, *map(str, inner))
    assert not engine.has_unfinished_requests() and not engine.front_end.client.seen
    send(prompt, engine=engine, trace_headers={"a": "b"}, tokenization_kwargs={"truncation": None})


def test_seeds_are_drawn_by_requests_that_are_taken_alone():
    plain, engine = make_engine(), make_engine()
    wanted = [send([4], engine=plain).seed for _ in range(2)]
    for more in ({"arrival_time": "x"}, {"priority": "x"}, {"trace_headers": 5}):
        with pytest.raises(RequestError):
            send([4], engine=engine, **more)
    with pytest.raises(RequestError, match="thinking_token_budget"):
        send([4], SamplingParams(thinking_token_budget=3), engine)
    assert [send([4], engine=engine).seed for _ in range(2)] == wanted


MOST = "it is out of vocabulary: ids are 0 to"
BAD = [
    (
        "",
        {"tokenization_kwargs": {"add_special_tokens": False}},
        InvalidParameter,
        "prompt='' is not allowed: it must have at least one token.",
    ),
    ([], {}, InvalidParameter, "prompt=[] is not allowed: it must have at least one token."),
    (
        [1] * 4096,
        {},
        PromptTooLong,
        "This model's maximum context length is 4096 tokens of prompt and output together, and the "
        "prompt is too long: it has 4096 tokens. Please reduce the length of the input prompt, or "
        "raise max_model_len.",
    ),
    ([3, -1], {}, InvalidParameter, f"prompt_token_ids=-1 is not allowed: {MOST} MAX."),
    ([10**9], {}, InvalidParameter, f"prompt_token_ids=1000000000 is not allowed: {MOST} MAX."),
    ("a", {"params": 3}, InvalidType, "params=3 is not allowed: it must be a SamplingParams."),
    (
        "a",
        {"params": PoolingParams()},
        InvalidType,
        "this engine generates text. Give SamplingParams, or start the engine with "
        "runner='pooling'.",
    ),
    (
        "a",
        {"priority": 2**31},
        InvalidParameter,
        "priority=2147483648 is not allowed: it must be an int that fits 32 bits.",
    ),
    (
        "a",
        {"lora_request": "x"},
        RequestError,
        "LoRA is not enabled: start the engine with enable_lora (--enable-lora).",
    ),
    (
        "a",
        {"tokenization_kwargs": {"stride": 1}},
        RequestError,
        "'stride' is not a parameter here: add_special_tokens, truncation, max_length and "
        "truncation_side exist.",
    ),
    (
        "a",
        {"params": SamplingParams(logprobs=21)},
        InvalidParameter,
        "logprobs=21 is not allowed: at most 20 can be asked for. Raise the engine's max_logprobs.",
    ),
    (
        "a",
        {"params": SamplingParams(thinking_token_budget=3)},
        InvalidParameter,
        "thinking_token_budget=3 is not allowed: it is not known how this model marks its "
        "reasoning. Give reasoning_config, or a server a --reasoning-parser with marks.",
    ),
    (
        "a",
        {"params": SamplingParams(watermarking="x")},
        NotBuiltYet,
        "watermarking='x' is not allowed: this release does not implement it. Leave it out.",
    ),
    (
        "a",
        {"params": SamplingParams(prompt_logprob_token_ids=[[1], [2]])},
        InvalidParameter,
        "prompt_logprob_token_ids='<2 rows>' is not allowed: with the 2 tokens of this prompt and "
        "prompt_logprob_start=0 it must have 1 scored rows.",
    ),
    (
        "a",
        {"params": SamplingParams(routed_experts_prompt_start=1)},
        InvalidParameter,
        "routed_experts_prompt_start=1 is not allowed: the engine does not report experts. "
        "Start the engine with enable_return_routed_experts, or leave it out.",
    ),
    (
        "a",
        {"params": SamplingParams(extra_args={"kv_transfer_params": {"x": 1}})},
        InvalidParameter,
        "kv_transfer_params={'x': 1} is not allowed: this engine has no connector that reads them. "
        "Start it with kv_transfer_config, or leave them out.",
    ),
    (
        "a",
        {"params": SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))},
        InvalidParameter,
        "structured_outputs='regex' is not allowed: the engine has no tokenizer. "
        "Give an engine with a tokenizer.",
    ),
]


@pytest.mark.parametrize(("prompt", "options", "error", "text"), BAD, ids=lambda v: str(v)[:40])
def test_refused_before_the_core_hears_of_it(prompt, options, error, text):
    engine = make_engine()
    text = text.replace("MAX", str(embedded_tokenizer().vocab_size - 1))
    with pytest.raises(error) as caught:
        send(prompt, engine=engine, **options)
    assert str(caught.value).endswith(text)
    assert isinstance(caught.value, ValueError)
    assert not engine.front_end.client.seen
    assert not engine.has_unfinished_requests()
    assert send(engine=engine).handle == 0, "the engine is as before"


def test_assigned_nonsense_is_found_when_the_request_is_added():
    params = SamplingParams()
    params.top_p = 7
    with pytest.raises(InvalidParameter, match=r"^top_p=7 is not allowed"):
        send(params=params)


@pytest.mark.parametrize(
    ("prompt", "params", "text"),
    [
        (
            "a",
            {},
            "prompt='a' is not allowed: the engine has no tokenizer (`skip_tokenizer_init=True`). "
            "Give prompt_token_ids, "
            "or an engine with a tokenizer.",
        ),
        (
            [1],
            {"stop": "a"},
            "stop=['a'] is not allowed: the engine has no tokenizer. Give stop_token_ids, or "
            "an engine with a tokenizer.",
        ),
        (
            [1],
            {"bad_words": "a"},
            "bad_words=['a'] is not allowed: the engine has no tokenizer. Give logit_bias "
            "instead, or an engine with a tokenizer.",
        ),
    ],
    ids=["text", "stop", "bad words"],
)
def test_what_needs_a_tokenizer(prompt, params, text):
    with pytest.raises(InvalidParameter) as caught:
        send(prompt, SamplingParams(**params), make_engine(tokenizer=None))
    assert str(caught.value) == text


def test_neutral_values_and_what_is_built_go_through():
    params = SamplingParams(
        repetition_detection=RepetitionDetectionParams(4, 1, 3),
        extra_args={"my_processor": 3, "kv_transfer_params": None},
        thinking_token_budget=-1,
        logprob_token_ids=[1, 2],
    )
    own = send(params=params, lora_request=None).sampling_params
    assert own.repetition_detection == params.repetition_detection
    assert own.extra_args == params.extra_args
