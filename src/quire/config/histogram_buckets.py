"""The bounds of the buckets of histograms on /metrics: `custom_histogram_buckets`, checked."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from quire.errors import InvalidParameter, NotBuiltYet

FAMILIES = {
    "request_latency": (
        *("e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        "request_inference_time_seconds",
    ),
    "time_to_first_token": ("time_to_first_token_seconds",),
    "inter_token_latency": (
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
    ),
    "iteration_tokens": ("iteration_tokens_total",),
    "request_params_n": ("request_params_n",),
    "request_num_preemptions": ("request_num_preemptions",),
    "request_tokens": (
        *("request_prompt_tokens", "request_generation_tokens"),
        *("request_max_num_generation_tokens", "request_params_max_tokens"),
        "request_prefill_kv_computed_tokens",
    ),
}
"""Family -> the histograms whose buckets it names."""
_UNBUILT = {"kv_cache_residency": "Leave it out: how long blocks stay is not measured."}
_OPTION = "custom_histogram_buckets"


def histogram_buckets(given: dict[str, Any] | None) -> dict[str, list[float]] | None:
    """Check the option. Raises InvalidParameter or NotBuiltYet."""
    for family, bounds in (given or {}).items():
        name = f"{_OPTION}[{family!r}]"
        if family in _UNBUILT:
            raise NotBuiltYet(name, bounds, _UNBUILT[family])
        if family not in FAMILIES:
            allowed = f"unknown bucket family {family!r}; the families are {', '.join(FAMILIES)}"
            raise InvalidParameter(_OPTION, given, allowed)
        if not (isinstance(bounds, list | tuple) and bounds and all(map(_is_bound, bounds))):
            raise InvalidParameter(name, bounds, "it must be a list of finite numbers above 0")
        if any(low >= high for low, high in pairwise(bounds)):
            raise InvalidParameter(name, bounds, "each bound must be above the one before it")
    return None if given is None else {family: list(bounds) for family, bounds in given.items()}


def sizes_up_to(most: int) -> list[float]:
    """Bounds 1, 2, 5, 10, 20, 50, … up to `most`."""
    bounds: list[float] = []
    power = 1
    while power <= most:
        bounds += [digit * power for digit in (1, 2, 5) if digit * power <= most]
        power *= 10
    return bounds


def _is_bound(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0  # type: ignore[arg-type, operator]
