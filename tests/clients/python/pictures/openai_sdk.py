"""The openai client with pictures in chats and responses."""

import openai

from tests.clients.python.pictures.shown import BLUE, RED, TOKENS, as_url

FIXED = {"temperature": 0, "max_tokens": 4}


def _part(data):
    return {"type": "image_url", "image_url": {"url": as_url(data), "detail": "low"}}


def _asked(*parts):
    return [{"role": "user", "content": [{"type": "text", "text": "w1"}, *parts]}]


def _client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def chat(url, model):
    with _client(url) as client:
        answer = client.chat.completions.create(model=model, messages=_asked(_part(RED)), **FIXED)
    assert answer.choices[0].message.content and answer.usage.prompt_tokens == TOKENS + 2


def chat_of_two(url, model):
    messages = _asked(_part(RED), {"type": "text", "text": "w2"}, _part(BLUE))
    with _client(url) as client:
        answer = client.chat.completions.create(model=model, messages=messages, **FIXED)
    assert answer.usage.prompt_tokens == 2 * TOKENS + 3


def chat_stream(url, model):
    with _client(url) as client:
        pieces = client.chat.completions.create(
            model=model,
            messages=_asked(_part(RED)),
            stream=True,
            stream_options={"include_usage": True},
            **FIXED,
        )
        *_, last = pieces
    assert last.usage.prompt_tokens == TOKENS + 2


def response(url, model):
    part = {"type": "input_image", "image_url": as_url(RED), "detail": "auto"}
    content = [{"type": "input_text", "text": "w1"}, part]
    with _client(url) as client:
        answer = client.responses.create(
            model=model, input=[{"role": "user", "content": content}], max_output_tokens=4
        )
    assert answer.output_text and answer.usage.input_tokens == TOKENS + 2


def cut_picture(url, model):
    with _client(url) as client:
        try:
            client.chat.completions.create(model=model, messages=_asked(_part(RED[:40])))
        except openai.BadRequestError as error:
            assert "Image 0" in str(error)
        else:
            raise AssertionError("a cut picture was taken")
