"""The `quire` command as a whole: what it imports, how it fails, how it is interrupted."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

import quire
import quire.cli.show
from quire.cli import main as cli
from quire.errors import LoadError, RequestError


def run_quire(*words, stdin="", **environment):
    return subprocess.run(
        [sys.executable, "-m", "quire", *words],
        input=stdin,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from quire.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'huggingface_hub', 'msgspec', 'psutil'}"
        "\nprint(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert out.stdout.splitlines()[-1] == "[]", out.stderr
    for name in cli.COMMANDS:
        assert re.search(rf"^    {name}\s", out.stdout, re.MULTILINE)


@pytest.mark.parametrize("words", [["generate", "--help"], ["bench", "throughput", "--help"]])
def test_help_of_a_command_needs_no_torch(words):
    code = (
        "import sys; from quire.cli.main import main\n"
        f"try: main({words})\nexcept SystemExit as e: assert e.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        timeout=60,
    )


def test_no_command_is_wrong_usage(capsys):
    assert cli.main([]) == 2
    assert "usage: quire" in capsys.readouterr().err


def test_version(capsys):
    from quire import __version__

    for flag in ("--version", "-v"):
        assert cli.main([flag]) == 0
        assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["generat"], "unknown command 'generat'; did you mean generate? "),
        (["collect-env"], "unknown command 'collect-env': quire doctor prints"),
        (["translate"], "unknown command 'translate' (see"),
        (["generate", "x", "y"], "unexpected argument: y "),
        (["generate", "x", "--no-such-flag"], "unknown option --no-such-flag (see"),
        (
            ["serve", "--max-model-length", "9"],
            "quire serve: error: unknown option --max-model-length; did you mean --max-model-len? ",
        ),
        (["serve", "--max_model_lenght=9"], "--max-model-lenght; did you mean --max-model-len? "),
        (["chat", "--temprature", "1", "--sede", "2"], "--temperature?; unknown option --sede; "),
        (["generate", "x", "--max-tokens", "many"], "--max-tokens"),
        (["bench", "throughputs"], "unknown 'throughputs'; did you mean throughput?"),
    ],
    ids=str,
)
def test_wrong_words_are_one_line_and_code_2(words, part, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert part in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "part"),
    [
        (["generate", "x", "--max-num-seqs", "0"], 2, "max_num_seqs=0 is not allowed"),
        (
            ["generate", "x", "--decode-context-parallel-size", "2"],
            2,
            "decode_context_parallel_size=2",
        ),
        (["generate", "x", "--temperature", "-1"], 2, "temperature=-1.0"),
        (["generate", "x", "--logprobs", "1"], 2, "printed with --json only"),
        (["generate", "x", "--file", "y"], 2, "a prompt was given as well"),
        (["generate", "--file", "/does/not/exist"], 2, "No such file"),
        (["generate", "x", "--model", "/does/not/exist"], 1, "/does/not/exist"),
        (["show", "/does/not/exist"], 1, "/does/not/exist"),
        (["generate", "a b c d e f g", "--max-model-len", "3"], 2, "context length is 3 tokens"),
    ],
    ids=str,
)
def test_errors_are_one_line_and_a_code(words, code, part, capsys):
    assert cli.main(words) == code
    out, err = capsys.readouterr()
    assert err.startswith("quire: error: ") and part in err
    assert err.count("\n") == 1 and out == ""


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RequestError("bad\nrequest"), 2, "bad request"),
        (LoadError("bad model"), 1, "bad model"),
        (ZeroDivisionError("by zero"), 1, "ZeroDivisionError: by zero (QUIRE_DEBUG=1 shows where)"),
        (MemoryError(), 1, "MemoryError:  (QUIRE_DEBUG=1 shows where)"),
    ],
    ids=["usage", "run", "ours", "memory"],
)
def test_every_exception_is_told_in_one_line(error, code, text, capsys, monkeypatch):
    def fail(args):
        raise error

    monkeypatch.setattr(quire.cli.show, "run", fail)
    assert cli.main(["show"]) == code
    assert capsys.readouterr().err == f"quire: error: {text}\n"
    monkeypatch.setenv("QUIRE_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main(["show"])


def test_interruption_is_code_130(monkeypatch):
    def fail(args):
        raise KeyboardInterrupt

    monkeypatch.setattr(quire.cli.show, "run", fail)
    assert cli.main(["show"]) == 130


def test_a_variable_that_means_nothing_is_told(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_DEBGU", "1")
    assert cli.main(["show"]) == 0
    assert "QUIRE_DEBGU" in capsys.readouterr().err


def test_a_variable_of_another_form_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("QUIRE_DEBUG", "yes")
    assert cli.main(["show"]) == 2
    assert "QUIRE_DEBUG='yes'" in capsys.readouterr().err


def test_another_process_with_standard_input_gives_the_same_text(capsys):
    given = ["generate", "--max-tokens", "6", "--seed", "3", "--temperature", "1"]
    assert cli.main([*given, "import "]) == 0
    other = run_quire(*given, stdin="import ")
    assert (other.returncode, other.stderr) == (0, "")
    assert other.stdout == capsys.readouterr().out and other.stdout.strip()


@contextmanager
def stream_of_a_long_answer():
    words = ["generate", "import", "--ignore-eos", "--max-tokens", "3000"]
    with subprocess.Popen(
        [sys.executable, "-m", "quire", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # a shell's background processes ignore the signal, and so would this one
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdout.read(1)
        yield process


def test_a_reader_that_goes_away_is_not_an_error():
    with stream_of_a_long_answer() as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 0


def test_ctrl_c_ends_a_stream_without_a_traceback():
    with stream_of_a_long_answer() as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (130, b"")
        assert out.endswith(b"\n")
