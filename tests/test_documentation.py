"""The documentation runs as it stands: every Python block, and every `quire` command as far as it
can be parsed.

Blocks of a page are one program, in their order. Models that a page names are folders of these
names here, with random weights.
"""

from __future__ import annotations

import importlib
import json
import re
import shlex

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from quire import errors
from quire.cli.main import COMMANDS
from quire.config.args.command_line import QuireParser
from quire.testing import make_checkpoint
from tests.house.package import ROOT
from tests.runner.drafting.draft_checkpoints import write_eagle3

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "csrc" / "README.md"]
)
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
COMMAND = re.compile(r"(?:\$ )?(?:\w+=\S* )*quire (?=\w)")
ELSEWHERE = ("CHANGELOG.md", "docs/life_of_a_request.md")
"""Pages whose blocks are of the past, or run in test_tiny.py."""


def test_the_order_of_the_documentation_has_every_page():
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text("utf-8")))
    assert linked == {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"}


def test_the_tree_of_errors_is_the_one_that_is_drawn():
    def below(error):
        for child in error.__subclasses__():
            if child.__module__ == errors.__name__:
                yield child.__name__, error.__name__
                yield from below(child)

    drawn, parents = set(), ["EngineError"]
    for branches, name in re.findall(r"^    ([│ ]*[├└]── )(\w+)", errors.__doc__, re.M):
        depth = len(branches) // 4
        drawn.add((name, parents[depth - 1]))
        parents[depth:] = [name]
    assert drawn == set(below(errors.EngineError))


def blocks(page, *languages):
    text = (ROOT / page).read_text(encoding="utf-8")
    found = [match.groups() for match in BLOCK.finditer(text)]
    return [
        re.sub(rf"^{indent}", "", code, flags=re.M)
        for indent, kind, code in found
        if kind in languages
    ]


def qwen(folder, **keys):
    return make_checkpoint(folder, {"num_hidden_layers": 4, **keys}, family="qwen3")


def reranker(folder):
    qwen(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = json.loads(tokenizer.to_str())["model"]["vocab"]
    if not {"yes", "no"} <= set(vocabulary):
        tokenizer.add_tokens(["yes", "no"])
        config = json.loads((folder / "config.json").read_text())
        make_checkpoint(folder, {"vocab_size": tokenizer.get_vocab_size()}, family="qwen3")
        assert config["vocab_size"] <= tokenizer.get_vocab_size()
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder.parents[1] / "reranker.jinja").write_text(
        "{{ messages[0].content }}? {{ messages[1].content }}"
    )


def embedder(folder):
    make_checkpoint(folder, "tiny")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["LlamaModel"]}))


def adapter(folder):
    """Of a tiny model: one product of rank 4."""
    folder.mkdir(parents=True)
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{at}.lora_A.weight": torch.randn(4, 128), f"{at}.lora_B.weight": torch.randn(128, 4)},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))


STAND_INS = {
    "Qwen/Qwen3-0.6B": qwen,
    "Qwen/Qwen3-8B": lambda folder: qwen(folder, num_hidden_layers=36),
    "Qwen/Qwen3-Reranker-0.6B": reranker,
    "meta-llama/Llama-3.1-8B-Instruct": lambda folder: make_checkpoint(folder, "tiny"),
    "path/to/adapter": adapter,
    "path/to/embedder": embedder,
    "path/to/model": lambda folder: make_checkpoint(folder, "tiny"),
    "FOLDER": lambda folder: write_eagle3(
        folder, folder.parent / "meta-llama/Llama-3.1-8B-Instruct", layers=[1, 2, 3]
    ),
}
"""Names in quotes -> what makes a folder of that name; after those that it needs."""


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and p not in ELSEWHERE])
def test_python_blocks_run_as_they_stand(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = blocks(page, "python")
    for name, make in STAND_INS.items():
        if any(f'"{name}"' in block for block in program):
            make(tmp_path / name)
    names = {"__name__": "documentation"}
    opened = []
    try:
        for block in program:
            exec(compile(block, page, "exec"), names)
            opened += [value for value in names.values() if value not in opened]
    finally:
        for value in opened:
            if not isinstance(value, type) and hasattr(value, "shutdown"):
                value.shutdown()
            elif not isinstance(value, type) and hasattr(value, "llm_engine"):
                value.close()


def commands(page):
    """The command lines of a page that run Quire, without comments, prompts and pipes."""
    for block in blocks(page, "", "bash", "sh", "console"):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            if not (command := COMMAND.match(line)):
                continue
            words = shlex.split(line[command.end() :], comments=True)
            ends = [i for i, word in enumerate(words) if word in ("|", "&&", ">", "&", ";")]
            yield words[: min(ends, default=len(words))]


@pytest.mark.parametrize("page", [p for p in PAGES if p != "CHANGELOG.md" and list(commands(p))])
def test_commands_have_flags_that_exist(page):
    for words in commands(page):
        assert words[0] in COMMANDS, words
        name = words.pop(0)
        module = importlib.import_module(f"quire.cli.{name.replace('-', '_')}")
        if name == "bench":
            module = importlib.import_module(f"quire.bench.{words.pop(0)}")
        parser = QuireParser(prog=f"quire {name}")
        module.add_arguments(parser)
        flags = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
        unknown = [flag for flag in flags if flag not in parser._option_string_actions]
        assert not unknown, f"{page}: quire {name} {' '.join(words)}"


def test_the_page_for_those_who_move_names_flags_that_exist():
    parser = QuireParser(prog="quire serve")
    importlib.import_module("quire.cli.serve").add_arguments(parser)
    text = (ROOT / "docs" / "moving.md").read_text(encoding="utf-8")
    rows = [line.split("|")[2:] for line in text.splitlines() if line.startswith("|")]
    named = {flag for row in rows for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", "|".join(row))}
    assert len(named) > 30
    assert named <= parser._option_string_actions.keys()
