"""`/v1/completions` through the official client, against what `LLM` says."""

import asyncio
import json

import openai
import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import InvalidParameter
from quire.server.openai.requests import CompletionRequest, Limits
from tests.server.scripted_app import tokenizer
from tests.server.serve_process import serving

PROMPT = "def add(a, b):"
BEGIN = "<|begin|>"  # a token like others, where tokens are listed


@pytest.fixture(scope="module")
def llm():
    with LLM(dtype="float32", max_num_seqs=16, kv_cache_memory_bytes=2**26) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as made:
        yield made


def create(client, **fields):
    given = {"model": "", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    return client.completions.create(**given)


def test_the_text_is_the_one_of_llm(client, llm):
    [right] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    reply = create(client)
    assert reply.choices[0].text == right.outputs[0].text
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 12
    assert reply.usage.prompt_tokens == len(right.prompt_token_ids)
    assert reply.model == "quire-embedded"
    assert reply.id.startswith("cmpl-")


def test_a_stream_adds_up_to_the_whole(client):
    whole = create(client, n=2, temperature=1, seed=7, stop=["\n\n"], max_tokens=30)
    texts, reasons = {}, {}
    events = create(
        client, n=2, temperature=1, seed=7, stop=["\n\n"], max_tokens=30, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    usage = None
    for event in events:
        usage = event.usage or usage
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            reasons[choice.index] = choice.finish_reason
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_usage_grows_along_the_stream(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [event.usage.completion_tokens for event in create(
        client, stream=True, stream_options=options)]  # fmt: skip
    assert counts == sorted(counts) and counts[-1] == 12


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_a_server_that_forces_usage_sends_it_with_every_chunk(options):
    with serving("--enable-force-include-usage") as forcing:
        for route, body in (
            ("completions", {"prompt": PROMPT}),
            ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ):
            body |= {"max_tokens": 8, "ignore_eos": True, "stream": True, **options}
            lines = forcing.post(f"/v1/{route}", body).text.split("\n\n")
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts) and counts[-1] == 8
            assert chunks[-1]["choices"] == []


def test_batches_of_prompts_and_ids(client, server):
    ids = server.post("/tokenize", {"prompt": PROMPT}).json()["tokens"]
    both = create(client, prompt=[PROMPT, "import os"], n=2, temperature=1, top_p=1e-9)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == both.choices[1].text
    assert create(client, prompt=ids).choices[0].text == both.choices[0].text
    assert create(client, prompt=[ids, ids]).choices[1].text == both.choices[0].text


def test_logprobs_are_llm_s(client, llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=0)
    [right] = llm.generate(PROMPT, params, use_tqdm=False)
    reply = create(client, max_tokens=5, logprobs=3, echo=True)
    found = reply.choices[0].logprobs
    generated = [p[i].logprob for p, i in zip(
        right.outputs[0].logprobs, right.outputs[0].token_ids, strict=True)]  # fmt: skip
    assert found.token_logprobs[-5:] == pytest.approx(generated, abs=1e-5)
    assert found.token_logprobs[0] is None
    assert reply.choices[0].text == PROMPT + right.outputs[0].text
    assert "".join(found.tokens) == BEGIN + reply.choices[0].text
    assert found.text_offset[-1] == len("".join(found.tokens[1:-1])), "no BOS is sent"
    assert len(found.top_logprobs[-1]) in (3, 4)


def test_echo_of_the_prompt_alone(client):
    reply = create(client, max_tokens=0, echo=True, logprobs=1)
    assert reply.choices[0].text == PROMPT
    assert "".join(reply.choices[0].logprobs.tokens) == BEGIN + PROMPT


def test_streamed_logprobs_have_running_offsets(client):
    events = list(create(client, stream=True, logprobs=1, echo=True))
    offsets = [o for e in events for o in e.choices[0].logprobs.text_offset]
    tokens = [t for e in events for t in e.choices[0].logprobs.tokens]
    starts = [len("".join(tokens[1:place])) for place in range(len(tokens))]
    assert offsets == starts


@pytest.mark.parametrize("as_ids", [False, True])
def test_offsets_point_into_the_text_that_is_sent(client, as_ids):
    """Neither the BOS token, which is not sent, nor parts of a character count."""
    extra = {"return_tokens_as_token_ids": as_ids, "return_token_ids": True}
    text = "\N{SNOWMAN} a \N{SNOWMAN}\N{SNOWMAN}b"
    reply = create(client, prompt=text, max_tokens=0, echo=True, logprobs=0, extra_body=extra)
    [choice] = reply.choices
    assert choice.text == text
    ids, words = choice.prompt_token_ids, tokenizer()
    before = [b"".join(map(words.token_bytes, ids[1:place])) for place in range(1, len(ids))]
    whole = [len(data.decode("utf-8", "ignore")) for data in before]
    assert len(set(whole)) < len(whole), "the text has characters of several tokens"
    assert choice.logprobs.text_offset == [0, *whole]


def test_the_tokens_of_a_stop_string_point_at_the_end(client):
    [free] = create(client, max_tokens=8, logprobs=0).choices
    [cut] = create(client, max_tokens=8, logprobs=0, stop=free.text[4:7]).choices
    assert free.text.startswith(cut.text) and len(cut.text) <= 4
    assert max(cut.logprobs.text_offset) <= len(cut.text)


def test_extra_fields_take_effect(client, server):
    extra = {"return_token_ids": True, "top_k": 1, "ignore_eos": True, "min_tokens": 3,
             "request_id": "mine", "cache_salt": "s"}  # fmt: skip
    reply = create(client, temperature=1, extra_body=extra)
    ids = reply.choices[0].model_extra["token_ids"]
    joined = server.post("/detokenize", {"tokens": ids}).json()
    assert joined["prompt"] == reply.choices[0].text
    assert reply.choices[0].text == create(client).choices[0].text
    assert reply.id == "cmpl-mine"
    shown = create(client, logprobs=0, extra_body={"return_tokens_as_token_ids": True})
    assert shown.choices[0].logprobs.tokens == [f"token_id:{i}" for i in ids]


def test_t26_equal_ids_of_two_requests_do_not_mix(server):
    """T26: X-Request-Id is shown and never used as a key."""
    prompts = ["def add(a, b):", "import os\n\n"]

    async def both():
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
            return await asyncio.gather(*(
                client.completions.create(
                    model="", prompt=prompt, max_tokens=20, temperature=0,
                    extra_headers={"X-Request-Id": "same"},
                ) for prompt in prompts))  # fmt: skip

    with server.openai() as client:
        right = [create(client, prompt=p, max_tokens=20).choices[0].text for p in prompts]
    found = asyncio.run(both())
    assert [reply.choices[0].text for reply in found] == right
    assert {reply.id for reply in found} == {"cmpl-same"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"n": 4, "best_of": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": ["x"] * 200}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"stop": ["a"] * 100}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"seed": 1, "extra_body": {"use_beam_search": True}}, "seed"),
        ({"extra_body": {"kv_transfer_params": {"tp_size": 2**40}}}, "kv_transfer_params"),
        ({"extra_body": {"cache_salt": "a@b"}}, "cache_salt"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"extra_body": {"stop_token_ids": [10**7]}}, "stop_token_ids"),
        ({"logprobs": 10**6}, "logprobs"),
        ({"extra_body": {"prompt_logprobs": 10**6}}, "prompt_logprobs"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_honoured_is_refused_by_name(client, fields, param, stream):
    """Before anything of a stream is sent, too."""
    with pytest.raises(openai.BadRequestError) as refusal:
        create(client, stream=stream, **fields)
    assert refusal.value.body["param"] == param
    assert refusal.value.body["code"] in (400, "context_length_exceeded")


def test_options_of_a_stream_go_with_one(client):
    for given in ({"include_usage": True}, {"include_usage": None}, {}):
        with pytest.raises(openai.BadRequestError, match="stream_options=.* stream=true only"):
            create(client, stream_options=given)
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        create(client, stream=True, extra_body={"prompt_logprobs": 1})


def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="quire-embedded"):
        create(client, model="other")


def test_best_of_returns_the_completions_with_the_highest_mean_logprob(client):
    drawn = create(client, n=6, temperature=1, seed=3, logprobs=0)
    means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in drawn.choices}
    reply = create(client, n=2, best_of=6, temperature=1, seed=3)
    right = sorted(means, key=means.get, reverse=True)[:2]
    assert [choice.text for choice in reply.choices] == right
    assert [choice.index for choice in reply.choices] == [0, 1]
    assert reply.choices[0].logprobs is None
    assert reply.usage.completion_tokens == drawn.usage.completion_tokens
    for fields in ({"n": 2, "best_of": 1}, {"best_of": 3, "stream": True}, {"best_of": 1000}):
        with pytest.raises(openai.BadRequestError, match="best_of"):
            create(client, temperature=1, **fields)


@pytest.mark.parametrize(
    "lengths",
    [{"length_penalty": 1.0}, {"length_penalty": -2.0},
     {"length_penalty": -2.0, "length_rule": "output"}],
)  # fmt: skip
def test_beam_search_finds_what_llm_finds(client, llm, lengths):
    params = BeamSearchParams(beam_width=3, max_tokens=8, **lengths)
    [right] = llm.beam_search([PROMPT], params)
    texts = [llm.get_tokenizer().decode(beam.tokens, skip_special_tokens=True) for beam in
             right.sequences]  # fmt: skip
    extra = {"use_beam_search": True, "return_token_ids": True, **lengths}
    reply = create(client, n=3, max_tokens=8, extra_body=extra)
    assert [PROMPT + choice.text for choice in reply.choices] == texts
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert all(len(c.model_extra["token_ids"]) <= 8 for c in reply.choices)
    two = create(client, prompt=[PROMPT, "x ="], n=2, max_tokens=3, extra_body={
        "use_beam_search": True})  # fmt: skip
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]


def test_a_beam_search_keeps_a_form_and_names_what_it_does_not_assert(server):
    schema = {
        "type": "object", "required": ["ok"], "properties": {"ok": {"enum": [1, 23]}},
        "additionalProperties": False, "uniqueItems": True,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 30}
    sent = server.post("/v1/completions", {**body, "response_format": form})
    assert sent.headers["x-ignored-fields"].count("uniqueItems") == 1
    texts = [json.loads(choice["text"])["ok"] for choice in sent.json()["choices"]]
    assert {*texts} <= {1, 23}, "two beams may be one text of other tokens"
    assert [c["finish_reason"] for c in sent.json()["choices"]] == ["stop", "stop"]
    for fields in ({"structured_outputs": {"choice": ["ab"]}}, {"guided_regex": "ab"}):
        reply = server.post("/v1/completions", {**body, **fields}).json()
        assert reply["choices"][0]["text"] == "ab"
    broken = server.post("/v1/completions", {**body, "structured_outputs": {"regex": "(a"}})
    assert broken.status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "stream"),
        ({"stop": "a"}, "stop"),
        ({"n": 11}, "n"),
        ({"min_p": 0.5}, "min_p"),
        ({"use_beam_search": False, "length_penalty": 1.5}, "length_penalty"),
        ({"use_beam_search": False, "length_rule": "output"}, "length_rule"),
    ],
)
def test_what_a_beam_search_cannot_honour_is_refused(server, fields, param):
    body = {"prompt": PROMPT, "use_beam_search": True, "n": 2, **fields}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_beam_search_of_a_conversation(server):
    body = {"messages": [{"role": "user", "content": "hello"}], "n": 2, "max_tokens": 4,
            "use_beam_search": True, "temperature": 0, "logprobs": True}  # fmt: skip
    sent = server.post("/v1/chat/completions", body)
    assert "x-adjusted-fields" not in sent.headers  # the steps are of one token each
    reply = sent.json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert len(reply["choices"][0]["logprobs"]["content"]) <= 4


def test_other_names_and_places_of_fields(server):
    body = {"prompt": PROMPT, "max_completion_tokens": 3, "temperature": 0}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 3
    silent = server.post("/v1/completions", {**body, "detokenize": False, "return_token_ids": True})
    [choice] = silent.json()["choices"]
    assert choice["text"] == "" and len(choice["token_ids"]) == 3
    assert server.post("/v1/completions", {**body, "data_parallel_rank": 0}).status_code == 200
    assert server.post("/v1/completions", {**body, "data_parallel_rank": 7}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"vllm_xargs": {"timeouts": 1}}, "vllm_xargs.timeouts"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_what_nothing_reads_is_refused(server, fields, param):
    reply = server.post("/v1/completions", {"prompt": PROMPT, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


def test_a_shortened_text_keeps_its_bos(server):
    sent = {"prompt": "def add(a, b):", "max_tokens": 1, "return_token_ids": True}

    def ids(**fields):
        [choice] = server.post("/v1/completions", {**sent, **fields}).json()["choices"]
        return choice["prompt_token_ids"]

    whole = ids()
    assert ids(truncate_prompt_tokens=3) == [whole[0], *whole[-2:]]
    assert ids(truncate_prompt_tokens=1) == whole[:1]
    assert ids(truncate_prompt_tokens=3, add_special_tokens=False) == whole[-3:]
    assert ids(truncate_prompt_tokens=3, truncation_side="right") == whole[:3]
    assert ids(truncate_prompt_tokens=3, prompt=whole) == whole[-3:]


@pytest.mark.parametrize("prompt", ["for i in 3", "abc " * 200, [5]], ids=["short", "long", "1"])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_an_echo_with_logprobs_is_the_same_streamed_and_whole(client, n, prompt):
    """The prompt's logprobs come with one of the choices, which need not be the first to start."""
    fields = {"prompt": prompt, "n": n, "logprobs": 1, "echo": True, "temperature": 1, "seed": 3}
    texts, found = [""] * n, [{} for _ in range(n)]
    for event in create(client, max_tokens=5, stream=True, **fields):
        for choice in event.choices:
            texts[choice.index] += choice.text
            for name, values in choice.logprobs.to_dict().items():
                found[choice.index].setdefault(name, []).extend(values)
    whole = create(client, max_tokens=5, **fields)
    assert texts == [choice.text for choice in whole.choices]
    assert found == [choice.logprobs.to_dict() for choice in whole.choices]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [5], "prompt_logprobs": 1},
        {"prompt": [5], "prompt_logprobs": 0},
        {"prompt": "", "logprobs": 1, "echo": True},
        {"prompt": "hello", "truncate_prompt_tokens": 1, "prompt_logprobs": 1},
    ],
    ids=["ids", "none listed", "empty text", "truncated"],
)
def test_a_prompt_of_one_token_has_no_logprob(server, fields):
    reply = server.post("/v1/completions", {"max_tokens": 2, **fields})
    assert reply.status_code == 200, reply.text
    [choice] = reply.json()["choices"]
    if "prompt_logprobs" in fields:
        assert choice["prompt_logprobs"] == [None]
    else:
        assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_echo_with_logprobs_of_chosen_tokens_has_none_for_the_prompt(client, is_streamed):
    reply = create(client, echo=True, max_tokens=2, stream=is_streamed,
                   extra_body={"logprob_token_ids": [5, 6]})  # fmt: skip
    choices = [event.choices[0] for event in reply] if is_streamed else reply.choices
    values = [value for choice in choices for value in choice.logprobs.token_logprobs]
    assert set(values[:-2]) == {None} and None not in values[-2:]


def test_an_echo_whose_time_is_over_shows_what_it_has(server):
    """Its prompt may not be computed yet."""
    fields = {"prompt": "a b " * 900, "max_tokens": 9, "logprobs": 1, "echo": True}
    for more in ({}, {"stream": True, "n": 2}):
        reply = server.post("/v1/completions", {**fields, **more, "timeout_s": 1e-9})
        assert reply.status_code == 200 and "abort" in reply.text and "error" not in reply.text


TALK = [{"role": "user", "content": "hi"}]
MANY = PROMPT * 100


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("completions", {"prompt": MANY, "n": 100, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("completions", {"prompt": MANY, "n": 100, "logprobs": 19, "echo": True}, "logprobs"),
        ("completions", {"prompt": [PROMPT * 99] * 99, "prompt_logprobs": 20}, "prompt_logprobs"),
        ("completions", {"prompt": PROMPT, "best_of": 100, "logprobs": 20, "max_tokens": 999},
         "logprobs"),
        ("chat/completions", {"messages": TALK, "n": 90, "logprobs": True, "top_logprobs": 20,
                              "max_completion_tokens": 900}, "top_logprobs"),
    ],
    ids=["prompt", "echo", "prompts", "best_of", "outputs"],
)  # fmt: skip
def test_a_reply_has_a_bounded_number_of_logprobs(server, path, fields, name):
    """Its size is the product of several small fields."""
    reply = server.post(f"/v1/{path}", fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == name
    assert "may have 1048576 log-probabilities" in reply.json()["error"]["message"]


def test_beams_have_a_bounded_number_of_logprobs():
    body = CompletionRequest(prompt="a", n=10, use_beam_search=True)
    given = [(4, SamplingParams(max_tokens=9000))]
    with pytest.raises(InvalidParameter, match=r"^n=10 .* this one 1890000"):
        body.check_logprobs(Limits(max_model_len=9000), 50_000, given)
    body.check_logprobs(Limits(max_model_len=9000), 50_000, [(4, SamplingParams(max_tokens=4000))])


def test_one_text_of_any_length_may_have_the_likeliest_tokens():
    limits = Limits(max_model_len=2**17)
    body = CompletionRequest(prompt="a")
    body.check_logprobs(limits, 50_000, [(4, SamplingParams(max_tokens=2**17, n=8, logprobs=5))])
    for prompt_len in (4, 2**17 - 4):
        rest = {"max_tokens": 2**17 - prompt_len, "logprobs": 20, "prompt_logprobs": 20}
        body.check_logprobs(limits, 50_000, [(prompt_len, SamplingParams(**rest))])
    with pytest.raises(InvalidParameter, match="prompt_logprobs"):
        rest = {"max_tokens": 1, "prompt_logprobs": -1}
        CompletionRequest(prompt="a", prompt_logprobs=-1).check_logprobs(
            limits, 50_000, [(100, SamplingParams(**rest))]
        )
