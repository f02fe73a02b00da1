"""The shipped checkpoint: its files, as transformers and the tokenizers library see them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from quire import embedded

FOLDER = embedded.path()
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_folder_holds_these_files_and_is_small():
    assert {file.name for file in FOLDER.iterdir()} == FILES
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8_000_000


def test_path_needs_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules)\n"
        "from quire import embedded; embedded.path()\n"
        "bad = {'torch', 'numpy', 'transformers', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    environment = {"PYTHONPATH": str(Path(embedded.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_path_says_what_is_wrong_without_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.resources, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match="wheel"):
        embedded.path()


def test_transformers_loads_every_tensor():
    model, info = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert isinstance(model, LlamaForCausalLM)
    assert model.dtype is torch.bfloat16
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.tie_word_embeddings
    assert model.config.max_position_embeddings >= 2048


def test_weights_are_finite_bfloat16():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_special_ids_agree_in_all_files():
    config = json.loads((FOLDER / "config.json").read_text())
    defaults = GenerationConfig.from_pretrained(FOLDER)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    assert config["vocab_size"] == len(tokenizer) == tokenizer.vocab_size
    for name in ("bos_token_id", "eos_token_id"):
        assert config[name] == getattr(defaults, name) == getattr(tokenizer, name)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x + 12345\n",
        "\tif x:\r\n\t\tpass  \n\n\n",
        "naïve 日本語 🙂 \u200d \x00",
        " " * 100 + "x",
        "",
    ],
    ids=["code", "tabs", "unicode", "spaces", "empty"],
)
def test_tokenizer_gives_the_text_back(text: str):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert ids == Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(text).ids
    assert tokenizer.decode(ids[1:]) == text


def test_tokenizer_cuts_code_where_people_stop_typing():
    """A prompt that ends after a colon or an indentation is a prefix in tokens too."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    text = "def fibonacci(n):\n    if n < 10:\n        return n\n"
    whole = tokenizer.encode(text).ids
    for stop in ("n):", "10:", ":\n        ", "return"):
        prompt = text[: text.rindex(stop) + len(stop)]
        ids = tokenizer.encode(prompt).ids
        assert whole[: len(ids)] == ids, prompt


def test_chat_template_writes_turns_and_refuses_other_roles():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    chat = [
        {"role": "system", "content": "Tools."},
        {"role": "user", "content": " Add. "},
        {"role": "assistant", "content": "def add(a, b):\n    return a + b\n"},
        {"role": "user", "content": "Subtract."},
    ]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|begin|><|system|>Tools.<|user|>Add."
        "<|assistant|>def add(a, b):\n    return a + b\n<|end|><|user|>Subtract.<|assistant|>"
    )
    with pytest.raises(Exception, match="roles system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
