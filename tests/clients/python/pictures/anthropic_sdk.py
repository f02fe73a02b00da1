"""The anthropic client with pictures in messages and in results of tools."""

import anthropic

from tests.clients.python.pictures.shown import RED, TOKENS, as_base64


def _image(data):
    source = {"type": "base64", "media_type": "image/png", "data": as_base64(data)}
    return {"type": "image", "source": source}


MESSAGES = [{"role": "user", "content": [_image(RED), {"type": "text", "text": "w1"}]}]


def _client(url):
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)


def message(url, model):
    with _client(url) as client:
        answer = client.messages.create(model=model, max_tokens=4, messages=MESSAGES)
    cached = answer.usage.cache_read_input_tokens or 0
    assert answer.content and answer.usage.input_tokens + cached == TOKENS + 2


def message_stream(url, model):
    with (
        _client(url) as client,
        client.messages.stream(model=model, max_tokens=4, messages=MESSAGES) as stream,
    ):
        assert stream.get_final_message().content


def count(url, model):
    with _client(url) as client:
        counted = client.messages.count_tokens(model=model, messages=MESSAGES)
    assert counted.input_tokens == TOKENS + 2


def result_of_a_tool(url, model):
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [_image(RED)]}
    messages = [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "w2"}]},
    ]
    with _client(url) as client:
        counted = client.messages.count_tokens(model=model, messages=messages)
    assert counted.input_tokens > TOKENS
