"""The options of requests, one value that public faces make, carried whole to its users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.lora.request import GivenAdapters, LoRARequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of a request besides its prompt and its parameters, unchecked.

    `arrival_time`: wall-clock seconds; None: now. `data_parallel_rank`: of the core that computes
    it; None: any. `prompt_text` belongs to a request that was processed before. `timeout_s`: when
    it ends at the latest, in seconds from now; None: as its `extra_args` say, else never.
    """

    arrival_time: float | None = None
    priority: int = 0
    lora_request: LoRARequest | None = None
    data_parallel_rank: int | None = None
    trace_headers: Mapping[str, str] | None = None
    tokenization_kwargs: Mapping[str, Any] | None = None
    prompt_text: str | None = None
    timeout_s: float | None = None
    resumable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """The options of a call with many prompts: one value for all, or a list with one for each."""

    priority: int | Sequence[int] | None = None
    lora_request: GivenAdapters = None
    tokenization_kwargs: Mapping[str, Any] | None = None
