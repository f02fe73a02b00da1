"""The oracle of the ops on logits: sorted lists and one token at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.ops.sampling.sample import TopLogits
from tests.support.op_oracle_rows import to_array, to_tensor

_WORD = 2**32 - 1


def greedy(logits) -> tuple[Tensor, Tensor]:
    """The first largest of each row."""
    rows = to_array(logits)
    ids = [int(row.argmax()) if math.isfinite(row.max()) else 0 for row in rows]
    return torch.tensor(ids, dtype=torch.int64), _reals([row.max() for row in rows])


def _ranked(row: np.ndarray) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def _kept(row: np.ndarray, top_k: float, top_p: float, min_p: float) -> list[int]:
    """Ids that stay, largest first."""
    ids = _ranked(row)
    if min_p > 0:
        ids = [i for i in ids if row[i] >= row[ids[0]] + math.log(min_p)]
    if 0 < top_k < len(ids):
        ids = [i for i in ids if row[i] >= row[ids[int(top_k) - 1]]]
    if top_p == 1:
        return ids
    weights = [math.exp(row[i] - row[ids[0]]) for i in ids]
    before = [sum(weights[:n]) for n in range(len(weights))]
    return [i for n, i in enumerate(ids) if n == 0 or before[n] < top_p * sum(weights)]


def _waiting_time(word: int, a: int, b: int) -> float:
    y = (word ^ a) * 0x7FEB352D & _WORD
    bits = ((y ^ y >> 15) * b & _WORD) & 0x7FFFFFFF
    v = (np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-31)
    return -math.log1p(-min(float(v), 1 - 2.0**-24))


def draw(logits, settings, keys, hashes) -> tuple[Tensor, Tensor]:
    """Race of those that stay, one after the other."""
    words = [int(word) & _WORD for word in hashes]
    ids, peaks = [], []
    for row, (temperature, *filters), key in zip(
        to_array(logits), settings.tolist(), keys.tolist(), strict=True
    ):
        row = row / (temperature or 1.0)
        a, b = (word & _WORD for word in key)
        peaks.append(row.max())
        kept = sorted(_kept(row, *filters)) if temperature else [int(row.argmax())]
        scores = [math.exp(row[i] - row.max()) / _waiting_time(words[i], a, b) for i in kept]
        ids.append(kept[int(np.argmax(scores))])
    return torch.tensor(ids, dtype=torch.int64), _reals(peaks)


def truncate(logits, settings) -> Tensor:
    """All but those that stay at -inf."""
    out = np.full(tuple(logits.shape), -math.inf)
    for i, (temperature, *filters) in enumerate(settings.tolist()):
        row = to_array(logits[i]) / (temperature or 1.0)
        kept = _kept(row, *filters) if temperature else list(range(len(row)))
        out[i, kept] = row[kept]
    return to_tensor(out)


def rank(logits, token_ids, num_top) -> TopLogits:
    """From the sorted row."""
    rows = list(to_array(logits))
    tops = np.array([_ranked(row)[:num_top] for row in rows], np.int32).reshape(len(rows), num_top)
    values = [row[top] for row, top in zip(rows, tops, strict=True)]
    own = [row[i] for row, i in zip(rows, token_ids.tolist(), strict=True)]
    ranks = [int((row >= value).sum()) for row, value in zip(rows, own, strict=True)]
    return TopLogits(
        torch.from_numpy(tops),
        to_tensor(np.array(values).reshape(len(rows), num_top)),
        torch.tensor(ranks, dtype=torch.int32),
        _reals([row.max() for row in rows]),
        _reals([math.log(np.exp(row - row.max()).sum()) for row in rows]),
    )


def _reals(values: list[float]) -> Tensor:
    return to_tensor(np.array(values, dtype=np.float64))
