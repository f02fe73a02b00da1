"""The result of a step that the scheduler reads: ids, drafts that are ready, and failed rows."""

from __future__ import annotations

import msgspec


class StepResult(msgspec.Struct, gc=False):
    """Sampled tokens of a step: `counts[i]` ids, at least one, for the i-th sampled row of the
    plan (None: one each), and `num_drafts[i]` drafts that are ready for its next step (None: none).

    A row that verified d drafts has 1 .. d+1 ids: the accepted drafts and the token after them. A
    row in `errors` has failed, the others are valid; its ids, if any, are meaningless. `nans` by
    row: how many of its logits are NaN, of failed rows that have some. `failed_encodings`: digests
    of items of the plan that no rows could be made of.
    """

    step_id: int
    token_ids: list[int]
    errors: dict[int, str] = {}
    counts: list[int] | None = None
    num_drafts: list[int] | None = None
    nans: dict[int, int] = {}
    failed_encodings: list[bytes] = []


class NewTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens of the sampled `rows` of a step, or of a part of it, from the worker that samples, for
    those that do not. They take it with a later step, the next one that computes one of these rows
    at the latest, and in the order of the steps.

    Row i of them got the next `counts[i]` of `token_ids`, and has the next `num_drafts[i]` of
    `draft_ids` ready. By the time that it is taken it may be another request's.
    """

    step_id: int
    rows: list[int]
    token_ids: list[int]
    counts: list[int]
    draft_ids: list[int]
    num_drafts: list[int]
