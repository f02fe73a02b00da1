"""Pictures in requests to models that pool: every route has the vectors of the engine itself."""

import numpy as np
import pytest

from tests.models.vision.spoken import IMAGE_ID
from tests.pooling.pictures import test_pairs_of_towers
from tests.server.pictures.pictured import (
    PUBLIC,
    Web,
    data_url,
    image,
    ok,
    png,
    served,
    text,
)

ONE, OTHER = png(1), png(2, width=25, height=50)
POOLING = {"runner": "pooling", "convert": "embed"}
ROWS = [IMAGE_ID] * 16
EMBEDDED = ROWS + [5, 13]
"""`TEMPLATE` with one picture before "w1", and w9 after it."""
CONTENT = ROWS + [5]


def messages(*parts):
    return [{"role": "user", "content": list(parts)}]


def content(*parts):
    return {"content": list(parts)}


async def answered(http, path, **body):
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_routes_of_vectors(folder):
    async def use(http, engine):
        one, other = image(data_url(ONE)), image(data_url(OTHER))
        both = [messages(text("w1"), each) for each in (one, other)]
        reply = await answered(http, "/v1/embeddings", messages=both)
        first, second = (np.array(item["embedding"]) for item in reply["data"])
        assert reply["usage"]["prompt_tokens"] == 2 * len(EMBEDDED)
        assert np.linalg.norm(first) == pytest.approx(1, abs=1e-5)
        assert abs(first - second).max() > 1e-3
        again = await answered(http, "/v1/embeddings", messages=both[1])
        np.testing.assert_array_equal(again["data"][0]["embedding"], second)
        pooled = await answered(http, "/pooling", messages=both[0])
        np.testing.assert_array_equal(pooled["data"][0]["data"], first)

        cohere = await answered(http, "/v2/embed", model="tiny", inputs=[content(text("w1"), one)])
        np.testing.assert_allclose(cohere["embeddings"]["float"][0], first, atol=1e-6)
        units = {"input_tokens": 2, "image_tokens": 16}
        assert cohere["meta"]["billed_units"] == units and cohere["texts"] == []
        shown = await answered(http, "/v2/embed", model="tiny", images=[data_url(ONE)] * 2)
        assert len(shown["embeddings"]["float"]) == 2
        assert shown["meta"]["billed_units"] == {"input_tokens": 2, "image_tokens": 32}

    served(use, folder, **POOLING)


def test_routes_of_scores(folder):
    web = Web({"a.example": [PUBLIC]}, {"http://a.example/one.png": ok(ONE)})

    async def use(http, engine):
        one, other = image("http://a.example/one.png"), image(data_url(OTHER))
        documents = [content(text("w1"), one), "w1", content(other, text("w1"))]
        reply = await answered(http, "/score", queries="w2", documents=documents)
        scores = [item["score"] for item in reply["data"]]
        assert len(set(scores)) == 3
        lengths = [len(CONTENT) + 1, 2, len(CONTENT) + 1]
        assert reply["usage"]["prompt_tokens"] == sum(lengths)
        turned = await answered(http, "/score", queries=documents[0], documents="w2")
        assert turned["data"][0]["score"] == pytest.approx(scores[0], abs=1e-5)
        ranked = await answered(http, "/rerank", query="w2", documents=documents)
        order = sorted(range(3), key=lambda index: -scores[index])
        assert [item["index"] for item in ranked["results"]] == order
        found = {item["index"]: item["document"] for item in ranked["results"]}
        assert found[0] == {"text": None, "multi_modal": documents[0]["content"]}
        assert found[1] == {"text": "w1", "multi_modal": None}

    served(use, folder, web=web, **POOLING)


def test_a_picture_alone_is_a_prompt_of_models_with_two_towers(tmp_path):
    """They need no template: what a conversation has is one picture or a text."""
    test_pairs_of_towers.make(tmp_path, "CLIPModel")

    async def use(http, engine):
        reply = await answered(http, "/v1/embeddings", messages=messages(image(data_url(ONE))))
        assert reply["usage"]["prompt_tokens"] == 1
        first = reply["data"][0]["embedding"]
        cohere = await answered(http, "/v2/embed", images=[data_url(OTHER), data_url(ONE)])
        np.testing.assert_array_equal(cohere["embeddings"]["float"][1], first)
        units = {"input_tokens": 0, "image_tokens": 2}
        assert cohere["meta"]["billed_units"] == units
        query = await answered(http, "/v1/embeddings", input="w5 w6")
        right = np.dot(query["data"][0]["embedding"], first)
        body = {"input": "w5 w6", "padding": "max_length", "truncate_prompt_tokens": 7}
        filled = await answered(http, "/v1/embeddings", **body)
        assert filled["usage"]["prompt_tokens"] == 7
        documents = content(image(data_url(ONE)))
        scored = await answered(http, "/score", queries="w5 w6", documents=documents)
        assert scored["data"][0]["score"] == pytest.approx(right, abs=1e-5)
        both = messages(image(data_url(ONE)), text("w5"))
        refused = await http.post("/v1/embeddings", json={"messages": both})
        assert refused.status_code == 400 and "either a text or one picture" in refused.text

    served(use, tmp_path, max_model_len=40)


def test_pairs_that_are_read_together(folder):
    """With rows of the head as a classifier, the picture stands in the pair's one prompt."""
    classifier = {"classifier_from_token": ["w1", "w2"], "method": "from_2_way_softmax"}

    async def use(http, engine):
        documents = [content(image(data_url(each)), text("w1")) for each in (ONE, OTHER)]
        reply = await answered(http, "/score", queries="w2", documents=documents)
        scores = [item["score"] for item in reply["data"]]
        assert abs(scores[0] - scores[1]) > 1e-4
        assert reply["usage"]["prompt_tokens"] == 2 * (len(CONTENT) + 3)
        chat = messages(image(data_url(ONE)), text("w1"))
        template = "w2 w9 {{ messages[0].content }} w9"
        labelled = await answered(http, "/classify", messages=chat, chat_template=template)
        assert labelled["data"][0]["probs"] == pytest.approx([scores[0]], abs=1e-6)

    served(
        use,
        folder,
        runner="pooling",
        convert="classify",
        hf_overrides=classifier,
        server_args={"trust_request_chat_template": True},
    )


def test_the_picture_of_a_query_is_fetched_and_processed_once(folder):
    classifier = {"classifier_from_token": ["w1", "w2"], "method": "from_2_way_softmax"}
    query, one = "http://away.example/query.png", "http://away.example/one.png"
    web = Web({"away.example": [PUBLIC]}, {query: ok(ONE), one: ok(OTHER)})

    async def use(http, engine):
        documents = ["w3", "w4", content(image(one), text("w5"))]
        asked = content(image(query), text("w2"))
        reply = await answered(http, "/score", queries=asked, documents=documents)
        assert sorted(web.asked) == [one, query]
        near = [asked, asked, content(image(data_url(ONE)), text("w2"))]
        documents[2] = content(image(data_url(OTHER)), text("w5"))
        alone = [
            (await answered(http, "/score", queries=q, documents=d))["data"][0]["score"]
            for q, d in zip(near, documents, strict=True)
        ]
        assert [item["score"] for item in reply["data"]] == alone
        many = content(*[image(query)] * 3)
        more = await http.post("/score", json={"queries": many, "documents": ["w1", many]})
        assert more.status_code == 400 and "At most 4 image(s)" in more.text

    served(
        use,
        folder,
        runner="pooling",
        convert="classify",
        hf_overrides=classifier,
        web=web,
        mm_processor_cache_gb=0,
        limit_mm_per_prompt={"image": 4},
    )


def test_what_cannot_be_is_refused_in_a_sentence(folder):
    async def use(http, engine):
        one = image(data_url(ONE))
        private = image("http://10.0.0.1/one.png")
        for path, body, named in (
            ("/v1/embeddings", {"messages": messages(one), "truncate_prompt_tokens": 5}, "not cut"),
            ("/v1/embeddings", {"messages": messages(private)}, "Image 0"),
            ("/v1/embeddings", {"messages": messages(*[one] * 9)}, "maximum context length"),
            ("/v1/embeddings", {"messages": messages(one), "mm_processor_kwargs": {"size": 1}},
             "trust-request-mm-kwargs"),
            ("/score", {"queries": "w1", "documents": content(private)}, "Image 0"),
            ("/score", {"queries": "w1", "documents": content(one), "max_tokens_per_doc": 3},
             "not cut"),
            ("/score", {"queries": "w1", "documents": content({"type": "input_audio"})},
             "input_audio"),
            ("/v2/embed", {"images": ["ftp://a.example/one.png"]}, "Image 0"),
            ("/v2/embed", {"images": [data_url(ONE)], "texts": ["w1"]}, "exactly one"),
        ):  # fmt: skip
            reply = await http.post(path, json=body)
            assert reply.status_code in (400, 422) and named in reply.text, (path, body, reply.text)
        for path, body, parameter in (
            ("/v1/embeddings", {"messages": [messages(one), messages(private)]}, "input[1]"),
            ("/v2/embed", {"images": [data_url(ONE), "ftp://a.example/x"]}, "images[1]"),
            ("/score", {"queries": "w1", "documents": [content(one), content(private)]},
             "documents[1]"),
        ):  # fmt: skip
            reply = await http.post(path, json=body)
            assert reply.status_code in (400, 422)
            assert reply.json()["error"]["param"] == parameter
        spoken = await answered(http, "/v1/embeddings", input="w1 w2")
        assert len(spoken["data"]) == 1

    served(use, folder, **POOLING)
