"""Prompts as embeddings over HTTP: those of the model's own table have the answer of their ids."""

import base64
import io
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

import quire
from quire.errors import InvalidParameter
from quire.server.openai.requests import CompletionRequest
from tests.server.serve_process import serving

IDS = [21, 22, 23, 24, 25, 26]


@pytest.fixture(scope="module")
def client():
    with serving("--enable-prompt-embeds") as server, server.client() as made:
        made.server = server
        yield made


@pytest.fixture(scope="module")
def table():
    folder = os.path.join(os.path.dirname(quire.__file__), "embedded", "checkpoint")
    return load_file(os.path.join(folder, "model.safetensors"))["model.embed_tokens.weight"]


def encoded(rows, how="torch"):
    stream = io.BytesIO()
    if how == "numpy":
        np.save(stream, rows.float().numpy())
    elif how == "torch":
        torch.save(rows, stream)
    else:
        stream.write(save({"prompt": rows}))
    return base64.b64encode(stream.getvalue()).decode()


def complete(client, **fields):
    given = {"model": "", "max_tokens": 8, "temperature": 0, "logprobs": 1, **fields}
    return client.post("/v1/completions", json=given)


def choices(reply):
    assert reply.status_code == 200, reply.text
    return [(each["text"], each["logprobs"]["token_logprobs"]) for each in reply.json()["choices"]]


def test_the_answer_is_that_of_the_ids(client, table):
    rows = table[IDS].contiguous()
    [right] = choices(complete(client, prompt=IDS))
    for how in ("torch", "numpy", "safetensors"):
        reply = complete(client, prompt_embeds=encoded(rows, how))
        assert choices(reply) == [right]
    assert reply.json()["usage"]["prompt_tokens"] == len(IDS)
    both = complete(client, prompt=[[5, 6], IDS], prompt_embeds=[encoded(rows), encoded(rows[:3])])
    alone = [
        choices(complete(client, **fields))[0]
        for fields in ({"prompt_embeds": encoded(rows[:3])}, {"prompt": [5, 6]})
    ]
    assert choices(both) == [right, *alone, right], "embeddings come first"


def test_chats_have_embeddings_in_their_place(client, table):
    def chat(part):
        content = [{"type": "text", "text": "def"}, part]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8,
                "temperature": 0, "return_token_ids": True}  # fmt: skip
        reply = client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    found = chat({"type": "prompt_embeds", "data": encoded(table[IDS].contiguous())})
    ids = found["prompt_token_ids"]
    at = len(ids) - 1 - ids[::-1].index(0) - (len(IDS) - 1)
    assert ids[at : at + len(IDS)] == [0] * len(IDS)
    given = [*ids[:at], *IDS, *ids[at + len(IDS) :]]
    right = complete(client, prompt=given).json()["choices"][0]["text"]
    assert found["choices"][0]["message"]["content"] == right


def test_embeddings_of_a_chat_that_are_too_long_together_are_refused(client, table):
    rows = {"type": "prompt_embeds", "data": encoded(torch.zeros(3000, table.shape[1]))}
    messages = [{"role": "user", "content": [rows, rows]}]
    reply = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["code"] == "context_length_exceeded"


def test_streams_go_on_when_the_core_is_killed(client, table):
    rows = encoded(table[IDS * 12].contiguous())
    fields = {"prompt_embeds": rows, "max_tokens": 60, "ignore_eos": True}
    [(right, _)] = choices(complete(client, **fields))
    body = {"model": "", "temperature": 0, "stream": True, **fields}
    found, is_dead = "", False
    with client.stream("POST", "/v1/completions", json=body, timeout=60) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                found += json.loads(line[6:])["choices"][0]["text"]
                if not is_dead:
                    is_dead = True
                    client.server.core().kill()
    assert found == right


REFUSED = {
    "width": ({"prompt_embeds": encoded(torch.zeros(3, 5))}, "shape must be [tokens, "),
    "base64": ({"prompt_embeds": "%"}, "this is not base64"),
    "of several": ({"prompt_embeds": [encoded(torch.zeros(3, 5))] * 2}, "prompt_embeds[0]"),
    "none": ({"prompt_embeds": []}, "a request has a prompt, or prompt_embeds"),
    "nothing": ({}, "a request has a prompt, or prompt_embeds"),
    "echo": ({"prompt_embeds": "AA==", "echo": True}, "has no text"),
    "beams": ({"prompt_embeds": "AA==", "use_beam_search": True}, "made of embeddings"),
    "cut": ({"prompt_embeds": "AA==", "truncate_prompt_tokens": 2}, "has no tokens for it"),
    "prompt_logprobs": ({"prompt_embeds": "AA==", "prompt_logprobs": 2}, "has no tokens for it"),
    "too many": ({"prompt_embeds": ["AA=="] * 200}, "at most 128 prompts"),
}


@pytest.mark.parametrize(
    ("prompt", "text"), [("a", "prompt=4 is not"), (None, "prompt_embeds=3 is not")]
)
def test_prompts_and_embeddings_are_counted_together(prompt, text):
    body = CompletionRequest(model="", prompt=prompt, prompt_embeds=["AA=="] * 3)
    with pytest.raises(InvalidParameter, match=text):
        body.prompts(2)


def test_an_empty_list_is_none(client):
    texts = [
        complete(client, prompt="def add", **fields).json()["choices"][0]["text"]
        for fields in ({}, {"prompt_embeds": []})
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(client, name):
    fields, text = REFUSED[name]
    reply = complete(client, **fields)
    assert reply.status_code == 400 and text in reply.json()["error"]["message"]


def test_embeddings_that_are_not_finite_are_refused(client, table):
    reply = complete(client, prompt_embeds=encoded(torch.full((3, table.shape[1]), float("nan"))))
    assert reply.status_code == 400 and "not finite" in reply.json()["error"]["message"]


def test_embeddings_as_long_as_the_context_are_refused(client, table):
    reply = complete(client, prompt_embeds=encoded(torch.zeros(5000, table.shape[1])))
    assert reply.status_code == 400 and "context" in reply.json()["error"]["message"].lower()
