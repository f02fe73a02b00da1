"""What the shipped model writes when it always takes the likeliest token."""

from __future__ import annotations

import ast

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from quire import embedded

FOLDER = embedded.path()


def load() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def continuation(prompt: str, num_tokens: int) -> str:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    out = load().generate(ids, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(out[0, ids.shape[1] :])


@pytest.mark.parametrize("prompt", ["def fibonacci(n):", "class Stack:", "import os\n"])
def test_greedy_text_is_code(prompt: str):
    """All lines but the last one, which may be cut, must be valid Python together."""
    text = prompt + continuation(prompt, 96).split("<|end|>")[0]
    lines = text.splitlines()
    for stop in range(len(lines), len(lines) // 2, -1):
        try:
            tree = ast.parse("\n".join(lines[:stop]))
        except SyntaxError:
            continue
        assert len(tree.body) >= 1
        return
    pytest.fail(f"not Python:\n{text}")
