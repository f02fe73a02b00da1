"""Ctrl-C while a model answers: the answer ends with what there is of it, and with its figures."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress

import pytest

from quire.cli import main
from quire.engine.llm_engine import LLMEngine
from tests.server.serve_process import serving

LONG = ("--ignore-eos", "--max-tokens", "3000")
FIGURES = re.compile(r"\((\d+) tokens, the first after [\d.]+ s, then [\d.]+ tokens/s\)")
WAIT_S = 120


def command(*words):
    return [sys.executable, "-m", "quire", *words]


def allow_interrupts():
    # a shell's background processes ignore the signal, and so would this one
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupt_after_the_first_text(*words, stdin=None):
    """What a process prints and how it ends when it gets SIGINT while it prints."""
    with subprocess.Popen(
        command(*words),
        stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=allow_interrupts,
    ) as process:
        if stdin is not None:
            process.stdin.write(stdin)
            process.stdin.flush()
        first = process.stdout.read(8)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=WAIT_S)
    return process.returncode, (first + rest).decode(), err.decode()


@pytest.mark.parametrize("words", [["chat", "-q"], ["complete", "-q"]], ids=" ".join)
@pytest.mark.sharp(when=lambda words: "chat" in words)
def test_the_only_answer_ends_with_a_line_its_figures_and_130(words):
    code, out, err = interrupt_after_the_first_text(*words, "import", "--stats", *LONG)
    assert code == 130
    assert len(out) > 8 and out.endswith("\n")
    match = FIGURES.fullmatch(err.strip())
    assert match, err
    assert 1 < int(match[1]) < 3000


def test_questions_from_a_pipe_end_with_the_answer():
    code, out, _ = interrupt_after_the_first_text("complete", *LONG, stdin=b"import\nimport\n")
    assert code == 130
    assert out.endswith("\n")


def test_an_answer_of_a_server_is_aborted_there():
    with serving() as server:
        words = ("complete", "--url", server.url + "/v1", "-q", "import", "--stats", *LONG)
        code, out, err = interrupt_after_the_first_text(*words)
        assert code == 130 and out.endswith("\n")
        assert re.match(r"\(about \d+ tokens, the first after", err), err
        deadline = time.monotonic() + 30
        while server.get("/load").json()["server_load"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert server.get("/load").json()["server_load"] == 0


@pytest.fixture
def interrupted_step(monkeypatch):
    """The sixth step of the engine gets a SIGINT while it runs."""
    plain, calls = LLMEngine.step, []

    def step(engine):
        calls.append(None)
        if len(calls) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(engine)

    monkeypatch.setattr(LLMEngine, "step", step)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_json_has_what_was_generated(interrupted_step, capsys):
    words = ["import", "--json", "--max-tokens", "200", "--ignore-eos"]
    assert main.main(["generate", *words]) == 130
    (completion,) = json.loads(capsys.readouterr().out)["outputs"]
    assert completion["finish_reason"] == "abort"
    assert 0 < len(completion["token_ids"]) <= 6
    assert completion["text"]


def test_several_completions_are_printed_as_far_as_they_got(interrupted_step, capsys):
    words = ["import", "--n", "2", "--temperature", "1", *LONG]
    assert main.main(["generate", *words]) == 130
    out = capsys.readouterr().out
    assert "--- 1 of 2\n" in out and "--- 2 of 2\n" in out and out.endswith("\n")


def test_the_figures_count_every_token_until_then(interrupted_step, capsys):
    assert main.main(["complete", "-q", "import", "--stats", *LONG]) == 130
    err = capsys.readouterr().err
    assert re.match(r"\([56] tokens, ", err), err


class Terminal:
    def __init__(self, *words):
        self._file, child = pty.openpty()
        self.process = subprocess.Popen(
            command(*words), stdin=child, stdout=child, stderr=child, start_new_session=True,
            preexec_fn=own_terminal, env={**os.environ, "TERM": "dumb"},
        )  # fmt: skip
        os.close(child)
        self._text = ""

    def type(self, text):
        os.write(self._file, text.encode())

    def read_until(self, pattern, wait_s=WAIT_S):
        """The match of a pattern in what is shown after the last one."""
        deadline = time.monotonic() + wait_s
        while not (match := re.search(pattern, self._text)):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._file], [], [], left)
            assert ready, f"{pattern!r} is not in {self._text!r}"
            self._text += os.read(self._file, 4096).decode(errors="replace")
        self._text = self._text[match.end() :]
        return match

    def interrupt_prompt(self, pattern):
        """Press Ctrl-C at a prompt, again where nothing follows.

        CPython's readline shows the prompt first and waits for input or a signal then: a signal
        between the two is seen with the next key only.
        """
        for _ in range(3):
            self.type("\x03")
            with suppress(AssertionError):
                return self.read_until(pattern, WAIT_S / 4)
        raise AssertionError(f"no Ctrl-C was followed by {pattern!r}")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._file)


def own_terminal():
    """Make standard input the controlling terminal, whose Ctrl-C is a signal."""
    import fcntl
    import termios

    allow_interrupts()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(*words):
    made = Terminal(*words)
    try:
        yield made
    finally:
        made.close()


def test_a_talk_goes_on_after_an_interrupted_answer():
    with terminal("chat", "--stats", *LONG) as shown:
        shown.read_until(r"lists the commands\.")
        for _ in range(2):
            shown.read_until("> ")
            shown.type("What is a list?\n")
            shown.read_until(r"list\?\r\n[^>]{10}")  # the echo, then the answer
            shown.type("\x03")
            count = int(shown.read_until(FIGURES.pattern)[1])
            assert 1 < count < 3000
        shown.read_until("> ")
        shown.type("half a line")
        shown.read_until("half a line")  # a Ctrl-C drops what readline has not read
        shown.interrupt_prompt(r"\(Ctrl-D ends the session\.\)")
        shown.read_until("> ")
        shown.type("/history\n")
        shown.read_until(r"\[user\] What is a list\?\r\n\[assistant\] .")
        shown.type("/quit\n")
        assert shown.process.wait(WAIT_S) == 0
