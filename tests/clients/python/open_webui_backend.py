"""Open WebUI's back end, without its page and without a login: what the page asks of it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import httpx

from tests.clients.scenarios import CITIES, MESSAGES, TOO_LONG, WEATHER

ENVIRON = {
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "secret",
    "ENABLE_OLLAMA_API": "False",
    "RAG_EMBEDDING_ENGINE": "openai",  # nothing is loaded from a hub
    "HF_HUB_OFFLINE": "1",
    "OFFLINE_MODE": "True",
}


@cache
def _backend(url):
    """Start the back end once; it ends with this process. A client that is logged in."""
    folder = Path(tempfile.mkdtemp())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("open-webui")
    command = [program, "serve", "--host", "127.0.0.1", "--port", str(port)]
    script = (
        "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, signal.SIGTERM);"
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    given = {"DATA_DIR": str(folder), "OPENAI_API_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command], stdout=log, stderr=log, cwd=folder,
        env=environ | ENVIRON | given,
    )  # fmt: skip
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    while process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if client.get("/health").status_code == 200:
                found = client.post("/api/v1/auths/signin", json={"email": "", "password": ""})
                client.headers["Authorization"] = f"Bearer {found.json()['token']}"
                return client
        time.sleep(0.5)
    raise AssertionError((folder / "log").read_text()[-2000:])


def _post(url, path, model, **fields):
    body = {"model": model, "messages": MESSAGES, **fields}
    return _backend(url).post(path, json=body)


def models(url, model):
    found = _backend(url).get("/api/models").json()["data"]
    assert model in [one["id"] for one in found]


def verify_connection(url, model):
    """The button that checks a server in the settings."""
    body = {"url": f"{url}/v1", "key": "none"}
    assert _backend(url).post("/openai/verify", json=body).json()["data"][0]["id"] == model


def chat(url, model):
    """With the advanced settings of the page, `num_ctx` among them."""
    params = {"temperature": 0.2, "top_k": 5, "max_tokens": 16, "num_ctx": 4096, "stop": ["\n\n"]}
    reply = _post(url, "/api/chat/completions", model, params=params).json()
    assert reply["choices"][0]["message"]["content"]


def chat_stream(url, model):
    lines = _post(url, "/api/chat/completions", model, stream=True).text.split("\n")
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def tools_required(url, model):
    reply = _post(url, "/api/chat/completions", model, tools=[WEATHER], tool_choice="required")
    [call, *_] = reply.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in CITIES


def tasks(url, model):
    """Titles, tags and follow-up questions, each an answer of the same model."""
    for name in ("title", "tags", "follow_up", "emoji"):
        reply = _post(url, f"/api/v1/tasks/{name}/completions", model, prompt="a list")
        assert reply.json()["choices"][0]["message"]["content"], name


def messages_of_anthropic(url, model):
    reply = _post(url, "/api/v1/messages", model, messages=MESSAGES[1:], max_tokens=16).json()
    assert reply["content"][0]["text"]


def count_tokens_of_anthropic(url, model):
    """It passes the whole request on."""
    path = "/api/v1/messages/count_tokens"
    reply = _post(url, path, model, messages=MESSAGES[1:], max_tokens=16)
    assert reply.json()["input_tokens"] > 0


def responses(url, model):
    body = {"model": model, "input": "What is a list?", "max_output_tokens": 16}
    assert _backend(url).post("/openai/responses", json=body).json()["output"]


def overflow(url, model):
    reply = _post(
        url, "/api/chat/completions", model, messages=[{**MESSAGES[1], "content": TOO_LONG}]
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"
