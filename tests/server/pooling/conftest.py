"""Servers of small models that pool, with the model of transformers beside each."""

import json
from contextlib import contextmanager

import pytest

from tests.pooling import models
from tests.server.serve_process import serving

LONGEST = 400
"""The most tokens of a text that the embedder takes, in pieces of 160."""


class Pair:
    """A running server and what transformers computes with the same checkpoint."""

    def __init__(self, server, model, tokenizer):
        self.server, self.model, self.tokenizer = server, model, tokenizer
        self.post, self.get = server.post, server.get

    def ids(self, text):
        return self.tokenizer.encode(text).ids


@contextmanager
def served(folder, model, *flags):
    from tokenizers import Tokenizer

    with serving(str(folder), "--served-model-name", "tiny", *flags) as server:
        yield Pair(server, model, Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.fixture(scope="session")
def embedder_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("embedder")
    model = models.make(folder, "Qwen3", "Model", is_matryoshka=True)
    prompts = {"prompts": {"search_query": "query: ", "search_document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return folder, model


@pytest.fixture(scope="session")
def embedder(embedder_folder):
    config = {"enable_chunked_processing": True, "max_embed_len": LONGEST}
    flags = ("--pooler-config", json.dumps(config), "--max-num-queued-reqs", "64")
    with served(*embedder_folder, *flags) as pair:
        yield pair


@pytest.fixture(scope="session")
def labeller(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labeller")
    labels = {0: "good", 1: "bad", 2: "ugly"}
    model = models.make(folder, "Llama", "ForSequenceClassification", id2label=labels)
    with served(folder, model) as pair:
        yield pair


@pytest.fixture(scope="session")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    model = models.make(folder, "Qwen2", "ForSequenceClassification", id2label={0: "fits"})
    with served(folder, model, "--trust-request-chat-template") as pair:
        yield pair
