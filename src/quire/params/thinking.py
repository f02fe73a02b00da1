"""A bound on a request's reasoning, as the input processor has completed it."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """At most `budget` tokens of reasoning between the delimiters; `num_before`: how many of them
    the prompt has, if it ends inside reasoning (None: it does not).
    """

    budget: int
    start_ids: list[int]
    end_ids: list[int]
    num_before: int | None = None
