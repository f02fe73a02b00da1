"""Bounds on what one request may cost before the engine sees it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may bring; `completions` counts prompts times n, `token_ids` the ids of one
    list, of which more than the vocabulary has make no sense.
    """

    max_model_len: int
    body_bytes: int = 32 * 2**20
    body_timeout_s: float = 60.0
    completions: int = 128
    stop_strings: int = 16
    token_ids: int = 2**18
    reader_timeout_s: float = 120.0
