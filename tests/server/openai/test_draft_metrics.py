"""What became of drafts, in replies of the server."""

import json

import pytest

from tests.server.serve_process import serving

CODE = "for i in range(10):\n    print(i)\n" * 3
BODY = {"prompt": CODE, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "ab " * 20}], "max_tokens": 40, "temperature": 0}
SUMMARY = {
    "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "num_spec_steps",
    "num_accepted_draft_tokens", "num_draft_tokens", "num_spec_tokens",
}  # fmt: skip
CONFIG = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1,
    "num_speculative_tokens_per_batch_size": [[1, 99, 3]],
}  # fmt: skip


@pytest.fixture(scope="module")
def server():
    args = ("-sc", json.dumps(CONFIG), "--per-request-spec-decode-metrics", "detailed")
    with serving(*args) as served:
        yield served


def of_reply(reply):
    metrics = reply["metrics"]
    assert list(metrics) == ["speculative_decoding"]
    found = metrics["speculative_decoding"]
    assert found.keys() >= SUMMARY
    assert len(found["acceptance_histogram"]) == found["num_spec_tokens"] + 1 == 4
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
    return found


def test_whole_replies_of_one_completion_have_them(server):
    found = of_reply(server.post("/v1/completions", BODY).json())
    assert found["num_accepted_draft_tokens"] == sum(found["per_step_accepted"]) > 0
    assert found["num_draft_tokens"] == sum(found["per_step_drafted"])
    of_reply(server.post("/v1/chat/completions", CHAT).json())


@pytest.mark.parametrize("more", [{"n": 2, "temperature": 1}, {"prompt": [CODE, CODE]}])
def test_replies_of_several_completions_have_none(server, more):
    assert server.post("/v1/completions", BODY | more).json()["metrics"] is None


@pytest.mark.parametrize(("route", "body"), [("completions", BODY), ("chat/completions", CHAT)])
def test_a_stream_has_them_with_its_usage(server, route, body):
    whole = of_reply(server.post(f"/v1/{route}", body).json())
    with_usage = body | {"stream": True, "stream_options": {"include_usage": True}}
    lines = server.post(f"/v1/{route}", with_usage).text.split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert not any("metrics" in chunk for chunk in chunks[:-1])
    assert of_reply(chunks[-1])["num_spec_tokens"] == whole["num_spec_tokens"]
    assert "metrics" not in server.post(f"/v1/{route}", body | {"stream": True}).text
