"""Cohere's client: `rerank` in both versions of its interface, `embed` in the second."""

import asyncio
import base64
import struct

import cohere

from tests.clients.searches import (
    BEST,
    QUESTION,
    TEXTS,
    TOO_LONG,
    check_order,
    check_same,
    vectors,
)


def _client(url, kind=cohere.ClientV2):
    return kind("none", base_url=url)


def _results(reply):
    return [(item.index, item.relevance_score) for item in reply.results]


def rerank(url, model):
    client = _client(url)
    asked = {"model": model, "query": QUESTION, "documents": TEXTS}
    check_order(_results(client.rerank(**asked)), url, model)
    few = client.rerank(**asked, top_n=2, max_tokens_per_doc=128)
    assert len(few.results) == 2
    check_order(_results(few), url, model)


def rerank_long_documents(url, model):
    """Documents that are longer than the model are refused, or cut where that is asked for."""
    asked = {"model": model, "query": QUESTION, "documents": [TEXTS[0], TEXTS[BEST] + TOO_LONG]}
    try:
        _client(url).rerank(**asked)
    except cohere.BadRequestError as error:
        assert "context_length_exceeded" in str(error.body)
    else:
        raise AssertionError("a document that is too long was taken")
    found = _client(url).rerank(**asked, max_tokens_per_doc=12).results
    assert [item.index for item in found] == [1, 0]


def rerank_async(url, model):
    async def ask():
        async with _client(url, cohere.AsyncClientV2) as client:
            return await client.rerank(model=model, query=QUESTION, documents=TEXTS)

    check_order(_results(asyncio.run(ask())), url, model)


def rerank_first_version(url, model):
    """`Client` sends to `/v1/rerank`; documents may be objects there."""
    asked = {"model": model, "query": QUESTION, "return_documents": True}
    for documents in (TEXTS, [{"text": text} for text in TEXTS]):
        reply = _client(url, cohere.Client).rerank(documents=documents, **asked)
        check_order(_results(reply), url, model)
        assert [item.document.text for item in reply.results] == [
            TEXTS[item.index] for item in reply.results
        ]


def embed(url, model):
    """A model without prompts has no types of input: `input_type=None`."""
    asked = {"model": model, "texts": TEXTS, "input_type": None}
    kinds = ["float", "base64", "binary", "ubinary"]
    made = _client(url).embed(**asked, embedding_types=kinds).embeddings
    right = vectors(url, model, TEXTS)
    check_same(made.float_, right)
    raw = [base64.b64decode(one) for one in made.base64]
    check_same([struct.unpack(f"<{len(one) // 4}f", one) for one in raw], right)
    for vector, packed, shifted in zip(right, made.ubinary, made.binary, strict=True):
        bits = "".join("1" if number >= 0 else "0" for number in vector)
        assert packed == [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]
        assert shifted == [byte - 128 for byte in packed]


def embed_in_the_default_form(url, model):
    made = _client(url).embed(model=model, texts=TEXTS, input_type=None)
    check_same(made.embeddings.float_, vectors(url, model, TEXTS))


def embed_input_type_is_refused(url, model):
    try:
        _client(url).embed(model=model, texts=TEXTS, input_type="search_document")
    except cohere.BadRequestError as error:
        assert "input_type" in str(error.body)
    else:
        raise AssertionError("the model has no prompts")
