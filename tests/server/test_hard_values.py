"""Texts and values that are hard to send, through a whole server: each request gets its answer, and
no process ends by one. With one API server, and with two.
"""

import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import psutil
import pytest

from quire.cli.main import main
from tests.executor.worker_values import deep
from tests.pooling import models
from tests.server.conftest import KEYS
from tests.server.serve_process import SMALL, command_of, serving

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "tests" / "lora" / "adapters"
KEY = {"Authorization": f"Bearer {KEYS[0]}"}
ENVIRON = {
    "QUIRE_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT)])),
}
FLAGS = (
    *("--enable-lora", "--enable-admin", "--trust-request-chat-template", "--api-key", *KEYS),
    *("--worker-extension-cls", "tests.executor.worker_values.Values"),
)
HALF = "a\ud800b"


def spoil(folder):
    """Give tensors of the adapter names with a lone surrogate."""
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    renamed = {name.replace(".mlp.", f".{HALF}."): entry for name, entry in header.items()}
    written = json.dumps(renamed).encode()
    new = folder / "new"
    new.write_bytes(struct.pack("<Q", len(written)) + written + data[8 + size :])
    new.replace(file)
    return folder


@pytest.fixture(scope="module", params=["1", "2"], ids=["one API server", "two API servers"])
def served(request):
    """A server, all of whose processes are the first ones to the end."""
    flags = (*FLAGS, "--api-server-count", request.param)
    with serving(*flags, environ=ENVIRON, basis=SMALL) as running:
        before = pids(running)
        with running.client(headers=KEY) as client:
            yield client
            body = {"prompt": "a", "max_tokens": 2}
            assert client.post("/v1/completions", json=body).status_code == 200
        assert pids(running) >= before, running.log


def pids(running):
    children = psutil.Process(running.process.pid).children(recursive=True)
    return {child.pid for child in children if "resource_tracker" not in " ".join(child.cmdline())}


def call(client, method, *args):
    return client.post("/collective_rpc", json={"method": method, "args": args})


def load(client, name, folder):
    body = {"lora_name": name, "lora_path": str(folder)}
    return client.post("/v1/load_lora_adapter", json=body)


@pytest.mark.full
def test_an_adapter_with_such_a_name_is_refused_by_it(served, tmp_path):
    folder = spoil(shutil.copytree(ADAPTERS / "shout", tmp_path / "spoiled"))
    for _ in range(2):
        reply = load(served, "spoiled", folder)
        assert reply.status_code == 400, reply.text
        assert "a\\ud800b" in reply.json()["error"]["message"]


def test_one_that_is_spoiled_later_costs_its_requests_a_sentence(served, tmp_path):
    folder = shutil.copytree(ADAPTERS / "shout", tmp_path / "later")
    assert load(served, "later", folder).status_code == 200
    spoil(folder)
    for is_stream in (False, True):
        body = {"model": "later", "prompt": "a", "max_tokens": 2, "stream": is_stream}
        reply = served.post("/v1/completions", json=body)
        assert is_stream or reply.status_code == 400, reply.text
        assert "a\\\\ud800b" in reply.text and "the LoRA adapter 'later'" in reply.text
    assert served.post("/v1/unload_lora_adapter", json={"lora_name": "later"}).status_code == 200


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("an int of 71 bits", "it has an int of more than 64 bits"),
        ("a list in itself", "it is nested more than 64 levels deep, or holds itself"),
        ("900 levels", "it is nested more than 64 levels deep, or holds itself"),
        ("an object", "it has a builtins.object: give plain values"),
        ("a pair as key", "The results cannot be written as JSON"),
    ],
)
def test_a_call_whose_result_cannot_be_sent_says_so(served, kind, why):
    reply = call(served, "give", kind)
    assert reply.status_code == 500 and why in reply.json()["error"]["message"], reply.text


def test_results_are_written_as_they_are(served):
    assert call(served, "give", "60 levels").json() == {"results": [deep(60)]}
    assert call(served, "give", "a lone surrogate").json() == {
        "results": [{"a\\udc80b": ["a\\udc80b"]}]
    }
    [arrays] = call(served, "give", "arrays").json()["results"]
    assert arrays == [[number] * 100 for number in range(3000)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("a lone surrogate", "a\\udc80b"),
        ("no text", "Mute"),
        ("the end of the program", "SystemExit: 3"),
    ],
)
def test_a_call_that_fails_says_so(served, kind, text):
    reply = call(served, "fail", kind)
    assert reply.status_code == 500 and reply.json()["error"]["message"] == text


def test_an_argument_that_cannot_be_sent_is_the_caller_s_error(served):
    for args in ([2**70], [deep(300)]):
        reply = call(served, "give", *args)
        assert reply.status_code == 400 and "collective_rpc" in reply.text, reply.text


def called(arguments, filler=""):
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "call it" + filler},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]


TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.a }}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("size", [0, 100_000], ids=["short", "long"])
@pytest.mark.parametrize(
    "template",
    [TEMPLATE, "{{ 'a\\ud800b' }}{{ messages[0].content }}"],
    ids=["arguments", "literal"],
)
def test_a_template_that_writes_a_lone_surrogate_is_rendered(served, template, size):
    """Arguments of calls are as a model has written them."""
    body = {
        "messages": called('{"a": "a\\ud800b"}', "x" * size),
        "chat_template": template,
        "max_tokens": 2,
        "model": "",
    }
    reply = served.post("/v1/chat/completions/render", json=body)
    assert reply.status_code == (400 if size else 200), reply.text
    if size:
        assert "the prompt is too long" in reply.text


LITERAL = "{{ 'a\\ud800b' }}{% for m in messages %}{{ m.content }}{% endfor %}"
"""A template that writes a lone surrogate before each conversation."""
PLAIN = "a\\ud800bhi"
"""What it makes of TALK."""
TALK = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def templated(tmp_path_factory):
    """A server of a model that generates and pools, with such a template for all routes."""
    folder = tmp_path_factory.mktemp("both")
    models.make(folder, "Qwen3", "ForCausalLM")
    template = folder / "literal.jinja"
    template.write_text(LITERAL)
    flags = ("--runner", "generate", "--convert", "embed", "--trust-request-chat-template")
    with serving(str(folder), "--chat-template", str(template), *flags) as running:
        yield running


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("path", "fields", "usage"),
    [
        ("/v1/chat/completions", {"messages": TALK, "max_tokens": 2}, '"prompt_tokens":%d'),
        ("/v1/messages", {"messages": TALK, "max_tokens": 2}, '"input_tokens":%d'),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 16}, '"input_tokens":%d'),
    ],
)
def test_routes_that_generate_take_what_a_template_writes(
    templated, path, fields, usage, is_stream
):
    count = templated.post("/tokenize", {"prompt": PLAIN}).json()["count"]
    body = {**fields, "stream": is_stream, "model": ""}
    if is_stream and path == "/v1/chat/completions":
        body["stream_options"] = {"include_usage": True}
    reply = templated.post(path, body)
    assert reply.status_code == 200 and "error" not in reply.text.replace('"error":null', "")
    assert usage % count in reply.text


def test_routes_that_do_not_generate_take_what_a_template_writes(templated):
    count = templated.post("/tokenize", {"prompt": PLAIN}).json()["count"]
    assert templated.post("/tokenize", {"messages": TALK}).json()["count"] == count
    counted = templated.post("/v1/messages/count_tokens", {"messages": TALK, "model": ""}).json()
    assert counted["input_tokens"] == count
    rendered = templated.post("/v1/chat/completions/render", {"messages": TALK, "model": ""}).json()
    assert rendered["prompt"] == PLAIN
    for path in ("/v1/embeddings", "/pooling"):
        reply = templated.post(path, {"messages": TALK})
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["prompt_tokens"] == count
        same = templated.post(path, {"input": PLAIN})
        assert reply.json()["data"] == same.json()["data"]


def test_pairs_take_what_a_template_writes(tmp_path):
    models.make(tmp_path, "Qwen2", "ForSequenceClassification", id2label={0: "fits"})
    flags = ("--served-model-name", "tiny", "--trust-request-chat-template")
    with serving(str(tmp_path), *flags) as running:
        plain = "a\\\\ud800b{% for m in messages %}{{ m.content }}{% endfor %}"
        for path, fields in (("/score", {"queries": "q"}), ("/rerank", {"query": "q"})):
            replies = [
                running.post(path, {**fields, "documents": ["d"], "chat_template": template})
                for template in (LITERAL, plain.replace("\\\\", "\\"))
            ]
            assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
            first, second = (reply.json() for reply in replies)
            assert first["usage"] == second["usage"]


def test_batches_take_what_a_template_writes(tmp_path):
    template, source = tmp_path / "literal.jinja", tmp_path / "in.jsonl"
    template.write_text(LITERAL)
    body = {"messages": TALK, "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    source.write_text(json.dumps(line))
    target = tmp_path / "out.jsonl"
    flags = ("--chat-template", str(template), "--disable-tqdm")
    assert main(["run-batch", "-i", str(source), "-o", str(target), *SMALL, *flags]) == 0
    [result] = map(json.loads, target.read_text().splitlines())
    assert result["error"] is None
    assert result["response"]["body"]["usage"]["prompt_tokens"] == len(PLAIN)


@pytest.mark.full
def test_a_spoiled_adapter_stops_the_start(tmp_path):
    folder = spoil(shutil.copytree(ADAPTERS / "shout", tmp_path / "spoiled"))
    command = command_of("--enable-lora", "--lora-modules", f"a={folder}")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | ENVIRON
    )
    assert done.returncode == 2, done.stderr
    assert "a\\ud800b" in done.stderr and "Traceback" not in done.stderr
