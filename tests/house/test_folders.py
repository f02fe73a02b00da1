"""How files lie: few in a folder, one class for a name, pointers that lead somewhere."""

import ast
import re
import subprocess
from collections import Counter, defaultdict

import pytest

from tests.house.package import MODULES, ROOT

MOST_MODULES = 20
"""Side by side in a folder; where one file is one entry of a table there may be more."""

TABLES = {"src/quire/models/families"}

TWICE: dict[str, str] = {}
"""Classes that still share a name. The list only shrinks."""

OTHERS_FILES = {
    "generate/multimodal/vision_language_offline.py",
    "llama.cpp",
    "modeling_rope_utils.py",
    "models/qwen2/tokenization_qwen2.py",
    "pooling/embed/vision_embedding_offline.py",
    "tokenization_utils_base.py",
    "version.py",
}
"""What is named in our text and belongs to other projects."""


@pytest.fixture(scope="module")
def tracked():
    """The repository's files, as paths from its root."""
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("this is not a git repository")
    return [name for name in done.stdout.split() if (ROOT / name).exists()]


def test_folders_are_small(tracked):
    modules = Counter(
        name.rpartition("/")[0]
        for name in tracked
        if re.fullmatch(r"(src/quire|tests)/.*\.py", name) and not name.endswith("__init__.py")
    )
    assert not {f for f, count in modules.items() if count > MOST_MODULES and f not in TABLES}


def test_a_class_name_means_one_thing():
    places = defaultdict(set)
    for module in MODULES:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(module.place)
    found = {name: " ".join(sorted(where)) for name, where in places.items() if len(where) > 1}
    assert found == TWICE, "what shares no name by now leaves the list"


def files_named_in(text):
    return re.findall(r"(?<![\w/.*{}<>-])[\w-]+(?:/[\w.-]+)*\.(?:py|md|cpp|hpp)\b", text)


def test_files_named_in_the_text_exist(tracked):
    ends = {name.split("/", index)[-1] for name in tracked for index in range(name.count("/") + 1)}
    texts = {module.place: module.text for module in MODULES}
    texts |= {name: (ROOT / name).read_text() for name in tracked if name.endswith(".md")}
    lost = {
        f"{place}: {named}"
        for place, text in texts.items()
        for named in files_named_in(text)
        if named not in ends | OTHERS_FILES
    }
    assert not lost


def test_links_of_the_pages_lead_somewhere(tracked):
    for page in (ROOT / name for name in tracked if name.endswith(".md")):
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_modules_that_pages_run_exist(tracked):
    for name in tracked:
        if name.endswith((".md", ".py")):
            text = (ROOT / name).read_text()
            for module in re.findall(r"python -m ((?:quire|tests|benchmarks)[\w.]*)", text):
                path = module.rstrip(".").replace(".", "/")
                homes = (f"src/{path}.py", f"src/{path}/__main__.py", f"{path}.py")
                assert any((ROOT / home).exists() for home in homes), f"{name}: {module}"


def test_no_path_of_a_machine_in_the_repository(tracked):
    for name in tracked:
        if name.endswith((".py", ".md", ".toml", ".txt", ".cpp", ".hpp", ".yaml", ".yml")):
            text = (ROOT / name).read_text(errors="ignore")
            if name != "tests/house/test_folders.py":
                assert not re.search(r"/(work|farm|root)/", text), name
