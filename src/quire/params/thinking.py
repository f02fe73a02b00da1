"""A bound on a request's reasoning, as the input processor has completed it."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """At most `budget` tokens of reasoning between the marks; `num_before`: the prompt ends inside
    one, so many tokens of which it has (None: it does not).
    """

    budget: int
    start_ids: list[int]
    end_ids: list[int]
    num_before: int | None = None
