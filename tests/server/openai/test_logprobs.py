"""Log-probabilities of chat: which tokens are listed, in which order, and their bytes."""

import json

import pytest

from quire.outputs import Logprob
from quire.server.openai.logprobs import chat_logprobs
from tests.server.scripted_app import tokenizer

HELLO = [{"role": "user", "content": "def add(a, b):"}]
SNOWMAN = "\N{SNOWMAN}"


def entries(server, **fields):
    body = {"messages": HELLO, "logprobs": True, "max_tokens": 8, **fields}
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["logprobs"]["content"]


def test_the_likeliest_tokens_are_listed_in_their_order(server):
    """Also where the sampled token is none of them: it has its own place."""
    found = entries(server, top_logprobs=3, temperature=2, seed=4, max_tokens=24)
    num_outside = 0
    for entry in found:
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        is_listed = any(top["token"] == entry["token"] for top in entry["top_logprobs"])
        assert is_listed or entry["logprob"] <= values[-1]
        num_outside += not is_listed
    assert num_outside > 0, "the test needs a token outside the list"


def test_the_same_tokens_are_listed_whichever_is_sampled(server):
    def first(**fields):
        return entries(server, top_logprobs=4, max_tokens=1, **fields)[0]["top_logprobs"]

    assert first(temperature=0) == first(temperature=2, seed=1)


def test_tokens_that_were_asked_for_are_listed(server):
    asked = [300, 301, 302]
    for fields in ({}, {"top_logprobs": 5}):
        for entry in entries(server, logprob_token_ids=asked, temperature=0, **fields):
            listed = [tokenizer().token_text(i) for i in asked]
            assert sorted(top["token"] for top in entry["top_logprobs"]) == sorted(listed)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_list_the_tokens_that_were_asked_for_whatever_the_number(server, stream):
    body = {"prompt": "hi", "max_tokens": 1, "logprobs": 5, "stream": stream}
    body |= {"logprob_token_ids": [500], "allowed_token_ids": [42]}
    reply = server.post("/v1/completions", body | {"return_tokens_as_token_ids": True})
    text = reply.text.partition("\n")[0].removeprefix("data: ") if stream else reply.text
    [listed] = json.loads(text)["choices"][0]["logprobs"]["top_logprobs"]
    assert set(listed) == {"token_id:42", "token_id:500"}


@pytest.mark.parametrize("as_ids", [False, True])
def test_bytes_are_the_token_s_also_of_part_of_a_character(server, as_ids):
    ids = tokenizer().encode(SNOWMAN, add_special_tokens=False)
    assert len(ids) > 1, "the character must be several tokens"
    for token_id in ids:
        fields = {"allowed_token_ids": [token_id], "max_tokens": 1}
        [entry] = entries(server, top_logprobs=1, return_tokens_as_token_ids=as_ids, **fields)
        assert bytes(entry["bytes"]) == tokenizer().token_bytes(token_id)
        assert len(entry["top_logprobs"]) == 1
    assert b"".join(map(tokenizer().token_bytes, ids)) == SNOWMAN.encode()


def test_of_a_place_without_other_tokens_the_sampled_one_is_listed():
    words = tokenizer()
    position = {5: Logprob(-0.5, 1, "a"), 6: Logprob(float("-inf"), 2, "b")}
    [entry] = chat_logprobs([position], [5], 2, words).content
    assert [top.token for top in entry.top_logprobs] == ["a", "b"]
    assert entry.top_logprobs[1].logprob == -9999.0
    [entry] = chat_logprobs([position], [5], -1, words).content
    assert len(entry.top_logprobs) == 2
    sampled_first = dict(reversed(position.items()))
    [entry] = chat_logprobs([sampled_first], [6], 1, words).content
    assert [top.token for top in entry.top_logprobs] == ["a"]
