"""Print what a change adds to the package, and what a feature costs there.

    python tools/growth.py [BASE]

Lines and files by folder against BASE (the commit before by default); in how many signatures the
options of a request stand, and in how many files those of the engine and the kinds of output; how
long functions are; how many names the files on a request's path import. CONTRIBUTING.md says what
to do when they grow.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/quire"
REQUEST_OPTIONS = (
    "priority", "lora_request", "cache_salt", "arrival_time", "data_parallel_rank",
    "trace_headers", "tokenization_kwargs", "deadline",
)  # fmt: skip
FACES = {
    "llm.py", "llm_pooling.py", "engine/llm_engine.py", "engine/async_llm.py", "outputs.py",
    "engine/control_verbs.py", "engine/core/documented_core.py", "engine/wire/documented.py",
}  # fmt: skip
"""Files whose signatures are documented, and therefore written out."""

PATH = (
    "llm.py", "server/openai/chat.py", "engine/frontend/frontend.py",
    "engine/frontend/input_processor.py", "engine/client/inproc.py", "engine/core/core.py",
    "scheduling/scheduler.py", "runner/runner.py", "engine/frontend/output_processor.py",
)  # fmt: skip


MOST_OPTION_FILES = 5
"""Declared, resolved, used, and what shows it."""


@dataclass(frozen=True)
class Function:
    """Where a function is, how many lines it has, and its parameters."""

    place: str
    lines: int
    parameters: tuple[str, ...]


def main(arguments: list[str]) -> int:
    """Print the report; the exit status."""
    base = arguments[0] if arguments else "HEAD^"
    print(f"growth since {base}")
    rows = (by_folder(base), signatures(), engine_options(), output_kinds(), lengths())
    for line in [*chain.from_iterable(rows), *path_imports()]:
        print("  " + line)
    return 0


def by_folder(base: str) -> Iterator[str]:
    """Added less deleted lines, and files, of each folder that changed, the largest first."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for text in git("diff", "--numstat", "--no-renames", base, "--", "src", "csrc", "tests"):
        added, deleted, name = text.split("\t")
        if added != "-":
            lines[room_of(name)] += int(added) - int(deleted)
    for text in git("diff", "--name-status", "--no-renames", base, "--", "src", "csrc", "tests"):
        kind, name = text.split("\t")
        files[room_of(name)] += {"A": 1, "D": -1}.get(kind, 0)
    yield "lines and files: " + (
        ", ".join(f"{room} {count:+d} ({files[room]:+d})" for room, count in lines.most_common())
        or "none changed"
    )


def room_of(name: str) -> str:
    """The folder that a file counts for: below the package its first, else the top one."""
    parts = name.split("/")
    if name.startswith(PACKAGE + "/"):
        return parts[2].removesuffix(".py")
    return parts[0]


def signatures() -> Iterator[str]:
    """In how many signatures each option of a request stands, those of the faces left out."""
    found = Counter(
        option
        for function in functions()
        if function.place.split(":")[0] not in FACES
        for option in REQUEST_OPTIONS
        if option in function.parameters
    )
    counts = ", ".join(f"{option} {found[option]}" for option in REQUEST_OPTIONS)
    yield f"signatures below the faces: {counts}"


def engine_options() -> Iterator[str]:
    """In how many files of the package the code names the options of the engine; a name that has
    other meanings, such as `model`, counts for all of them.
    """
    declared = (ROOT / PACKAGE / "config/args/engine_options.py").read_text()
    names = re.findall(r"^    (\w+): ", declared, re.M)
    named = [identifiers(path) for path in sources()]
    counts = Counter({name: sum(name in each for each in named) for name in names})
    middle = sorted(counts.values())[len(counts) // 2]
    few = sum(count <= MOST_OPTION_FILES for count in counts.values())
    most = ", ".join(f"{name} {count}" for name, count in counts.most_common(5))
    yield (
        f"files that name an engine option: median {middle}, {few} of {len(counts)} in at most "
        f"{MOST_OPTION_FILES}; most: {most}"
    )


def output_kinds() -> Iterator[str]:
    """In how many files between worker and caller the kinds of output are named."""
    columns = ast.parse((ROOT / PACKAGE / "step/columns.py").read_text())
    kinds = [
        node.name
        for node in columns.body
        if isinstance(node, ast.ClassDef) and "OutputPart" in map(ast.unparse, node.bases)
    ]
    named = [identifiers(path) for path in sources()]
    counts = ", ".join(f"{kind} {sum(kind in each for each in named)}" for kind in kinds)
    yield f"files that name a kind of output: {counts}"


def identifiers(path: Path) -> set[str]:
    """The names in a file's code, those in texts and comments left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
    return found


def lengths() -> Iterator[str]:
    """How long functions are, and the longest."""
    every = sorted(functions(), key=lambda function: function.lines)
    at = [every[int(share * (len(every) - 1))].lines for share in (0.5, 0.9, 0.99, 1.0)]
    yield "lines of a function, p50/p90/p99/most: {}/{}/{}/{}; {}".format(*at, every[-1].place)


def path_imports() -> Iterator[str]:
    """How many names each file on a request's path imports."""
    counts = {name: num_imported(ROOT / PACKAGE / name) for name in PATH}
    yield "names imported on a request's path: " + ", ".join(
        f"{name} {count}" for name, count in counts.items()
    )


def num_imported(path: Path) -> int:
    """The number of names that a file imports."""
    imports = (ast.Import, ast.ImportFrom)
    return sum(
        len(node.names)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, imports) and getattr(node, "module", "") != "__future__"
    )


def functions() -> Iterator[Function]:
    """Every function of the package."""
    for path in sources():
        name = str(path.relative_to(ROOT / PACKAGE))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                place = f"{name}:{node.lineno} {node.name}"
                yield Function(place, length, tuple(each.arg for each in every))


def sources() -> list[Path]:
    """The package's Python files."""
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
