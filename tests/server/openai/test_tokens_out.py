"""`/inference/v1/generate`, against `/v1/completions` with the same ids."""

import pytest

from tests.server.serve_process import serving

IDS = [5, 6, 7, 8]
SAMPLING = {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 6, "logprobs": 1}


@pytest.fixture(scope="module")
def scaled():
    with serving("--enable-scale-out") as server:
        yield server


def test_ids_come_out_as_completions_have_them(scaled):
    theirs = {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt": IDS}
    right = scaled.post("/v1/completions", SAMPLING | theirs).json()["choices"]
    body = {"request_id": "r1", "token_ids": IDS, "sampling_params": SAMPLING | {"output_kind": 2}}
    reply = scaled.post("/inference/v1/generate", body).json()
    assert reply["request_id"] == "r1"
    for mine, its in zip(reply["choices"], right, strict=True):
        assert mine["token_ids"] == its["token_ids"]
        entries = mine["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == its["logprobs"]["tokens"]
        assert [entry["logprob"] for entry in entries] == its["logprobs"]["token_logprobs"]
        assert all(len(entry["top_logprobs"]) == 1 for entry in entries)


def test_what_fits_comes_where_no_limit_is_given(scaled):
    ids = IDS * 1010
    body = {"token_ids": ids, "sampling_params": {"temperature": 0.0, "ignore_eos": True}}
    [choice] = scaled.post("/inference/v1/generate", body).json()["choices"]
    assert len(choice["token_ids"]) == 4096 - len(ids) > 16


def test_no_others_are_listed_beside_the_sampled_token(scaled):
    sampling = {"max_tokens": 3, "temperature": 1.0, "seed": 3, "logprobs": 0}
    body = {"token_ids": IDS, "sampling_params": sampling}
    [choice] = scaled.post("/inference/v1/generate", body).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        [listed] = entry["top_logprobs"]
        assert (listed["token"], listed["logprob"]) == (entry["token"], entry["logprob"])


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"token_ids": []}, "token_ids"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"stream": True}, "stream"),
        ({"output_mode": "text"}, "output_mode"),
        ({"sampling_params": {"output_kind": 1}}, "sampling_params.output_kind"),
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"skip": 1}}, "sampling_params.skip"),
        ({"sampling_params": {"n": 10**6}}, "sampling_params.n"),
    ],
)
def test_what_is_not_served_is_named(scaled, fields, name):
    reply = scaled.post("/inference/v1/generate", {"token_ids": IDS} | fields)
    assert reply.status_code in (400, 501)
    assert name in reply.json()["error"]["message"] + str(reply.json()["error"]["param"])
