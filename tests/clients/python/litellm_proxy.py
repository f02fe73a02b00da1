"""litellm's proxy between the client of OpenAI or Anthropic and the server."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from functools import cache
from pathlib import Path

import openai

from tests.clients.scenarios import (
    CITIES,
    MESSAGES,
    PERSON,
    PROMPT,
    TOO_LONG,
    WEATHER,
    check_person,
)

CONFIG = """
model_list:
  - model_name: quire
    litellm_params: {{model: hosted_vllm/{model}, api_base: "{url}/v1", api_key: none}}
  - model_name: quire-openai
    litellm_params: {{model: openai/{model}, api_base: "{url}/v1", api_key: none}}
"""
MODELS = ("quire", "quire-openai")
KEY = "sk-2f6d8e1c5b7a49d3a0e4f6b8c2d1e3f5"
"""The proxy refuses to start without a key."""


@cache
def _proxy(url, model):
    """Start the proxy once; it ends with this process."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.yaml").write_text(CONFIG.format(url=url, model=model))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("litellm")
    command = [program, "--config", folder / "config.yaml", "--port", str(port), "--host",
               "127.0.0.1"]  # fmt: skip
    log = (folder / "log").open("w")
    script = (
        "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command], stdout=log, stderr=log,
        env=os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY},
    )  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    while process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/health/liveliness").read()
            return address
        time.sleep(0.5)
    raise AssertionError((folder / "log").read_text()[-2000:])


def _client(url, model):
    return openai.OpenAI(base_url=f"{_proxy(url, model)}/v1", api_key=KEY, max_retries=0)


def _chat(url, model, served, **fields):
    given = {"messages": MESSAGES, "max_tokens": 24, **fields}
    return _client(url, model).chat.completions.create(model=served, **given)


def chat(url, model):
    for served in MODELS:
        assert _chat(url, model, served).choices[0].message.content


def chat_stream(url, model):
    for served in MODELS:
        chunks = list(_chat(url, model, served, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def json_schema(url, model):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    for served in MODELS:
        answer = _chat(url, model, served, response_format=form, max_tokens=200)
        check_person(json.loads(answer.choices[0].message.content))


def tools_required(url, model):
    for served in MODELS:
        fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
        [call, *_] = _chat(url, model, served, **fields).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"] in CITIES


def tools_auto(url, model):
    for served in MODELS:
        message = _chat(url, model, served, tools=[WEATHER]).choices[0].message
        assert message.content or message.tool_calls


def overflow(url, model):
    for served in MODELS:
        try:
            _chat(url, model, served, messages=[{"role": "user", "content": TOO_LONG}])
        except openai.BadRequestError as error:
            assert "ContextWindowExceededError" in str(error), error
        else:
            raise AssertionError("4,096 tokens are not enough for this prompt")


def responses(url, model):
    for served in MODELS:
        answer = _client(url, model).responses.create(
            model=served, input=PROMPT, max_output_tokens=24
        )
        assert answer.output, served


def messages_of_anthropic(url, model):
    """`/v1/messages` of the proxy, which translates it for the server."""
    for served in MODELS:
        body = {"model": served, "max_tokens": 24, "messages": [MESSAGES[1]]}
        request = urllib.request.Request(
            f"{_proxy(url, model)}/v1/messages",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
        )
        with urllib.request.urlopen(request) as reply:
            assert json.load(reply)["content"], served
