"""`quire run-batch` as a process: killed, interrupted, resumed."""

import json
import resource
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.cli.main import main

SMALL = ("--max-num-seqs", "16", "--kv-cache-memory-bytes", "64M", "--dtype", "float32")
NUM_LINES = 20


def line(number):
    body = {"prompt": f"def f{number}(", "max_tokens": 120, "ignore_eos": True, "temperature": 0}
    fields = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(fields)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    file = tmp_path_factory.mktemp("batch") / "in.jsonl"
    file.write_text("\n".join([*map(line, range(NUM_LINES)), "nonsense"]))
    return file


def batch(source, target, *flags):
    return main(["run-batch", "-i", str(source), "-o", str(target), *SMALL, *flags])


@pytest.fixture(scope="module")
def expected(source):
    """What a run gives that nobody interrupts."""
    target = source.with_name("whole.jsonl")
    assert batch(source, target, "--disable-tqdm") == 1
    texts = texts_of(target)
    assert list(texts) == [*map(str, range(NUM_LINES)), None]
    return texts


def texts_of(target):
    """custom_id -> text (None for an error), in the order of the file."""
    results = [json.loads(text) for text in target.read_text().splitlines()]
    return {
        r["custom_id"]: None if r["error"] else r["response"]["body"]["choices"][0]["text"]
        for r in results
    }


@contextmanager
def started(source, target, *flags):
    command = [sys.executable, "-m", "quire", "run-batch", "-i", str(source), "-o", str(target)]
    with subprocess.Popen(
        [*command, *SMALL, "--max-concurrency", "2", *flags],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            while not target.exists() or target.read_bytes().count(b"\n") < 3:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.005)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.full
def test_a_killed_run_is_gone_on_with(source, expected, tmp_path):
    target = tmp_path / "out.jsonl"
    with started(source, target) as process:
        process.kill()
    kept = [text for text in target.read_bytes().splitlines(keepends=True) if text[-1:] == b"\n"]
    assert 3 <= len(kept) < NUM_LINES
    with target.open("ab") as stream:
        stream.write(b'{"id":"batch_req_9_')  # as a kill in the middle of a write leaves it
    assert batch(source, target) == 1
    assert texts_of(target) == expected
    assert set(kept) <= set(target.read_bytes().splitlines(keepends=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda n: n.name)
@pytest.mark.sharp(when=lambda number: number == signal.SIGTERM)
def test_a_signal_ends_it_well(source, expected, tmp_path, number):
    target = tmp_path / "out.jsonl"
    with started(source, target, "--disable-tqdm") as process:
        process.send_signal(number)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 128 + number
        assert "the same command does the rest" in log and "Traceback" not in log
    assert set(texts_of(target).items()) < set(expected.items())


def test_metrics_are_served_meanwhile(source, tmp_path):
    flags = ("--enable-metrics", "--port", "0", "--metrics-prefix", "quire:")
    with started(source, tmp_path / "out.jsonl", *flags) as process:
        for text in process.stderr:
            if "Metrics at " in text:
                break
        url = text.split()[-1]
        assert "quire:num_requests_running" in httpx.get(url).text
        base = url.removesuffix("/metrics")
        assert httpx.post(f"{base}/v1/completions", json={"prompt": "a"}).status_code == 404


@pytest.mark.full
def test_a_full_disk_is_named_by_the_file(source, tmp_path):
    """A limit of a file's size is as good: the system says so when it is written."""
    target = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "quire", "run-batch", "-i", str(source), "-o", str(target)]
    done = subprocess.run(
        [*command, *SMALL, "--disable-tqdm"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"File too large: '{target}'" in done.stderr and "Traceback" not in done.stderr


def test_a_whole_file_needs_no_engine(source, expected, capsys, monkeypatch):
    monkeypatch.setattr("quire.engine.launcher.launch_async_front_end", None)
    assert batch(source, source.with_name("whole.jsonl")) == 1
    assert "have results already" in capsys.readouterr().err


def test_no_requests_are_done_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("quire.engine.launcher.launch_async_front_end", None)
    (tmp_path / "in").write_text("\n")
    assert batch(tmp_path / "in", tmp_path / "out") == 0
    assert (tmp_path / "out").read_text() == ""


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["-o", "x"], "-i"),
        (["-i", "x"], "-o"),
        (["-i", "https://example.com/in.jsonl", "-o", "x"], "Download it"),
        (["-i", __file__, "-o", __file__], "is the input"),
        (["-i", __file__, "-o", "/no/such/folder/x"], "No such file"),
        (["-i", __file__, "-o", "x", "--max-concurrency", "0"], "above 0"),
        (["-i", __file__, "-o", "x", "--output-tmp-dir", "x"], "does not implement"),
        (["-i", __file__, "-o", "x", "--metrics-prefix", "y"], "metrics_prefix"),
    ],
    ids=lambda value: value[:12] if isinstance(value, str) else None,
)
def test_wrong_usage_is_one_line(flags, part, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = Path(__file__).read_bytes()
    assert main(["run-batch", *flags]) == 2
    assert part in capsys.readouterr().err
    assert Path(__file__).read_bytes() == before and not list(tmp_path.iterdir())


def test_lines_choose_adapters_by_their_model(tmp_path):
    adapters = Path(__file__).parents[1] / "lora" / "adapters"
    models = ["quire-embedded", "shout", "comment", "none"]
    lines = []
    for model in models:
        body = {"model": model, "prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
        fields = {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(fields))
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    modules = [f"{name}={adapters / name}" for name in ("shout", "comment")]
    flags = ("--enable-lora", "--max-loras", "2", "--lora-modules", *modules, "--disable-tqdm")
    assert batch(source, target, *flags) == 1
    results = {r["custom_id"]: r for r in map(json.loads, target.read_text().splitlines())}
    bodies = [results[model]["response"]["body"] for model in models[:3]]
    assert len({body["choices"][0]["text"] for body in bodies}) == 3
    assert [body["model"] for body in bodies] == models[:3]
    assert results["none"]["response"]["status_code"] == 404
