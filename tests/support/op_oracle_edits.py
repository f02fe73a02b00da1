"""The oracle of edits of logits: one token at a time."""

from __future__ import annotations

import math

from quire.ops.sampling.edits import WILD


def bias_logits(logits, places, entries, values) -> None:
    """One entry after the other."""
    for (place, token), value in zip(entries.tolist(), values.tolist(), strict=True):
        if token in range(logits.shape[1]):
            row = logits[places[place, 0]]
            row[token] = value if value == -math.inf else float(row[token]) + value


def penalize(logits, history, places, penalties) -> None:
    """Ask for each token whether it occurs, and how often."""
    for place, (repetition, frequency, presence) in zip(
        places.tolist(), penalties.tolist(), strict=True
    ):
        index, row, border, position = place
        ids = history[row].tolist()[:position]
        for token in range(logits.shape[1]):
            value = float(logits[index, token])
            if token in ids:
                value = value / repetition if value > 0 else value * repetition
            if token in ids[border:]:
                value -= frequency * ids[border:].count(token)
                value -= presence
            logits[index, token] = value


def forbid_words(logits, history, places, words) -> None:
    for place, *before, last in words.tolist():
        index, row, border, position = places[place].tolist()
        wanted = [token for token in before if token != WILD]
        output = history[row].tolist()[border:position]
        is_ending = len(output) >= len(wanted) and output[len(output) - len(wanted) :] == wanted
        if is_ending and last in range(logits.shape[1]):
            logits[index, last] = -math.inf
