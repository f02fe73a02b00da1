"""`/classify`, `/score` and `/rerank` against transformers, in the forms of Cohere's and Jina's
clients.
"""

import json

import httpx
import pytest
import torch

from tests.pooling import models
from tests.server.pooling.conftest import served

QUERY = "What is the capital?"
DOCUMENTS = ["a step hands out tokens", "Paris. 1234567890", "def add(first, second):", "x"]


@torch.inference_mode()
def label(pair, text):
    """What transformers makes of one prompt: sigmoid(logit), or the softmax of three."""
    logits = pair.model(torch.tensor([pair.ids(text)])).logits[0]
    made = logits.sigmoid() if logits.numel() == 1 else logits.softmax(-1)
    return made.tolist()


def test_one_label(reranker):
    reply = reranker.post("/classify", {"model": "tiny", "input": [QUERY, *DOCUMENTS]}).json()
    for text, item in zip([QUERY, *DOCUMENTS], reply["data"], strict=True):
        assert item["probs"] == pytest.approx(label(reranker, text), abs=1e-5)
        assert (item["label"], item["num_classes"]) == ("fits", 1)


def test_messages_are_labelled_by_the_path_of_all_kinds_too(reranker):
    body = {"model": "tiny", "messages": [{"role": "user", "content": QUERY}]}
    body["chat_template"] = "{{ messages[0].content }}"
    replies = [reranker.post(path, body) for path in ("/classify", "/invocations")]
    assert [reply.status_code for reply in replies] == [200, 200], replies[1].text
    assert replies[0].json()["data"] == replies[1].json()["data"]


@pytest.mark.full
def test_labels(labeller):
    texts = [QUERY, *DOCUMENTS]
    reply = labeller.post("/classify", {"model": "tiny", "input": texts}).json()
    for index, (text, item) in enumerate(zip(texts, reply["data"], strict=True)):
        right = label(labeller, text)
        assert item["probs"] == pytest.approx(right, abs=1e-5)
        assert item["label"] == ["good", "bad", "ugly"][right.index(max(right))]
        assert (item["index"], item["num_classes"]) == (index, 3)
    assert len({item["label"] for item in reply["data"]}) > 1
    raw = labeller.post("/classify", {"input": QUERY, "use_activation": False}).json()
    assert torch.tensor(raw["data"][0]["probs"]).softmax(-1).tolist() == pytest.approx(
        label(labeller, QUERY), abs=1e-5
    )
    for path, body in (("/score", {"queries": "a", "documents": "b"}),
                       ("/rerank", {"query": "a", "documents": ["b"]})):  # fmt: skip
        reply = labeller.post(path, body)
        assert reply.status_code == 501 and "'classify'" in reply.text
    assert '<body data-can="">' in labeller.get("/").text


def test_pairs_that_are_read_together(reranker):
    right = [label(reranker, QUERY + document)[0] for document in DOCUMENTS]
    for names in (
        ("queries", "documents"),
        ("queries", "items"),
        ("text_1", "text_2"),
        ("data_1", "data_2"),
    ):
        reply = reranker.post("/v1/score", dict(zip(names, (QUERY, DOCUMENTS), strict=True)))
        assert [i["score"] for i in reply.json()["data"]] == pytest.approx(right, abs=1e-5)
    total = sum(len(reranker.ids(QUERY + document)) for document in DOCUMENTS)
    assert reply.json()["usage"]["prompt_tokens"] == total
    pairs = {"queries": DOCUMENTS, "documents": DOCUMENTS[::-1]}
    found = [item["score"] for item in reranker.post("/score", pairs).json()["data"]]
    wanted = [label(reranker, a + b)[0] for a, b in zip(*pairs.values(), strict=True)]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_templates_of_pairs(reranker):
    body = {
        "queries": "q", "documents": "d", "instruction": "Judge.",
        "chat_template":
        "{{ instruction }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    }  # fmt: skip
    right = label(reranker, "Judge.<query>q<document>d")
    found = reranker.post("/score", body).json()
    assert found["data"][0]["score"] == pytest.approx(right[0], abs=1e-5)
    given = {**body, "chat_template_kwargs": {"instruction": "Other."}}
    right = label(reranker, "Other.<query>q<document>d")
    assert reranker.post("/score", given).json()["data"][0]["score"] == pytest.approx(
        right[0], abs=1e-5
    )
    error = reranker.post("/score", {**body, "chat_template_kwargs": {"tools": []}}).json()["error"]
    assert error["param"] == "chat_template_kwargs"


def test_texts_are_cut_before_they_are_paired(reranker):
    first, second = (reranker.tokenizer.encode(text) for text in (QUERY, DOCUMENTS[0]))
    cut = QUERY[: first.offsets[1][1]] + DOCUMENTS[0][: second.offsets[2][1]]
    body = {"queries": QUERY, "documents": DOCUMENTS[0]}
    limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 3}
    reply = reranker.post("/score", {**body, **limits}).json()
    assert reply["data"][0]["score"] == pytest.approx(label(reranker, cut)[0], abs=1e-5)
    for wrong in (-1, 160):
        error = reranker.post("/score", {**body, "max_tokens_per_doc": wrong}).json()["error"]
        assert error["param"] == "max_tokens_per_doc"
        assert "max_tokens_per_doc must be a non-negative integer below" in error["message"]
    long = {"queries": QUERY, "documents": ["x", "many words " * 5000]}
    error = reranker.post("/score", long).json()["error"]
    assert error["code"] == "context_length_exceeded"
    reply = reranker.post(
        "/score", {**long, "truncate_prompt_tokens": -1, "truncation_side": "right"}
    )
    assert reply.status_code == 200 and len(reply.json()["data"]) == 2


def test_one_document_needs_no_list(reranker):
    right = label(reranker, QUERY + DOCUMENTS[1])[0]
    for one in ({"content": [{"type": "text", "text": DOCUMENTS[1]}]}, {"text": DOCUMENTS[1]}):
        [found] = reranker.post("/rerank", {"query": QUERY, "documents": one}).json()["results"]
        assert found["index"] == 0 and found["relevance_score"] == pytest.approx(right, abs=1e-5)


def test_reranking(reranker):
    right = [label(reranker, QUERY + document)[0] for document in DOCUMENTS]
    order = sorted(range(4), key=lambda index: -right[index])
    jina = {"model": "tiny", "query": QUERY, "documents": [{"text": one} for one in DOCUMENTS]}
    cohere = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}
    parts = {"query": {"content": [{"type": "text", "text": QUERY}]}, "documents": DOCUMENTS}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/invocations"):
        for body in (jina, cohere, parts):
            reply = reranker.post(path, body).json()
            assert [item["index"] for item in reply["results"]] == order
            found = [item["relevance_score"] for item in reply["results"]]
            assert found == pytest.approx([right[index] for index in order], abs=1e-5)
            assert [item["document"]["text"] for item in reply["results"]] == [
                DOCUMENTS[index] for index in order
            ]
    few = reranker.post("/rerank", {**cohere, "top_n": 2, "return_documents": False}).json()
    assert [item["index"] for item in few["results"]] == order[:2]
    assert "document" not in few["results"][0]
    assert len(reranker.post("/rerank", {**cohere, "top_n": 0}).json()["results"]) == 4


@pytest.mark.parametrize("library", ["Client", "ClientV2"])
def test_coheres_client_reranks(reranker, library):
    cohere = pytest.importorskip("cohere")
    with httpx.Client() as http:
        client = getattr(cohere, library)("none", base_url=reranker.server.url, httpx_client=http)
        reply = client.rerank(model="tiny", query=QUERY, documents=DOCUMENTS, top_n=3)
    right = sorted((label(reranker, QUERY + one)[0] for one in DOCUMENTS), reverse=True)
    assert [item.relevance_score for item in reply.results] == pytest.approx(right[:3], abs=1e-5)


def test_coheres_client_embeds(embedder):
    cohere = pytest.importorskip("cohere")
    with httpx.Client() as http:
        client = cohere.ClientV2("none", base_url=embedder.server.url, httpx_client=http)
        made = client.embed(model="tiny", texts=["a"], input_type="search_document",
                            embedding_types=["float", "ubinary"])  # fmt: skip
    right = embedder.post("/v1/embeddings", {"input": "a"}).json()["data"][0]["embedding"]
    assert made.embeddings.float_[0] == right


def test_vectors_that_are_compared(embedder):
    texts = [QUERY, *DOCUMENTS]
    states = [models.hidden(embedder.model, embedder.ids(text))[-1] for text in texts]
    right = [torch.cosine_similarity(states[0], one, dim=0).item() for one in states[1:]]
    reply = embedder.post("/score", {"queries": QUERY, "documents": DOCUMENTS}).json()
    assert [item["score"] for item in reply["data"]] == pytest.approx(right, abs=1e-5)
    lengths = [len(embedder.ids(text)) for text in texts]
    assert reply["usage"]["prompt_tokens"] == 4 * lengths[0] + sum(lengths[1:])
    each = {"queries": texts[:4], "documents": texts[1:]}
    found = [item["score"] for item in embedder.post("/score", each).json()["data"]]
    wanted = [
        torch.cosine_similarity(a, b, dim=0).item()
        for a, b in zip(states, states[1:], strict=False)
    ]
    assert found == pytest.approx(wanted, abs=1e-5)
    ranked = embedder.post("/rerank", {"query": QUERY, "documents": DOCUMENTS}).json()["results"]
    assert [item["index"] for item in ranked] == sorted(range(4), key=lambda i: -right[i])
    error = embedder.post("/score", {**each, "instruction": "a"}).json()["error"]
    assert error["param"] == "instruction"


def test_pairs_that_are_more_than_a_window(embedder):
    """Each text with the next one: more than the engine has at a time."""
    texts = [f"{n} texts, of which one is the next" for n in range(151)]
    vectors = embedder.post("/v1/embeddings", {"input": texts}).json()["data"]
    made = torch.tensor([item["embedding"] for item in vectors], dtype=torch.float64)
    reply = embedder.post("/score", {"queries": texts[:-1], "documents": texts[1:]}).json()
    right = (made[:-1] * made[1:]).sum(1)
    assert [item["score"] for item in reply["data"]] == pytest.approx(right.tolist(), abs=1e-6)
    lengths = [len(embedder.ids(text)) for text in texts]
    assert reply["usage"]["prompt_tokens"] == 2 * sum(lengths) - lengths[0] - lengths[-1]


@pytest.mark.full
def test_tokens_that_are_compared(embedder_folder):
    config = json.dumps({"task": "token_embed"})
    with served(*embedder_folder, "--pooler-config", config) as pair:

        def tokens(text):
            states = models.hidden(pair.model, pair.ids(text))
            return torch.nn.functional.normalize(states, dim=-1)

        query = tokens(QUERY)
        right = [(query @ tokens(one).T).max(dim=1).values.sum().item() for one in DOCUMENTS]
        reply = pair.post("/score", {"queries": QUERY, "documents": DOCUMENTS}).json()
        assert [item["score"] for item in reply["data"]] == pytest.approx(right, abs=1e-4)
        [item] = pair.post("/pooling", {"input": QUERY}).json()["data"]
        assert torch.tensor(item["data"]) == pytest.approx(query, abs=1e-5)
        body = {"input": QUERY, "encoding_format": "bytes"}
        said = json.loads(pair.post("/pooling", body).headers["metadata"])
        assert said["data"][0]["shape"] == list(query.shape)
        assert pair.post("/v1/embeddings", {"input": "a"}).status_code == 501


LONG = "many words " * 100
HOSTILE = [
    ("/score", {}, "queries"),
    ("/score", {"queries": "a"}, "queries"),
    ("/score", {"queries": "a", "text_2": "b"}, "queries"),
    ("/score", {"queries": "a", "documents": "b", "items": "c"}, "queries"),
    ("/score", {"queries": [], "documents": "b"}, "queries"),
    ("/score", {"queries": "a", "documents": []}, "documents"),
    ("/score", {"queries": ["a", "b"], "documents": ["c", "d", "e"]}, "queries"),
    ("/score", {"queries": "a", "documents": [["b"]]}, "documents[0]"),
    ("/score", {"queries": "a", "documents": [1]}, "documents[0]"),
    ("/score", {"queries": "a", "documents": {"text": 1}}, "documents"),
    ("/score", {"queries": "a", "documents": {"content": []}}, "documents"),
    (
        "/score",
        {"queries": "a", "documents": {"content": [{"type": "image_url"}]}},
        "documents",
    ),
    ("/score", {"queries": "", "documents": ""}, "documents"),
    ("/score", {"text_1": "a", "text_2": ["b", LONG]}, "text_2[1]"),
    ("/score", {"data_1": "a", "data_2": LONG}, "data_2"),
    ("/score", {"queries": "a", "items": ["b", LONG]}, "items[1]"),
    ("/rerank", {"query": "a", "documents": ["b", LONG]}, "documents[1]"),
    ("/score", {"queries": "a", "documents": "b", "normalize": True}, "normalize"),
    ("/rerank", {"query": "a"}, "documents"),
    ("/rerank", {"documents": ["a"]}, "query"),
    ("/rerank", {"query": "a", "documents": []}, "documents"),
    ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
    ("/rerank", {"query": "a", "documents": "b"}, "documents"),
    ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["text"]}, "rank_fields"),
    ("/classify", {"input": "a", "dimensions": 3}, "dimensions"),
    ("/pooling", {"input": "a", "dimensions": 3}, "dimensions"),
    ("/pooling", {"input": "a", "data": {}}, "data"),
    ("/pooling", {"input": "a", "task": "score"}, "task"),
]


@pytest.mark.parametrize("task", ["score", "encode"])
def test_tasks_that_are_gone_say_what_to_use(reranker, task):
    error = reranker.post("/pooling", {"input": "a", "task": task}).json()["error"]
    assert error["param"] == "task" and "there is no such task any more. Use " in error["message"]


@pytest.mark.parametrize(("path", "body", "param"), HOSTILE, ids=range(len(HOSTILE)))
def test_what_cannot_be_is_refused_in_a_sentence(reranker, path, body, param):
    reply = reranker.post(path, body)
    error = reply.json()["error"]
    assert reply.status_code == 400, reply.text
    assert error["param"] == param, error
    assert len(error["message"]) < 400 and error["message"].endswith((".", "?"))


@pytest.mark.full
def test_a_batch_of_scores_and_vectors(embedder_folder, tmp_path):
    from quire.cli.main import main

    folder, _ = embedder_folder
    bodies = {
        "/v1/embeddings": {"input": ["a", "b"]},
        "/v1/score": {"queries": "a", "documents": ["a", "b"]},
        "/v1/rerank": {"query": "a", "documents": ["b", "a"]},
    }
    lines = [
        {"custom_id": url, "method": "POST", "url": url, "body": body}
        for url, body in bodies.items()
    ]
    lines.append({**lines[0], "custom_id": "wrong", "body": {"input": []}})
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    flags = ["--max-num-seqs", "8", "--kv-cache-memory-bytes", "16M", "--dtype", "float32"]
    code = main(["run-batch", "-i", str(source), "-o", str(target), "--model", str(folder),
                 "--disable-tqdm", *flags])  # fmt: skip
    assert code == 1, "one line failed"
    results = [json.loads(line) for line in target.read_text().splitlines()]
    vectors, scores, ranked, wrong = (one["response"] for one in results)
    assert [len(item["embedding"]) for item in vectors["body"]["data"]] == [48, 48]
    assert scores["body"]["data"][0]["score"] == pytest.approx(1, abs=1e-6)
    assert [item["index"] for item in ranked["body"]["results"]] == [1, 0]
    assert wrong["status_code"] == 400 and "input" in wrong["body"]["error"]["message"]
