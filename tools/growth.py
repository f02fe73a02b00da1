"""Print what a change adds to the package, and what a feature costs there.

    python tools/growth.py [BASE]

Lines and files by folder against BASE (the commit before by default); in how many signatures the
options of a request stand, and in how many files those of the engine and the kinds of output; how
long functions, signatures and files are; how many comments there are; how many names the files on a
request's path import. CONTRIBUTING.md says what to do when they grow.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
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

SHOWN = ("config/views/", "as_vllm/")
"""Folders that show the plan, and stand in for another package, by documented names."""

PATH = (
    "llm.py", "server/openai/chat.py", "engine/frontend/frontend.py",
    "engine/frontend/input_processor.py", "engine/client/inproc.py", "engine/core/core.py",
    "scheduling/scheduler.py", "runner/runner.py", "engine/frontend/output_processor.py",
)  # fmt: skip

BELOW_OPTIONS = {
    "clusters", "distributed", "errors", "hardware", "kernels", "lora", "media", "models",
    "observability", "ops", "outputs", "params", "pooling_outputs", "processes", "prompts",
    "quantization", "request_options", "step", "text", "tiers", "trainers",
}  # fmt: skip
"""Rooms whose code cannot see the configuration of an engine."""

OTHER_WORDS = {"convert", "logits_processors", "runner"}
"""Options that are called as a function of msgspec, what a sampler runs, a part of a worker."""

WHOLE = {"config", "plan", "vllm_config"}
CARRIERS = WHOLE | {
    "args", "engine_args",
    "media", "memory", "model", "parallel", "sampling", "serving", "steps",
}  # fmt: skip
"""What objects are called that carry options: all of them, the plan, and its parts."""

OPTION_CLASSES = ("Options", "Args", "Plan", "Facts", "SchedulerConfig")
"""How the names of classes end that declare options, or the values that follow from them."""

WITHOUT_OPTIONS = {"EnginePlan", "DraftPlan", "DraftFacts"}
"""Classes of these with other fields: parts of the plan, values of the network that drafts."""

CARRYING_CLASSES = (*OPTION_CLASSES, "WorkerConfig", "Namespace", "Any")
"""The same of those that carry them: an argument `config` of another class has none of them."""

MOST_OPTION_FILES = 5
"""Declared, in a part of the plan, resolved, used, and one more."""


COMMENT = re.compile(r"(?:^ *|  )# (?!noqa|type:|fmt:)", re.M)
"""What is written to readers, and not to tools."""


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
    """In how many files of the package the engine's options are named."""
    counts = Counter({name: len(files) for name, files in option_files().items()})
    middle = sorted(counts.values())[len(counts) // 2]
    more = [(name, count) for name, count in counts.most_common() if count > MOST_OPTION_FILES]
    yield (
        f"files that name an engine option: median {middle}, {len(counts) - len(more)} of "
        f"{len(counts)} in at most {MOST_OPTION_FILES}; more: "
        + ", ".join(f"{name} {count}" for name, count in more)
    )


def option_files() -> dict[str, list[str]]:
    """The files whose code names each option of the engine.

    A name that means something else to code which cannot know the engine's options, as a request's
    `seed` or an op's `block_size`, counts where an option or a field of the plan is declared, and
    where it is read from or set on what carries options. So does every name in files whose
    signatures are documented.
    """
    declared = (ROOT / PACKAGE / "config/args/engine_options.py").read_text()
    options = re.findall(r"^    (\w+): ", declared, re.M)
    trees = {
        name: tree_of(path)
        for path in sources()
        if not (name := str(path.relative_to(ROOT / PACKAGE))).startswith(SHOWN)
    }
    others = {name for file, tree in trees.items() if is_below(file) for name in stated(tree)}
    others |= OTHER_WORDS
    carried = {file: options_in(file, tree) for file, tree in trees.items() if not is_below(file)}
    named = {
        file: options_in(file, tree) if file in FACES else identifiers(tree)
        for file, tree in trees.items()
    }
    return {
        name: [
            file for file, names in (carried if name in others else named).items() if name in names
        ]
        for name in options
    }


def is_below(file: str) -> bool:
    """Whether a file belongs to code that cannot see the configuration of an engine."""
    return file.split("/")[0].removesuffix(".py") in BELOW_OPTIONS


def stated(tree: ast.Module) -> Iterator[str]:
    """The functions of a file, their parameters, and the fields of its classes."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.FunctionDef(name=name):
                yield name
            case ast.ClassDef():
                yield from fields_of(node)


def fields_of(kind: ast.ClassDef) -> Iterator[str]:
    """The fields that a class declares."""
    for each in kind.body:
        match each:
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


def options_in(file: str, tree: ast.Module) -> set[str]:
    """The names that a file declares as options or fields of the plan, reads or sets there."""
    declares = file.startswith("config/") or file == "scheduling/settings.py"
    arguments = command_line(tree)
    found: set[str] = set()
    for node, others in scoped(tree, frozenset({"config"})):
        match node:
            case ast.Attribute(value=ast.Name(id=base)) if base in others:
                pass
            case ast.Attribute(value=base, attr=name) if last_name(base) in CARRIERS:
                is_part = last_name(base) in WHOLE and name in CARRIERS
                if not is_part and not (last_name(base) == "args" and name in arguments):
                    found.add(name)
            case ast.ClassDef(name=kind) if declares and kind not in WITHOUT_OPTIONS:
                if kind.endswith(OPTION_CLASSES):
                    found.update(fields_of(node))
            case ast.Call(keywords=keywords) if file not in FACES and makes_carrier(node):
                found.update(keyword.arg for keyword in keywords if keyword.arg)
    return found


def scoped(tree: ast.AST, others: frozenset[str]) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """The parts of a syntax, each with the names around it that carry no options, whatever they
    are called: arguments whose annotation names another class, and a `config` that is not an
    argument at all, as one of the network that drafts.
    """
    yield tree, others
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef):
        for each in (*tree.args.posonlyargs, *tree.args.args, *tree.args.kwonlyargs):
            others -= {each.arg}
            if each.annotation is not None:
                classes = re.findall(r"\w+", ast.unparse(each.annotation))
                if not any(name.endswith(CARRYING_CLASSES) for name in classes):
                    others |= {each.arg}
    for child in ast.iter_child_nodes(tree):
        yield from scoped(child, others)


def command_line(tree: ast.Module) -> set[str]:
    """The arguments that a file adds to its command, which are not the engine's."""
    return {
        name.lstrip("-").replace("-", "_")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and last_name(node.func) == "add_argument"
        for name in (each.value for each in node.args if isinstance(each, ast.Constant))
    }


def makes_carrier(call: ast.Call) -> bool:
    """Whether a call makes an object that carries options, or a changed copy of one."""
    name = last_name(call.func)
    if name == "replace":
        return bool(call.args) and last_name(call.args[0]) in CARRIERS
    return name.endswith(("Args", "Plan", "Options")) and name not in WITHOUT_OPTIONS


def last_name(node: ast.expr) -> str:
    """The last name of what an attribute is read from: `plan` for `self._plan`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.lstrip("_")
        case ast.Call(func=func):
            return last_name(func)
    return ""


def output_kinds() -> Iterator[str]:
    """In how many files between worker and caller the kinds of output are named; the types of
    `quire.outputs` that have the same names are others.
    """
    columns = tree_of(ROOT / PACKAGE / "step/columns.py")
    kinds = [
        node.name
        for node in columns.body
        if isinstance(node, ast.ClassDef) and "OutputPart" in map(ast.unparse, node.bases)
    ]
    trees = map(tree_of, sources())
    named = [identifiers(tree) - imported(tree, "quire.outputs") for tree in trees]
    counts = ", ".join(f"{kind} {sum(kind in each for each in named)}" for kind in kinds)
    yield f"files that name a kind of output: {counts}"


def identifiers(tree: ast.Module) -> set[str]:
    """The names in a file's code, those in texts and comments left out."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)):
                found.add(name)
    return found


def imported(tree: ast.Module, module: str) -> set[str]:
    """The names that a file imports from a module."""
    return {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == module
        for alias in node.names
    }


def lengths() -> Iterator[str]:
    """How long functions, their signatures and files are, and the longest. Triton's kernels are
    given each number by itself.
    """
    of_functions = [(function.lines, function.place) for function in functions()]
    yield "lines of a function, " + spread(of_functions)
    on_host = [each for each in functions() if not each.place.startswith("kernels/triton/")]
    yield "parameters of a function, " + spread([(len(f.parameters), f.place) for f in on_host])
    texts = {path: path.read_text() for path in sources()}
    yield "lines of a file, " + spread(
        [(text.count("\n"), str(path.relative_to(ROOT / PACKAGE))) for path, text in texts.items()]
    )
    comments = sum(len(COMMENT.findall(text)) for text in texts.values())
    lines = sum(text.count("\n") for text in texts.values())
    yield f"comments per 100 lines: {100 * comments / lines:.2f} of {lines}"
    names = Counter(path.name for path in texts if path.name != "__init__.py")
    shared = [count for count in names.values() if count > 1]
    yield f"file names in several folders: {len(shared)}, of {sum(shared)} files"


def spread(counts: list[tuple[int, str]]) -> str:
    """The middle of some counts, what one in ten and in a hundred exceeds, and the largest."""
    every = sorted(counts)
    at = [every[int(share * (len(every) - 1))][0] for share in (0.5, 0.9, 0.99, 1.0)]
    return "p50/p90/p99/most: {}/{}/{}/{}; {}".format(*at, every[-1][1])


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
        for node in ast.walk(tree_of(path))
        if isinstance(node, imports) and getattr(node, "module", "") != "__future__"
    )


def functions() -> Iterator[Function]:
    """Every function of the package."""
    for path in sources():
        name = str(path.relative_to(ROOT / PACKAGE))
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                place = f"{name}:{node.lineno} {node.name}"
                yield Function(place, length, tuple(each.arg for each in every))


def sources() -> list[Path]:
    """The package's Python files."""
    return sorted((ROOT / PACKAGE).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax of a file, which is read once for all that is counted."""
    return ast.parse(path.read_text())


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
