"""House rules about the text of the source: names, documentation, what may be used where."""

import ast
import importlib
import re
from itertools import pairwise

import quire
from tests.house.package import MODULES

BANNED_WORDS = {"utils", "helpers", "misc", "common", "seq", "job", "radix", "indptr", "iteration"}
"""Synonyms of the glossary's words, as parts of identifiers."""

OTHERS_WORDS = "seq_len|seq_pooling_type|iteration_(stats|timestamp)"
"""seq_lens is the word, and what a plug-in for statistics reads has its name from others."""

PATH_FILES = {
    "llm.py",
    "server/openai/chat.py",
    "engine/frontend/frontend.py",
    "engine/frontend/input_processor.py",
    "engine/client/inproc.py",
    "engine/client/multiprocess.py",
    "engine/core/core.py",
    "scheduling/scheduler.py",
    "runner/runner.py",
    "engine/frontend/output_processor.py",
}


def found_in(pattern, modules=MODULES):
    """Where a pattern is in the text: file and line."""
    return [
        f"{module.place}:{module.text.count(chr(10), 0, match.start()) + 1}"
        for module in modules
        for match in re.finditer(pattern, module.text, re.MULTILINE)
    ]


def test_no_drawer_modules():
    drawers = {"utils", "common", "helpers", "misc"}
    assert not [module.place for module in MODULES if module.path.stem in drawers]


def test_public_names_are_sorted_and_documented():
    names = [n for n in quire.__all__ if not n.startswith("__")]
    assert {*names, "__version__", "__version_tuple__"} == set(quire._HOMES)
    assert quire.__all__ == sorted(quire.__all__, key=lambda n: (not n.isupper(), n)), "sort them"
    for name in names:
        if name != "PromptType":  # a union has no docstring
            assert getattr(quire, name).__doc__, f"{name} has no docstring"


def test_modules_and_public_definitions_are_documented():
    missing = []
    for module in MODULES:
        for node in (module.tree, *module.tree.body):
            name = getattr(node, "name", "")
            is_public = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                not name.startswith("_") and name != "main"
            )
            if is_public and not ast.get_docstring(node):
                missing.append(f"{module.place} {name}")
    assert not missing, "no docstring"


def documented_in(module):
    """Docstrings, and the texts below attributes."""
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, ast.get_docstring(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            for before, text in pairwise(node.body):
                if isinstance(before, ast.AnnAssign | ast.Assign) and isinstance(text, ast.Expr):
                    yield text, getattr(text.value, "value", None)


def test_docstrings_begin_with_the_thing_and_not_with_a_question():
    questions = ("What", "Which", "How", "Where", "Who", "Why")
    assert not [
        f"{module.place}:{getattr(node, 'lineno', 1)} {text[:40]}"
        for module in MODULES
        for node, text in documented_in(module)
        if isinstance(text, str) and text.split()[:1] and text.split()[0] in questions
    ]


def names_in(module):
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def test_names_are_the_glossary_s():
    banned = {
        f"{module.place} {name}"
        for module in MODULES
        for name in names_in(module)
        if BANNED_WORDS & set(re.sub(OTHERS_WORDS, "", name.lower()).split("_"))
    }
    assert not banned


def test_nothing_dangerous_is_used():
    assert not found_in(r"^\s*(import|from) (pickle|cloudpickle|dill)\b")
    bytecode = {place.partition(":")[0] for place in found_in(r"^\s*(import|from) marshal\b")}
    assert bytecode == {"generated_methods.py"}, "reads it where Python itself does"
    unpicklers = {m.place for m in MODULES if re.search(r"\"(cloud)?pickle\"", m.text)}
    assert unpicklers <= {"processes/functions.py"}, "behind an environment variable"
    assert not found_in(r"\brecv_pyobj\(")
    restricted = 'file, map_location="cpu", weights_only=True'
    assert not found_in(rf"\btorch\.load\((?!{re.escape(restricted)})")


def test_only_the_command_line_reads_the_environment():
    readers = ("environment.py", "cli/", "as_vllm/")  # the last reads vLLM's
    others = [m for m in MODULES if not m.place.startswith(readers)]
    assert not found_in(r"os\.environ|getenv", others)


def test_homes_are_expanded_in_one_place():
    """`Path.expanduser` raises for users that there are not."""
    found = {place.partition(":")[0] for place in found_in(r"expanduser\(")}
    assert found == {"environment.py"}


OWN_ENCODERS = {
    "encodable.py": "the place",
    "processes/codec.py": "its encoder has a hook, and is called through encodable.py",
    "processes/start_message.py": "likewise",
    "server/admin.py": "likewise",
    "engine/data_parallel/handshake.py": "a digest, which is not sent",
    "grammar/source.py": "likewise",
    "text/json_files.py": "a check",
}


def test_what_leaves_a_process_is_encoded_in_one_place():
    encoders = r"msgspec\.(json|msgpack)\.(encode\(|Encoder\b)"
    found = {place.partition(":")[0] for place in found_in(encoders)}
    assert found == OWN_ENCODERS.keys()


def test_no_swallowed_exceptions_and_no_loose_ends():
    assert not found_in(r"except( Exception)?:\s*\n\s*pass\b")
    assert not found_in(r"TODO(?!\(#\d+\))"), "a TODO names its issue"
    assert not found_in(r"(NOTE|FIXME|HACK)\(")


def test_the_eight_files_say_where_the_reader_is():
    for module in MODULES:
        if module.place in PATH_FILES:
            assert re.search(r"[Ss]tep \d of 8", ast.get_docstring(module.tree)), module.place
    assert {module.place for module in MODULES} >= PATH_FILES


def test_examples_of_public_homes_import():
    for home in set(quire._HOMES.values()):
        importlib.import_module(home)


FACES = {
    "llm", "llm_pooling", "engine.llm_engine", "engine.async_llm", "engine.control_verbs",
    "engine.core.documented_core", "engine.wire.documented",
    "engine.frontend.input_processor",  # process_inputs
    "request_options", "outputs", "pooling_outputs",
}  # fmt: skip
"""Modules with documented signatures, which are written out, and the one that makes the value."""


def test_a_request_s_options_are_carried_whole():
    """See request_options.py: below the faces no signature has one of them."""
    named = {}
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                for argument in arguments:
                    if argument.arg in ("priority", "lora_request"):
                        named.setdefault(module.name.removeprefix("quire."), []).append(node.name)
    assert named.keys() <= FACES, named
    assert set(named["engine.frontend.input_processor"]) == {"process_inputs"}
