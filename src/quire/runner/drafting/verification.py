"""Verifies drafts, guesses of a row's next tokens, by drawing the tokens themselves.

A draw is a function of the logits, the seed and the position, so a draft is right exactly when it
equals the token that would be drawn without it: verification compares the two. The tokens are
therefore the same as without drafts, as long as the logits of a position do not depend on how many
positions a step has.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.runner.devices.device import Array


def num_accepted(
    sampled: Array, guesses: Array, drafts: Array, unknown: Sequence[int] = ()
) -> Array:
    """Return how many of each row's sampled tokens count [R]: those of its right drafts, and the
    next one.

    sampled [M]: ids of d+1 positions of each row; guesses [M]: the drafts at these positions (a
    row's last entry is meaningless); drafts [R]: each row's d; unknown: places that do not count.
    """
    ends = np.cumsum(drafts + 1)
    is_wrong = sampled != guesses
    is_wrong[ends - 1] = True  # nothing follows the last position
    if unknown:
        is_wrong[np.array(unknown) - 1] = True  # the draft there leads to such a place
    wrong = np.flatnonzero(is_wrong)
    starts = ends - drafts - 1
    return wrong[np.searchsorted(wrong, starts)] - starts + 1


def kept_places(accepted: Array, drafts: Array) -> Array:
    """The places among M sampled positions whose tokens count, in order; see `num_accepted`."""
    starts = np.cumsum(drafts + 1) - drafts - 1
    place = np.arange(int((drafts + 1).sum())) - np.repeat(starts, drafts + 1)
    return np.flatnonzero(place < np.repeat(accepted, drafts + 1))
