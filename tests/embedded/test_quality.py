"""What the shipped model knows: loss on library files that were kept out of training."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire import embedded

# Written for this test, so in no training text.
OWN_TEXT = '''
class Account:
    """A named balance that never drops below zero."""

    def __init__(self, name, balance=0):
        self.name = name
        self.balance = balance

    def withdraw(self, amount):
        """Take `amount` out; raise ValueError if there is not enough."""
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance -= amount
        return self.balance

    def __repr__(self):
        return "%s(%r, %r)" % (self.__class__.__name__, self.name, self.balance)
'''


def losses_of(text: str, num_tokens: int, skip: int = 0) -> tuple[torch.Tensor, int]:
    """Return the loss in nats of up to `num_tokens` tokens after `skip`, and their bytes."""
    folder = embedded.path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(text)[skip : skip + num_tokens + 1]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
    return losses, len(tokenizer.decode(ids[0, 1:].tolist()).encode())


def bits_per_byte(text: str, num_tokens: int) -> float:
    losses, num_bytes = losses_of(text, num_tokens)
    return float(losses.sum()) / math.log(2) / num_bytes


def held_out(name: str) -> str:
    return (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")


def test_text_of_our_own_is_predicted():
    assert bits_per_byte(OWN_TEXT, 1000) < 1.5  # an early checkpoint of the run has 1.59


def test_held_out_library_file_is_predicted():
    assert bits_per_byte(held_out("shlex.py"), 2048) < 1.8  # 2.17


@pytest.mark.parametrize(("length", "worse"), [(2048, 0.1), (4096, 0.25)], ids=["2048", "4096"])
def test_long_context_does_not_blow_up(length: int, worse: float):
    """The same 512 tokens cost about the same with all their context as with 512 tokens of it.

    Over the held-out files the difference is 0.03 nats at 2,048 tokens and 0.11 at 4,096; a
    checkpoint from before the long windows of the training loses 0.3 and 0.65 here.
    """
    text = held_out("statistics.py")
    everything, _ = losses_of(text, length)
    little, _ = losses_of(text, 1024, skip=length - 1024)
    assert len(everything) == length
    assert everything[-512:].mean() < little[-512:].mean() + worse
    assert everything[1024:].mean() < everything[:512].mean()
