"""Chosen experts in replies of the server."""

import base64
import io

import numpy as np
import pytest

from quire.testing import make_checkpoint
from tests.server.serve_process import serving

SHAPE = {
    "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
    "moe_intermediate_size": 40, "decoder_sparse_step": 1, "mlp_only_layers": [1],
}  # fmt: skip
PROMPT = [7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("moe"), SHAPE, "qwen3_moe", dtype="float32")
    with serving(str(folder), "--enable-return-routed-experts") as served:
        yield served


def experts_in(choice):
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


def test_completions_have_the_experts_of_all_tokens_but_the_last(server):
    prompts = [PROMPT, PROMPT[::-1]]
    body = {"prompt": prompts, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    choices = server.post("/v1/completions", body).json()["choices"]
    for choice in choices:
        found = experts_in(choice)
        assert found.shape == (len(PROMPT) + 4 - 1, 3, 3) and found.dtype == np.int16
        assert not found[:, 1].any() and found[:, (0, 2)].any(), "layer 1 has no experts"
    later = body | {"prompt": PROMPT, "routed_experts_prompt_start": 3}
    [later] = server.post("/v1/completions", later).json()["choices"]
    assert np.array_equal(experts_in(later), experts_in(choices[0])[3:])


def test_chat_completions_have_them_and_streams_do_not(server):
    body = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3, "temperature": 0}
    reply = server.post("/v1/chat/completions", body | {"ignore_eos": True}).json()
    usage, [choice] = reply["usage"], reply["choices"]
    assert len(experts_in(choice)) == usage["total_tokens"] - 1
    text = server.post("/v1/chat/completions", body | {"stream": True}).text
    assert "data: [DONE]" in text and "routed_experts" not in text


def test_a_start_after_the_prompt_is_refused(server):
    body = {"prompt": PROMPT, "max_tokens": 1, "routed_experts_prompt_start": 6}
    reply = server.post("/v1/completions", body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "routed_experts_prompt_start"
    assert "at most 5, the tokens of the prompt" in error["message"]
