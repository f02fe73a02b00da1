"""How good an exported model is: loss on the held-out files, and a look at its text."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from embedded_model.checkpoint import load_model
from embedded_model.corpus import held_out_texts
from embedded_model.model import Model, token_losses
from embedded_model.tokenizer import END, plain_ids


def held_out_windows(tokenizer: Tokenizer, length: int) -> Tensor:
    """Cut the held-out files into windows [N, length + 1]; what is left of a file is dropped."""
    windows = []
    for text in held_out_texts():
        ids = torch.tensor(plain_ids(tokenizer, text))
        windows += [ids[i : i + length + 1] for i in range(0, len(ids) - length, length)]
    return torch.stack(windows)


@torch.no_grad()
def report(folder: Path) -> dict[str, float]:
    """Measure the held-out files: loss per token, bits per byte, loss by position in windows."""
    model, tokenizer = load_model(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = held_out_texts()
    num_bytes = sum(len(text.encode()) for text in texts)
    losses, long = [], []
    for text in texts:
        ids = torch.tensor(plain_ids(tokenizer, text))
        for start in range(0, len(ids) - 1, 2048):
            window = ids[None, start : start + 2049]
            losses.append(token_losses(model, window[:, :-1], window[:, 1:]))
            if len(losses[-1]) == 2048:
                long.append(losses[-1])
    every, quarters = torch.cat(losses), torch.stack(long).unflatten(1, (4, 512)).mean((0, 2))
    return {
        "tokens": len(every),
        "bytes": num_bytes,
        "loss_per_token": float(every.mean()),
        "bits_per_byte": float(every.sum()) / math.log(2) / num_bytes,
    } | {f"loss_{512 * i}_to_{512 * i + 511}": float(loss) for i, loss in enumerate(quarters)}


def greedy(model: Model, tokenizer: Tokenizer, prompt: str, num_tokens: int) -> str:
    """Continue `prompt` greedily until END; recomputes all for each token: enough for a look."""
    ids, end = tokenizer.encode(prompt).ids, tokenizer.token_to_id(END)
    start = len(ids)
    while len(ids) < start + num_tokens and ids[-1] != end:
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return tokenizer.decode(ids[start:])
