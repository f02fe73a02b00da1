"""The result of a step that the scheduler reads: ids, drafts that are ready, and failed rows."""

from __future__ import annotations

import msgspec


class StepResult(msgspec.Struct, gc=False):
    """What the runner sampled: `counts[i]` ids, at least one, for the i-th sampled row of the
    plan (None: one each), and `num_drafts[i]` drafts that are ready for its next step (None: none).

    A row that verified d drafts has 1 .. d+1 ids: the accepted drafts and the token after them. A
    row in `errors` has failed, the others are valid; its ids, if any, are meaningless. `nans` by
    row: how many of its logits are NaN, of failed rows that have some.
    """

    step_id: int
    token_ids: list[int]
    errors: dict[int, str] = {}
    counts: list[int] | None = None
    num_drafts: list[int] | None = None
    nans: dict[int, int] = {}
