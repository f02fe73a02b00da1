"""The metrics of an engine, by the names that dashboards of this field know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.config.histogram_buckets import FAMILIES

DESCRIPTIONS = {
    "num_requests_running": "Number of requests in the running batch.",
    "num_requests_waiting": "Number of requests waiting to be scheduled.",
    "num_requests_waiting_by_reason": "Number of waiting requests by reason.",
    "kv_cache_usage_perc": "KV cache usage as a fraction of all blocks; 1 is full.",
    "engine_sleep_state": "Sleep state of the engine: 1 for the current state, 0 for the others.",
    "sleep_mode_operations_in_flight": "Number of calls of sleep mode that are under way.",
    "rl_weight_update_operations_in_flight": "Number of calls of weight updates under way.",
    "lora_requests_info": "Running and waiting LoRA adapters; the value is the time of this.",
    "cache_config_info": "Configuration of the KV cache.",
    "prefix_cache_queries": "Prefix cache queries, in tokens.",
    "prefix_cache_hits": "Prefix cache hits, in tokens.",
    "external_prefix_cache_queries": "Lookups of K/V outside of the pool, in tokens.",
    "external_prefix_cache_hits": "K/V loaded from outside of the pool, in tokens.",
    "kv_offload_load_bytes": "Bytes of K/V copied into the pool.",
    "kv_offload_store_bytes": "Bytes of K/V copied out of the pool.",
    "nixl_bytes_transferred": "Bytes of K/V pulled from other engines.",
    "nixl_num_descriptors": "Blocks of K/V pulled from other engines.",
    "nixl_num_failed_transfers": "Requests whose K/V could not be pulled.",
    "nixl_num_kv_expired_reqs": "Requests whose K/V nobody has pulled in time.",
    "mm_cache_queries": "Processed media that were looked for in the cache, in items.",
    "mm_cache_hits": "Processed media that were found in the cache, in items.",
    "num_preemptions": "Cumulative number of preemptions.",
    "spec_decode_num_drafts": "Number of times that a request's drafts were verified.",
    "spec_decode_num_draft_tokens": "Number of draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Number of draft tokens accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Number of draft tokens accepted, by position.",
    "prompt_tokens": "Number of prefill tokens processed.",
    "prompt_tokens_by_source": "Number of prompt tokens by source of their K/V.",
    "prompt_tokens_cached": "Number of prompt tokens served from the prefix cache.",
    "prompt_tokens_cached_by_source": "Number of cached prompt tokens by source.",
    "generation_tokens": "Number of generation tokens processed.",
    "request_success": "Number of finished requests by finish reason.",
    "admission_rejections": "Number of requests rejected by admission control.",
    "request_prompt_tokens": "Histogram of prompt tokens per request.",
    "request_generation_tokens": "Histogram of generation tokens per request.",
    "request_max_num_generation_tokens": "Histogram of tokens of the longest completion.",
    "request_params_max_tokens": "Histogram of the max_tokens request parameter.",
    "request_params_n": "Histogram of the n request parameter.",
    "request_prefill_kv_computed_tokens": "Histogram of computed prompt tokens per request.",
    "request_num_preemptions": "Histogram of preemptions per request.",
    "iteration_tokens_total": "Histogram of tokens per engine step, prefill and decode.",
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of time per output token, in seconds.",
    "e2e_request_latency_seconds": "Histogram of end-to-end request latency in seconds.",
    "request_queue_time_seconds": "Histogram of time spent in the WAITING state, in seconds.",
    "request_prefill_time_seconds": "Histogram of time spent in prefill, in seconds.",
    "request_decode_time_seconds": "Histogram of time spent in decode, in seconds.",
    "request_inference_time_seconds": "Histogram of time spent in the RUNNING state, in seconds.",
    "sleep_mode_operation_duration_seconds": "Histogram of calls of sleep mode, in seconds.",
    "rl_weight_update_operation_duration_seconds": "Histogram of calls of updates, in seconds.",
}
"""Every metric in the order of exposition, with its help text."""

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_GAP = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_LATENCY = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_STEP_TOKENS = (1, *(2**power for power in range(3, 15)))

_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_COMPLETIONS = (1, 2, 5, 10, 20)

HISTOGRAMS: Mapping[str, Sequence[float] | None] = {
    "request_prompt_tokens": None,
    "request_generation_tokens": None,
    "request_max_num_generation_tokens": None,
    "request_params_max_tokens": None,
    "request_params_n": _COMPLETIONS,
    "request_prefill_kv_computed_tokens": None,
    "request_num_preemptions": _PREEMPTIONS,
    "iteration_tokens_total": _STEP_TOKENS,
    "time_to_first_token_seconds": _TTFT,
    "inter_token_latency_seconds": _GAP,
    "request_time_per_output_token_seconds": _GAP,
    "e2e_request_latency_seconds": _LATENCY,
    "request_queue_time_seconds": _LATENCY,
    "request_prefill_time_seconds": _LATENCY,
    "request_decode_time_seconds": _LATENCY,
    "request_inference_time_seconds": _LATENCY,
}
"""The bounds of each histogram's buckets; None: 1, 2, 5, 10, ... up to the longest sequence."""


def histogram_bounds(
    given: Mapping[str, Sequence[float]], sizes: Sequence[float]
) -> dict[str, Sequence[float]]:
    """Bounds of each histogram: `given` for its family, its own, or `sizes`, those of lengths."""
    chosen = {name: given[family] for family in given for name in FAMILIES[family]}
    return {name: chosen.get(name) or own or sizes for name, own in HISTOGRAMS.items()}
