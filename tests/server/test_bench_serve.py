"""`quire bench serve` against a real server."""

import json

import pytest

from quire.cli.main import main

SIZE = ["--num-prompts", "6", "--random-input-len", "20", "--random-output-len", "7"]


def bench(server, *words):
    return main(["bench", "serve", "--base-url", server.url, "--disable-tqdm", *SIZE, *words])


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_counts_tokens_as_the_server_does(server, backend, tmp_path, capsys):
    words = ["--backend", backend, "--max-concurrency", "2", "--num-warmups", "1"]
    words += ["--save-detailed", "--output-json", str(tmp_path / "r.json")]
    assert bench(server, *words) == 0
    figures = json.loads((tmp_path / "r.json").read_text())
    assert (figures["completed"], figures["failed"]) == (6, 0)
    assert figures["total_output_tokens"] == 42 and figures["output_lens"] == [7] * 6
    assert figures["max_concurrent_requests"] <= 2
    if backend == "openai":
        assert figures["input_lens"] == [20] * 6
    assert figures["total_input_tokens"] == sum(figures["input_lens"])
    assert all(len(gaps) <= 7 for gaps in figures["itls"])
    assert figures["median_ttft_ms"] > 0 and figures["duration"] > 0
    assert "Serving Benchmark Result" in capsys.readouterr().out


def test_saves_a_file_and_a_picture(server, tmp_path):
    words = ["--request-rate", "50", "--random-range-ratio", "0.5", "--label", "mine"]
    words += ["--save-result", "--result-dir", str(tmp_path), "--plot", str(tmp_path / "p.png")]
    assert bench(server, *words) == 0
    (file,) = tmp_path.glob("mine-50.0qps-*.json")
    assert json.loads(file.read_text())["request_rate"] == 50.0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_failures_are_counted_and_told(server, tmp_path, capsys):
    words = ["--extra-body", '{"temperature": -1}', "--output-json", str(tmp_path / "r.json")]
    assert bench(server, *words) == 1
    figures = json.loads((tmp_path / "r.json").read_text())
    assert (figures["completed"], figures["failed"]) == (0, 6)
    assert "temperature" in capsys.readouterr().out


def test_no_server_is_one_sentence(capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *SIZE]) == 1
    assert "No answer from http://127.0.0.1:9" in capsys.readouterr().err
