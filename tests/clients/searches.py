"""What clients of models that pool are asked, and what the server itself says to it."""

import json
import urllib.request

TEXTS = [
    "A recipe for pancakes with blueberries.",
    "The train to Ulm leaves at half past nine.",
    "Cats sleep for most of the day.",
]
QUESTION = "When can I go to Ulm by rail?"
BEST = 1
"""Which of the texts answers the question."""
TOO_LONG = "One sentence follows another. " * 200
"""More tokens than the 256 of MiniLM."""


def ask(url, path, **fields):
    """The JSON that the server answers, without any client."""
    body = json.dumps(fields).encode() if fields else None
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, body, headers)) as reply:
        return json.load(reply)


def vectors(url, model, texts):
    """The vector of each text as the server writes it in JSON."""
    reply = ask(url, "/v1/embeddings", model=model, input=list(texts), encoding_format="float")
    return [item["embedding"] for item in reply["data"]]


def scores(url, model):
    """How well each text answers the question."""
    reply = ask(url, "/score", model=model, queries=QUESTION, documents=TEXTS)
    return [item["score"] for item in reply["data"]]


def check_same(found, expected, within=0.0):
    """Numbers are equal, or `within` of each other."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) <= within


def check_order(results, url, model):
    """`results`, pairs of a text's place and its score, are the server's, the best first."""
    expected = scores(url, model)
    order = sorted(range(len(TEXTS)), key=lambda index: -expected[index])
    assert order[0] == BEST
    assert [index for index, _ in results] == order[: len(results)]
    for index, score in results:
        assert abs(score - expected[index]) < 1e-6
