"""tools/growth.py on this package: what it counts can be counted here as well."""

from __future__ import annotations

import growth
import pytest


def test_rooms_are_folders_of_the_package():
    assert growth.room_of("src/quire/engine/core/core.py") == "engine"
    assert growth.room_of("src/quire/llm.py") == "llm"
    assert growth.room_of("tests/engine/test_x.py") == "tests"


def test_functions_and_their_parameters_are_found(tmp_path, monkeypatch):
    package = tmp_path / growth.PACKAGE
    package.mkdir(parents=True)
    (package / "one.py").write_text(
        "def short(a): pass\n\nasync def long(a, /, priority, *, lora_request=None):\n"
        "    x = 1\n    return x\n"
    )
    (package / "llm.py").write_text("from os import path, sep\ndef generate(priority): pass\n")
    monkeypatch.setattr(growth, "ROOT", tmp_path)
    found = {function.place: function for function in growth.functions()}
    assert found["one.py:3 long"].parameters == ("a", "priority", "lora_request")
    assert found["one.py:3 long"].lines == 3
    [line] = growth.signatures()
    assert "priority 1" in line and "lora_request 1" in line and "cache_salt 0" in line
    assert growth.num_imported(package / "llm.py") == 2
    lines, parameters, files, comments, names = growth.lengths()
    assert lines.endswith("1/1/1/3; one.py:3 long")
    assert parameters.endswith("1/1/1/3; one.py:3 long")
    assert files.endswith("2/2/2/5; one.py")
    assert comments.endswith("0.00 of 7") and names.endswith("0, of 0 files")


@pytest.mark.full
def test_the_report_is_of_this_checkout(capsys):
    assert growth.main(["HEAD"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and "files that name an engine option: median" in lines[3]


def test_names_in_texts_and_comments_do_not_count(tmp_path, monkeypatch):
    package = tmp_path / growth.PACKAGE
    for folder in ("config/args", "step"):
        (package / folder).mkdir(parents=True)
    options = "class EngineOptions:\n    seed: int = 0\n    block_size: int = 16\n"
    (package / "config/args/engine_options.py").write_text(options)
    kinds = "class Pooled(OutputPart):\n    pass\nclass Other(Struct):\n    pass\n"
    (package / "step/columns.py").write_text(kinds)
    user = '"""Gives every seed a block_size."""\ndef f(a):\n    return g(a.seed, kind=Pooled)\n'
    (package / "user.py").write_text(user)
    monkeypatch.setattr(growth, "ROOT", tmp_path)
    declared = "config/args/engine_options.py"
    assert growth.option_files() == {"seed": [declared, "user.py"], "block_size": [declared]}
    [line] = growth.engine_options()
    assert line.endswith("median 2, 2 of 2 in at most 5; more: ")
    assert list(growth.output_kinds()) == ["files that name a kind of output: Pooled 1"]


def test_names_that_mean_something_else_count_where_options_are_carried(tmp_path, monkeypatch):
    files = {
        "config/args/engine_options.py": "class EngineOptions:\n    block_size: int = 16\n",
        "config/plan_parts.py": "class MemoryPlan:\n    block_size: int\n    dtype: str\n",
        "ops/attention.py": "def attend(q, block_size): return q[:block_size]\n",
        "runner/rows.py": "def rows(block_size): return attend(block_size=block_size)\n",
        "engine/builder.py": "def build(plan): return rows(plan.memory.block_size)\n",
        "cli/show.py": "def show(args): return replace(args, block_size=4)\n",
        "bench/run.py": "def run(): return EngineArgs(block_size=4)\n",
    }
    for name, text in files.items():
        (tmp_path / growth.PACKAGE / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / growth.PACKAGE / name).write_text(text)
    monkeypatch.setattr(growth, "ROOT", tmp_path)
    assert set(growth.option_files()["block_size"]) == files.keys() - {
        "ops/attention.py", "runner/rows.py",
    }  # fmt: skip
