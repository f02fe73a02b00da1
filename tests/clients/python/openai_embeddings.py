"""openai for Python: vectors in each format, many texts, and what is refused."""

import asyncio
import base64
import struct

import openai

from tests.clients.searches import TEXTS, TOO_LONG, check_same, vectors


def _client(url, kind=openai.OpenAI):
    return kind(base_url=f"{url}/v1", api_key="none", max_retries=0)


def _refusal(url, model, **fields):
    try:
        _client(url).embeddings.create(model=model, **fields)
    except openai.BadRequestError as error:
        return error
    raise AssertionError(fields)


def embeddings(url, model):
    """Without `encoding_format` the client asks for base64 and decodes it."""
    made = _client(url).embeddings.create(model=model, input=TEXTS)
    check_same([item.embedding for item in made.data], vectors(url, model, TEXTS))
    assert made.usage.prompt_tokens == made.usage.total_tokens > 0


def embeddings_float(url, model):
    made = _client(url).embeddings.create(model=model, input=TEXTS[0], encoding_format="float")
    check_same([made.data[0].embedding], vectors(url, model, TEXTS[:1]))


def embeddings_base64(url, model):
    made = _client(url).embeddings.create(model=model, input=TEXTS, encoding_format="base64")
    raw = [base64.b64decode(item.embedding) for item in made.data]
    decoded = [struct.unpack(f"<{len(one) // 4}f", one) for one in raw]
    check_same(decoded, vectors(url, model, TEXTS))


def embeddings_of_token_ids(url, model):
    ids = [101, 2023, 2003, 1037, 3231, 102]  # "this is a test"
    made = _client(url).embeddings.create(model=model, input=ids)
    check_same([made.data[0].embedding], vectors(url, model, ["This is a test"]))


def embeddings_async(url, model):
    async def ask():
        async with _client(url, openai.AsyncOpenAI) as client:
            creations = (client.embeddings.create(model=model, input=text) for text in TEXTS)
            return await asyncio.gather(*creations)

    found = [made.data[0].embedding for made in asyncio.run(ask())]
    check_same(found, vectors(url, model, TEXTS))


def embeddings_of_many(url, model):
    made = _client(url).embeddings.create(model=model, input=TEXTS * 100)
    assert [item.index for item in made.data] == list(range(300))
    check_same([item.embedding for item in made.data], vectors(url, model, TEXTS) * 100)


def dimensions_are_refused(url, model):
    """The model was not trained to be cut."""
    assert _refusal(url, model, input=TEXTS, dimensions=128).param == "dimensions"


def overflow(url, model):
    assert _refusal(url, model, input=[TEXTS[0], TOO_LONG]).code == "context_length_exceeded"


def overflow_truncated(url, model):
    fields = {"truncate_prompt_tokens": -1}
    made = _client(url).embeddings.create(model=model, input=TOO_LONG, extra_body=fields)
    assert made.usage.prompt_tokens == 256
