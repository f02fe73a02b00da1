"""LlamaIndex: `OpenAILike` with blocks of pictures."""

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike

from tests.clients.python.pictures.shown import BLUE, RED, TOKENS, as_url


def _model(url, model):
    given = {"is_chat_model": True, "context_window": 128, "max_tokens": 4, "max_retries": 0}
    return OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", **given)


def _message(*blocks):
    return [ChatMessage(role="user", blocks=[TextBlock(text="w1"), *blocks])]


def chat(url, model):
    answer = _model(url, model).chat(_message(ImageBlock(image=RED, image_mimetype="image/png")))
    assert answer.message.content and answer.raw.usage.prompt_tokens == TOKENS + 2


def chat_of_two(url, model):
    blocks = [ImageBlock(image=RED), ImageBlock(image=BLUE)]
    answer = _model(url, model).chat(_message(*blocks))
    assert answer.raw.usage.prompt_tokens == 2 * TOKENS + 2


def chat_by_url(url, model):
    answer = _model(url, model).chat(_message(ImageBlock(url=as_url(RED))))
    assert answer.raw.usage.prompt_tokens == TOKENS + 2


def chat_stream(url, model):
    chunks = list(_model(url, model).stream_chat(_message(ImageBlock(image=RED))))
    assert chunks
