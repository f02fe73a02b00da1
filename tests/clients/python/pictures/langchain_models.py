"""LangChain: `ChatOpenAI` and `ChatAnthropic` with pictures, in its own form of blocks and in the
form of each API.
"""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.clients.python.pictures.shown import RED, TOKENS, as_base64, as_url

TEXT = {"type": "text", "text": "w1"}
BLOCK = {"type": "image", "base64": as_base64(RED), "mime_type": "image/png"}


def _chat(url, model, **fields):
    given = {"max_tokens": 4, "max_retries": 0, "temperature": 0, **fields}
    return ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", **given)


def _check(answer):
    assert answer.text and answer.usage_metadata["input_tokens"] == TOKENS + 2


def chat(url, model):
    part = {"type": "image_url", "image_url": {"url": as_url(RED)}}
    _check(_chat(url, model).invoke([HumanMessage([TEXT, part])]))


def chat_block(url, model):
    _check(_chat(url, model).invoke([HumanMessage([TEXT, BLOCK])]))


def chat_stream(url, model):
    chunks = list(_chat(url, model, stream_usage=True).stream([HumanMessage([TEXT, BLOCK])]))
    assert sum(c.usage_metadata["input_tokens"] for c in chunks if c.usage_metadata) == TOKENS + 2


def responses(url, model):
    _check(_chat(url, model, use_responses_api=True).invoke([HumanMessage([TEXT, BLOCK])]))


def anthropic(url, model):
    made = ChatAnthropic(model=model, base_url=url, api_key="none", max_tokens=4, max_retries=0)
    answer = made.invoke([HumanMessage([TEXT, BLOCK])])
    assert answer.text and answer.usage_metadata["input_tokens"] == TOKENS + 2
