"""Editing logits before temperature: biases, penalties, forbidden words.

Penalties as in Keskar et al. 2019 (repetition) and the OpenAI API (frequency, presence).

The rows that an op edits are named by places [P, 4] int64: index in the logits, row of the history,
length of the prompt, position of the token to be drawn. history [N, L] int32 holds each row's ids,
prompt first; what lies from the position on is never read. An id that is not a token (below 0, or V
and more: what stands for an embedding) is not counted and not edited.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quire.ops.registry import op

WILD = -1
"""Place of a forbidden word that asks for no token."""


@op(mutates=("logits",), is_invariant=True)
def bias_logits(logits: Tensor, places: Tensor, entries: Tensor, values: Tensor) -> None:
    """Add values [n] fp32 to entries of logits [R, V] fp32, in place; -inf forbids an entry,
    whatever stands there.

    entries [n, 2] int32: which of the places, and the id. No two entries are for the same logit,
    unless both forbid it.
    """
    kept = _is_token(entries[:, 1], logits.shape[1])
    which, ids = entries[kept].long().unbind(1)
    rows, added = places[which, 0], values[kept]
    raised = logits[rows, ids] + added
    # infinity minus infinity would be NaN
    logits[rows, ids] = torch.where(added == -math.inf, added, raised)


@op(mutates=("logits",), is_invariant=True)
def penalize(logits: Tensor, history: Tensor, places: Tensor, penalties: Tensor) -> None:
    """Lower the tokens that occurred, in place: logits [R, V] fp32, penalties [P, 3] fp32
    (repetition, frequency, presence).

    l / repetition where l > 0, else l * repetition, for all tokens before the position; then, for
    those after the prompt, l - frequency * count, then l - presence. Each step is rounded. Counts
    are computed from the history in every call: O(tokens so far), less than the passes over [V]
    that kept counts would need, and nothing to rebuild or roll back. A history cut at the largest
    position keeps a GPU from reading further.
    """
    width = logits.shape[1]
    counts = logits.new_empty(width)
    rows = zip(places.tolist(), penalties.tolist(), strict=True)
    for (index, row, border, position), (repetition, frequency, presence) in rows:
        logit_row, ids = logits[index], history[row, :position].long()
        output = ids[border:]
        if repetition != 1.0:
            _divide(logit_row, ids[_is_token(ids, width)], repetition)
        if frequency != 0.0 or presence != 0.0:
            _lower(logit_row, output[_is_token(output, width)], frequency, presence, counts)


def _divide(logits: Tensor, ids: Tensor, penalty: float) -> None:
    seen = logits[ids]
    logits[ids] = torch.where(seen > 0, seen / penalty, seen * penalty)


def _lower(logits: Tensor, ids: Tensor, frequency: float, presence: float, counts: Tensor) -> None:
    """counts [V] fp32 may hold anything and does so afterwards."""
    counts[ids] = 0.0
    counts.index_add_(0, ids, counts.new_ones(len(ids)))
    lowered = logits[ids] - counts[ids] * frequency
    logits[ids] = lowered.sub_(presence)  # repeats write the same value


@op(mutates=("logits",), is_invariant=True)
def forbid_words(logits: Tensor, history: Tensor, places: Tensor, words: Tensor) -> None:
    """Forbid the last token of each word whose other tokens the output ends with: -inf in logits
    [R, V] fp32, in place.

    words [n, 2 + M] int32: which of the places; M tokens, the word's own on the right, WILD before
    them; the last token. The prompt is not part of the output.
    """
    index, row, border, position = places[words[:, 0].long()].unbind(1)
    length = words.shape[1] - 2
    is_ending = _is_token(words[:, -1], logits.shape[1])
    for back in range(1, length + 1):
        asked, at = words[:, -1 - back], position - back
        is_there = (at >= border) & (history[row, at.clamp_min(0)] == asked)
        is_ending &= (asked == WILD) | is_there
    logits[index[is_ending], words[is_ending, -1].long()] = -math.inf


def _is_token(ids: Tensor, width: int) -> Tensor:
    return (ids >= 0) & (ids < width)
