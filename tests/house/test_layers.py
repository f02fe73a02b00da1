"""Imports go downward only; what must be light is light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "quire"

LEVELS = {
    "errors": 0, "release": 0, "params": 0, "prompts": 0, "outputs": 0, "embedded": 0,
    "environment": 0, "hardware": 0,
    "scheduling": 1, "text": 1, "ops": 1, "observability": 1,
    "kernels": 2, "models": 2, "quantization": 2, "distributed": 2,
    "config": 3, "runner": 3,
    "executor": 4, "engine": 4, "grammar": 4, "beam_search": 4,
    "llm": 5, "server": 5,
    "__init__": 5,
    "cli": 6, "bench": 6, "testing": 6, "__main__": 6,
}  # fmt: skip

LATE = {("ops/select.py", "kernels")}
"""Imports that are found by name at run time, and said so where they are."""


def modules():
    return sorted(SOURCE.rglob("*.py"))


def imports(path):
    """Every quire module that a file imports, type-only and local imports included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "quire":
                names = [f"quire.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "quire")


def part(name):
    """The folder or file below `quire`; `__init__` for its public face."""
    first = name.removeprefix("quire").lstrip(".").split(".")[0]
    is_face = not first or first.startswith("__version") or not first.islower()
    return "__init__" if is_face else first


def part_of_file(path):
    return path.relative_to(SOURCE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_down(path):
    mine = part_of_file(path)
    for name in imports(path):
        other = part(name)
        if mine in (other, "__init__"):
            continue
        assert other in LEVELS, f"{name}: give {other} a level"
        assert LEVELS[other] <= LEVELS[mine], f"{path.name} ({mine}) imports {name} from above"


def test_folders_have_no_cycles():
    edges = {}
    for path in modules():
        mine = part_of_file(path)
        for name in imports(path):
            if mine != "__init__" and part(name) not in (mine, "__init__"):
                edges.setdefault(mine, set()).add(part(name))

    def visit(node, trail):
        assert node not in trail, f"cycle: {' -> '.join([*trail, node])}"
        for other in sorted(edges.get(node, ())):
            visit(other, [*trail, node])

    for node in sorted(edges):
        visit(node, [])


def test_the_runner_sees_only_the_messages_of_scheduling():
    for path in (SOURCE / "runner").rglob("*.py"):
        seen = {name for name in imports(path) if part(name) == "scheduling"}
        assert seen <= {"quire.scheduling.step"}, path
    for path in (SOURCE / "scheduling").rglob("*.py"):
        assert not any(part(name) == "runner" for name in imports(path)), path


LIGHT = [
    "quire",
    "quire.errors",
    "quire.params",
    "quire.prompts",
    "quire.outputs",
    "quire.config.args.engine_args",
    "quire.config.resolve.resolve",
    "quire.scheduling.scheduler",
    "quire.scheduling.invariants",
    "quire.testing.simulate",
]


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_need_no_heavy_ones(module):
    poison = "import sys; sys.modules.update(dict.fromkeys(('torch','numpy','transformers')));"
    done = run_python(f"{poison} import {module}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "quire.text.tokenizer",
        "quire.text.detokenizer",
        "quire.models",
        "quire.models.families",
        "quire.engine.wire.messages",
        "quire.engine.client.client",
        "quire.engine.wire.control_calls",
        "quire.engine.frontend.frontend",
        "quire.cli.main",
        "quire.llm",
    ],
)
def test_modules_without_torch(module):
    poison = "import sys; sys.modules.update(dict.fromkeys(('torch','transformers')));"
    done = run_python(f"{poison} import {module}")
    assert done.returncode == 0, done.stderr


def test_import_is_quick():
    code = (
        "import time; start = time.process_time(); import quire;"
        "took = time.process_time() - start; print(took)"
    )
    took = min(float(run_python(code).stdout) for _ in range(3))
    assert took < 0.05
