"""`SpeculationPlan`: how an engine drafts tokens, with every value decided."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Method = Literal[
    "ngram", "suffix", "auto", "custom_class", "draft_model", "eagle", "eagle3", "mtp", "medusa"
]

MAX_ROWS = 32
"""Requests that may have all their drafts verified in one step: with more of them computation, not
memory, is what a step waits for, and verification would cost what it saves.
"""


class DraftPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The weights that draft, and how they are read.

    `is_target`: they are in the target's own checkpoint. `quantization` None: as it is stored.
    `max_model_len`: drafts are made for positions below it, None: for all. `is_greedy`: the
    likeliest token is drafted; else the one that the target's noise draws.
    """

    model: str
    folder: str
    weights_format: str
    hf_config: dict[str, Any]
    is_target: bool
    quantization: str | None
    max_model_len: int | None
    is_greedy: bool
    use_graphs: bool


class NgramRules(msgspec.Struct, frozen=True):
    """The last n tokens are looked up among those before them, `shortest` <= n <= `longest`."""

    shortest: int = 5
    longest: int = 5


class SuffixRules(msgspec.Struct, frozen=True):
    """Tries of `depth` tokens, over the request and over `max_cached_requests` outputs (0: over
    the request alone). A match of m tokens drafts up to m * factor + offset, each at least
    `min_probability` likely together with those before it.
    """

    depth: int = 24
    max_cached_requests: int = 10_000
    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1


class SpeculationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts of an engine: who makes them, and at most how many.

    `num_tokens`: the most drafts of a request in a step, `max_drafts` those of all. `by_batch`:
    (first, last, k), the most drafts of each request in a step of first .. last requests; () where
    measured costs alone decide. `is_adaptive`: fewer drafts are made where they do not pay.
    `draft`: the weights that draft, None where the tokens are all that is needed. `custom_class`:
    "module.Class" of that method.
    """

    method: Method
    num_tokens: int
    max_drafts: int
    by_batch: tuple[tuple[int, int, int], ...] = ()
    is_adaptive: bool = True
    ngram: NgramRules = NgramRules()
    suffix: SuffixRules = SuffixRules()
    draft: DraftPlan | None = None
    custom_class: str | None = None
