"""`quire chat --url` and `quire complete --url`: against real servers, and against hostile ones."""

import io
import json
import re
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quire.cli.main import main
from tests.server.conftest import KEYS


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "QUIRE_API_KEY", "http_proxy"):
        monkeypatch.delenv(name, raising=False)


def say(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))


def test_complete_prints_what_the_official_client_gets(server, capsys):
    words = ["--url", f"{server.url}/v1/", "-q", "def add(", "--max-tokens", "9", "--seed", "4"]
    assert main(["complete", *words, "--temperature", "1.5", "--stop", "zzz", "--stats"]) == 0
    seen = capsys.readouterr()
    [choice] = (
        server.openai()
        .completions.create(
            model="quire-embedded", prompt="def add(", max_tokens=9, seed=4, temperature=1.5
        )
        .choices
    )
    assert seen.out == choice.text.rstrip("\n") + "\n"
    assert re.match(r"\(9 tokens, the first after \d+\.\d+ s, ", seen.err)


def test_a_talk_with_a_server_is_the_talk_with_the_same_model_here(server, monkeypatch, capsys):
    questions = ("print a list", "sort it", "/history")
    say(monkeypatch, *questions)
    flags = ["--max-tokens", "6", "--temperature", "0", "--system-prompt", "Be short."]
    assert main(["chat", "--url", f"{server.url}/v1", *flags]) == 0
    there = capsys.readouterr().out
    assert there.count("[assistant] ") == 2
    say(monkeypatch, *questions)
    assert main(["chat", *flags, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == there


def test_complete_goes_on_line_by_line_here_and_there(server, monkeypatch, capsys):
    flags = ["--max-tokens", "5", "--temperature", "0"]
    say(monkeypatch, "def a(", "", "import os")
    assert main(["complete", *flags, "--url", f"{server.url}/v1"]) == 0
    there = capsys.readouterr().out
    say(monkeypatch, "def a(", "", "import os")
    assert main(["complete", *flags, "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == there and there


def test_what_the_server_refuses_is_told_and_the_talk_goes_on(server, monkeypatch, capsys):
    say(monkeypatch, "x " * 9000, "def f(")
    assert main(["complete", "--url", f"{server.url}/v1", "--max-tokens", "4"]) == 0
    seen = capsys.readouterr()
    assert "max_model_len" in seen.err and seen.out.strip()
    words = ["--url", f"{server.url}/v1", "-q", "a", "--allowed-token-ids", "123456789"]
    assert main(["complete", *words]) == 2
    assert "allowed_token_ids" in capsys.readouterr().err


def test_the_key_comes_from_flag_or_environment(guarded, monkeypatch, capsys):
    words = ["complete", "--url", f"{guarded.url}/v1", "-q", "a", "--max-tokens", "2"]
    assert main(words) == 1
    assert "401" in capsys.readouterr().err
    assert main([*words, "--api-key", KEYS[1]]) == 0
    monkeypatch.setenv("OPENAI_API_KEY", KEYS[0])
    assert main(words) == 0
    assert main([*words, "--api-key", "wrong"]) == 1
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("QUIRE_API_KEY", f"{KEYS[0]},other")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{guarded.url}/v1")
    assert main(["complete", "-q", "a", "--max-tokens", "2", "--url"]) == 0


def test_a_model_that_is_not_there(server, capsys):
    words = ["--url", f"{server.url}/v1", "--model-name", "nobody", "-q", "a"]
    assert main(["chat", *words]) == 1
    assert "`nobody` does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--url", "localhost:8000"], "begins with http://"),
        (["--url", "http://a", "--model", "x"], "Give --model-name"),
        (["--url", "http://a", "--max-model-len", "9"], "the engine is the server's"),
        (["--api-key", "x"], "goes with --url"),
        (["--model-name", "x"], "goes with --url"),
        (["--n", "2"], "one completion"),
        (["--logprobs", "2"], "quire generate --json"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_flags_that_mean_nothing_are_refused(command, words, part, capsys):
    assert main([command, "-q", "a", *words]) == 2
    assert part in capsys.readouterr().err


class Hostile(BaseHTTPRequestHandler):
    """Answers with what the server was given, byte for byte; remembers the keys that it saw."""

    def do_GET(self):
        self._send(self.server.models)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(self.server.answer)

    def _send(self, answer):
        self.server.keys.append(self.headers.get("Authorization"))
        self.wfile.write(answer)
        self.close_connection = True

    def log_message(self, *_):
        pass


def reply(status, body, *headers):
    lines = [f"HTTP/1.1 {status}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body.encode()


MODELS = reply("200 OK", '{"data": [{"id": "m"}]}')


@contextmanager
def hostile(answer, models=MODELS):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        server.answer, server.models, server.keys = answer, models, []
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server, *flags):
    return main(["chat", "--url", server.url, "-q", "a", *flags])


def stream(*events, end="data: [DONE]\n\n"):
    body = "".join(f"data: {e if isinstance(e, str) else json.dumps(e)}\r\n\r\n" for e in events)
    return reply("200 OK", ": hello\n\n" + body + end, "Content-Type: text/event-stream")


def delta(**fields):
    return {"choices": [{"index": 0, "delta": fields}]}


def test_thoughts_and_calls_are_shown(capsys):
    events = [delta(role="assistant", content=None), delta(reasoning="hm"), delta(content="yes "),
              delta(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}]),
              {"choices": [], "usage": {"completion_tokens": 3}}]  # fmt: skip
    with hostile(stream(*events)) as server:
        assert ask(server, "--stats") == 0
    seen = capsys.readouterr()
    assert seen.out == "hm\n\nyes f{}\n" and seen.err.startswith("(3 tokens")


@pytest.mark.parametrize(
    ("answer", "part", "out"),
    [
        (stream(delta(content="half"), end=""), "cut off", "half"),
        (stream(delta(content="half"), {"error": {"message": "broken"}}), "broken", "half"),
        (stream("not JSON"), "not JSON", ""),
        (stream("[1]"), "no events", ""),
        (reply("500 X", "<html>", "Content-Type: text/html"), "500 X", ""),
        (reply("429 X", '{"error": {"message": "too many"}}'), "429 too many", ""),
        (reply("404 Not Found", '{"error": "no such model"}'), "404 no such model", ""),
        (b"nonsense\r\n\r\n", "No answer from", ""),
        (b"", "No answer from", ""),
    ],
)
def test_a_broken_server_is_one_line(answer, part, out, capsys):
    with hostile(answer) as server:
        assert ask(server) == 1
    seen = capsys.readouterr()
    assert part in seen.err and len(seen.err.splitlines()) == 1
    assert seen.out.strip() == out


@pytest.mark.parametrize("models", [reply("200 OK", "[]"), reply("200 OK", '{"data": []}')])
def test_a_server_without_models(models, capsys):
    with hostile(b"", models) as server:
        assert ask(server) == 1
    assert "names no model" in capsys.readouterr().err


def test_a_key_does_not_follow_a_redirect(capsys):
    with hostile(stream(delta(content="mine now"))) as other:
        there = reply("302 Found", "", f"Location: {other.url}/chat/completions")
        with hostile(there) as server:
            assert ask(server, "--api-key", "secret") == 1
            assert server.keys == ["Bearer secret"] * 2
        assert not other.keys
    assert "302" in capsys.readouterr().err


def test_an_answer_does_not_steer_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with hostile(stream(delta(content="a\x1b]0;title\x07\tb\n\x9b2Jc"))) as server:
        assert ask(server) == 0
    assert capsys.readouterr().out == "a\ufffd]0;title\ufffd\tb\n\ufffd2Jc\n"
