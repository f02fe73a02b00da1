"""LlamaIndex: `OpenAILikeEmbedding` alone and in an index, and the rerankers of Cohere and Jina."""

import asyncio

from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank
from llama_index.postprocessor.jinaai_rerank import JinaRerank

from tests.clients.searches import BEST, QUESTION, TEXTS, check_order, check_same, vectors


def _model(url, model):
    return OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", max_retries=0)


def _nodes():
    return [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]


def _check_reranked(kept, url, model):
    check_order([(TEXTS.index(node.node.text), node.score) for node in kept], url, model)


def embeddings(url, model):
    made, right = _model(url, model), vectors(url, model, TEXTS)
    check_same(made.get_text_embedding_batch(TEXTS), right)
    check_same([made.get_text_embedding(TEXTS[0])], right[:1])
    check_same([made.get_query_embedding(QUESTION)], vectors(url, model, [QUESTION]))
    check_same(asyncio.run(made.aget_text_embedding_batch(TEXTS)), right)


def index(url, model):
    documents = [Document(text=text) for text in TEXTS]
    made = VectorStoreIndex.from_documents(documents, embed_model=_model(url, model))
    [found] = made.as_retriever(similarity_top_k=1).retrieve(QUESTION)
    assert found.node.text == TEXTS[BEST]


def jina_reranker(url, model):
    made = JinaRerank(top_n=2, model=model, api_key="none", base_url=f"{url}/v1")
    kept = made.postprocess_nodes(_nodes(), QueryBundle(QUESTION))
    assert len(kept) == 2
    _check_reranked(kept, url, model)


def cohere_reranker(url, model):
    made = CohereRerank(top_n=2, model=model, api_key="none", base_url=url)
    kept = made.postprocess_nodes(_nodes(), QueryBundle(QUESTION))
    assert len(kept) == 2
    _check_reranked(kept, url, model)
