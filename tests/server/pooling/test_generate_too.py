"""A server of a model that generates and pools."""

import pytest

from tests.pooling import models
from tests.server.pooling.conftest import served


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("both")
    model = models.make(folder, "Qwen3", "ForCausalLM")
    with served(folder, model, "--runner", "generate", "--convert", "embed") as pair:
        yield pair


def test_texts_and_vectors_of_one_server(both):
    body = {"prompt": "def add(a", "max_tokens": 4, "temperature": 0, "logprobs": 1}
    before = both.post("/v1/completions", body).json()["choices"][0]
    vector = both.post("/v1/embeddings", {"input": "def add(a"}).json()["data"][0]["embedding"]
    assert before == both.post("/v1/completions", body).json()["choices"][0]
    states = models.hidden(both.model, both.ids("def add(a"))[-1]
    assert vector == pytest.approx((states / states.norm()).tolist(), abs=1e-5)
    pair = {"queries": "def add(a", "documents": ["def add(a", "b"]}
    same, other = (item["score"] for item in both.post("/score", pair).json()["data"])
    assert same == pytest.approx(1.0, abs=1e-6) and other < 0.999


def test_what_is_there_and_what_is_not(both):
    paths = both.get("/openapi.json").json()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/score", "/pooling"):
        assert path in paths
    assert "/classify" not in paths and '<body data-can="generate score">' in both.get("/").text
    reply = both.post("/classify", {"input": "a"})
    assert reply.status_code == 501
    said = reply.json()["error"]["message"]
    assert "it generates text" in said and "it serves the pooling task 'embed'" in said
    counted = both.get("/metrics").text
    assert 'finished_reason="stop"' in counted and "generation_tokens_total" in counted
