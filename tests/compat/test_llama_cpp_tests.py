"""The script that runs llama.cpp's tests of its server: its list, its table, and the words that
`quire serve` is started with; the run itself is not a part of this suite.
"""

from pathlib import Path

import pytest

from quire.cli import serve
from quire.config.args.command_line import QuireParser
from tests.compat.llama_cpp_tests import llama_server, run

TINY = ["--hf-repo", "ggml-org/test-model-stories260K"]


def test_the_list_has_one_reason_a_line():
    assert {kind for kind, _, _ in run.LEFT_OUT} <= {"test", "differs"}
    assert all(what and len(why.split()) >= 2 for _, what, why in run.LEFT_OUT)
    assert len({(kind, what) for kind, what, _ in run.LEFT_OUT}) == len(run.LEFT_OUT)
    for test in ("unit/test_tokenize.py::test_any", "unit/test_rerank.py::test_rerank_usage[a-1]"):
        assert run.reason_for(test, "test") is not None
    assert run.reason_for("unit/test_rerank.py::test_rerank_top_n[2-2]", "test") is None


def test_the_table_counts_each_test_once():
    outcomes = [
        ("passed", "unit/a.py::one", ""), ("failed", "unit/a.py::two", "why"),
        ("failed", "unit/a.py::two", "at its end, too"),
        ("skipped", "unit/a.py::three", "Skipped: NOT SERVED --slots"),
    ]  # fmt: skip
    counts, told = run.table(outcomes)
    assert dict(counts["unit/a.py"]) == {"passed": 1, "failed": 1, "left out": 1}
    assert told == [("unit/a.py::two", None, "why")]


def test_words_of_llama_server_become_those_of_quire():
    words = [
        *("--port", "8080", "--temp", "0.8", "--seed", "42", "--host", "127.0.0.1", "--offline"),
        *TINY, "--batch-size", "32", "--no-slots", "--alias", "tinyllama-2,other", "--ctx-size",
        "512", "--parallel", "2", "--n-predict", "64", "--api-key", "k", "--jinja",
    ]  # fmt: skip
    done = llama_server.translated(words, Path("/models"))
    assert done[:2] == ["serve", "/models/causal"]
    given = dict(zip(done, done[1:], strict=False))
    assert given["--max-model-len"] == "256" and given["--max-num-seqs"] == "2"
    assert given["--override-generation-config"] == '{"temperature": 0.8, "max_new_tokens": 64}'
    parser = QuireParser(prog="quire serve")
    serve.add_arguments(parser)
    args = parser.parse_args(done[1:])
    assert args.served_model_name == ["tinyllama-2", "other", *llama_server.ANY_NAME]
    assert args.port == 8080


@pytest.mark.parametrize("more", [["--slots"], ["--lora", "a.gguf"], ["--pooling", "none"]])
def test_what_has_no_counterpart_is_said(more, capsys):
    with pytest.raises(SystemExit) as caught:
        llama_server.translated([*TINY, *more], Path("/models"))
    assert caught.value.code == 3 and "NOT SERVED" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        llama_server.translated(["--hf-repo", "ggml-org/other"], Path("/models"))
