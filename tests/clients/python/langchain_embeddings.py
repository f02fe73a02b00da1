"""LangChain: `OpenAIEmbeddings` with texts, with texts cut by a tokenizer and with token ids;
Jina's reranker and embeddings.
"""

import asyncio

import tiktoken
from langchain_community.document_compressors import jina_rerank
from langchain_community.embeddings import jina
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from openai import BadRequestError

from tests.clients.modes import Unsupported
from tests.clients.searches import (
    BEST,
    QUESTION,
    TEXTS,
    TOO_LONG,
    ask,
    check_order,
    check_same,
    vectors,
)


def _model(url, model, **fields):
    return OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, **fields
    )


def texts(url, model):
    """`check_embedding_ctx_length=False` sends texts as they are."""
    made = _model(url, model, check_embedding_ctx_length=False)
    right = vectors(url, model, TEXTS)
    check_same(made.embed_documents(TEXTS), right)
    check_same([made.embed_query(TEXTS[0])], right[:1])
    check_same(asyncio.run(made.aembed_documents(TEXTS)), right)
    check_same(made.embed_documents(TEXTS, chunk_size=2), right)


def texts_cut_by_the_tokenizer(url, model):
    """The default checks lengths; with the model's own tokenizer it sends texts, long ones in
    pieces, and averages their vectors.
    """
    [served] = ask(url, "/v1/models")["data"]
    made = _model(
        url, model, tiktoken_enabled=False, tiktoken_model_name=served["root"],
        embedding_ctx_length=200,
    )  # fmt: skip
    check_same(made.embed_documents(TEXTS), vectors(url, model, TEXTS))
    [long] = made.embed_documents([TOO_LONG])
    assert abs(sum(number * number for number in long) - 1) < 1e-6


def token_ids_of_openai(url, model):
    """The default sends ids of OpenAI's vocabulary, which mean nothing to another model; those
    that it does not have are refused.
    """
    try:
        tiktoken.get_encoding("cl100k_base")
    except Exception as error:
        raise Unsupported(f"tiktoken fetches its vocabulary from the network: {error}") from error
    try:
        _model(url, model).embed_documents(["A pseudonymous llama's embeddings."])
    except BadRequestError as error:
        assert "out of vocabulary" in str(error), error
    else:
        raise AssertionError("ids beyond the vocabulary were taken")


def vector_store(url, model):
    made = _model(url, model, check_embedding_ctx_length=False)
    store = InMemoryVectorStore.from_texts(TEXTS, made)
    [found] = store.as_retriever(search_kwargs={"k": 1}).invoke(QUESTION)
    assert found.page_content == TEXTS[BEST]


def jina_reranker(url, model):
    """The address is a constant of the module. Documents are texts or objects."""
    jina_rerank.JINA_API_URL = f"{url}/v1/rerank"
    made = jina_rerank.JinaRerank(model=model, jina_api_key="none", top_n=2)
    for documents in (TEXTS, [{"text": text} for text in TEXTS]):
        for top_n in (None, 1, 2):
            found = made.rerank(documents, QUESTION, top_n=top_n)
            assert len(found) == (top_n or len(TEXTS))
            check_order([(one["index"], one["relevance_score"]) for one in found], url, model)
    kept = made.compress_documents([Document(page_content=text) for text in TEXTS], QUESTION)
    assert len(kept) == 2 and kept[0].page_content == TEXTS[BEST]


def jina_embeddings(url, model):
    jina.JINA_API_URL = f"{url}/v1/embeddings"
    made = jina.JinaEmbeddings(model_name=model, jina_api_key="none")
    check_same(made.embed_documents(TEXTS), vectors(url, model, TEXTS))
    check_same([made.embed_query(TEXTS[1])], vectors(url, model, TEXTS[1:2]))
