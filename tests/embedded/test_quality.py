"""What the shipped model knows: loss on library files that were kept out of training."""

from __future__ import annotations

import sysconfig
from pathlib import Path

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


def losses_of(text: str, num_tokens: int) -> tuple[torch.Tensor, int]:
    """Return the loss of each token in nats, and how many bytes these tokens are."""
    folder = embedded.path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([tokenizer.encode(text)[: num_tokens + 1]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")
    return losses, len(tokenizer.decode(ids[0, 1:].tolist()).encode())


def bits_per_byte(text: str, num_tokens: int) -> float:
    losses, num_bytes = losses_of(text, num_tokens)
    return float(losses.sum()) / 0.6931 / num_bytes


def held_out(name: str) -> str:
    return (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")


def test_text_of_our_own_is_predicted():
    assert bits_per_byte(OWN_TEXT, 1000) < 3.0


def test_held_out_library_file_is_predicted():
    assert bits_per_byte(held_out("heapq.py"), 2048) < 3.0


def test_context_of_4096_tokens_helps_rather_than_hurts():
    text = held_out("statistics.py") + held_out("email/message.py")
    losses, _ = losses_of(text, 4096)
    assert len(losses) == 4096
    early, late = losses[:512].mean(), losses[1024:].mean()
    assert late < early + 0.1
