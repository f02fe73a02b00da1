"""Documented options that only other engines need: readable, and accepted at their default.

A program that copies an engine's arguments, or that gives a default in so many words, works here.
What to do instead of another value is in foreign_flags.py. Options that only tune how fast another
engine is (`TUNING`) may have any value, which changes nothing.
"""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import TYPE_CHECKING, Any

from quire.config.args.foreign_flags import FOREIGN_FLAGS
from quire.config.args.option import unbuilt

DEFAULTS: dict[str, object] = {
    "model_weights": "",
    "safetensors_prefetch_num_threads": 8,
    "safetensors_prefetch_block_size": 2**24,
    "distributed_timeout_seconds": None,
    "cpu_distributed_timeout_seconds": None,
    "device_ids": None,
    "dcp_comm_backend": None,
    "dcp_q_replicate": None,
    "cp_kv_cache_interleave_size": None,
    "dcp_kv_cache_interleave_size": 1,
    "enable_hc_sp": False,
    "enable_batch_sharded_sampling": None,
    "enable_ep_weight_filter": False,
    "moe_backend": "auto",
    "linear_backend": "auto",
    "sparse_indexer_topk_backend": "auto",
    "gdn_prefill_backend": None,
    "kda_prefill_backend": None,
    "kda_decode_backend": None,
    "ir_op_priority": None,
    "enable_flashinfer_autotune": None,
    "enable_flash_late_interaction": True,
    "all2all_backend": "allgather_reducescatter",
    "enable_elastic_ep": False,
    "elastic_ep_max_dp_size": None,
    "enable_dbo": False,
    "ubatch_size": 0,
    "dbo_decode_token_threshold": 32,
    "dbo_prefill_token_threshold": 512,
    "dp_sync_interval": 16,
    "disable_nccl_for_dp_synchronization": None,
    "eplb_config": None,
    "expert_placement_strategy": "linear",
    "prefix_cache_retention_interval": 0,
    "prefix_match_unit": None,
    "offload_backend": "auto",
    "cpu_offload_params": None,
    "max_num_scheduled_tokens": None,
    "long_prefill_token_threshold_adaptive": False,
    "max_num_active_seqs": None,
    "use_fp64_gumbel": False,
    "model_class_overrides": {},
    "allow_deprecated_quantization": False,
    "enable_shm_tensor_arena": False,
    "mm_processor_cache_type": "lru",
    "mm_hasher_algorithm": "blake3",
    "mm_shm_cache_max_object_size_mb": 128,
    "mm_encoder_only": False,
    "mm_encoder_attn_backend": None,
    "mm_encoder_attn_dtype": None,
    "mm_encoder_fp8_scale_path": None,
    "mm_encoder_fp8_scale_save_path": None,
    "mm_encoder_fp8_scale_save_margin": 1.5,
    "video_pruning_rate": None,
    "video_pruning_method": "evs",
    "mm_tensor_ipc": "direct_rpc",
    "mm_processor_device": "auto",
    "mm_ipc_gpu_memory_gb": 0,
    "mm_device_do_normalize": True,
    "ray_workers_use_nsight": False,
    "ignore_patterns": ["original/**/*"],
    "scheduler_reserve_full_isl": True,
    "prefill_schedule_interval": 1,
    "watermark": 0.0,
    "aux_output_config": None,
    "reasoning_parser_plugin": None,
    "watermark_config": None,
    "diffusion_config": None,
    "show_hidden_metrics_for_version": None,
    "collect_detailed_traces": None,
    "kv_cache_metrics": False,
    "kv_cache_metrics_sample": 0.01,
    "cudagraph_metrics": False,
    "enable_layerwise_nvtx_tracing": False,
    "enable_mfu_metrics": False,
    "enable_logging_iteration_details": False,
    "jit_monitor_mode": "warn",
    "jit_monitor_verbose": False,
    "enable_mm_processor_stats": False,
    "engram_config": None,
    "mamba_config": None,
    "kernel_config": None,
    "logging_config": None,
    "log_level": None,
    "log_config_file": None,
    "ec_manager_config": None,
    "sleep_mode_offload_cudagraph": False,
    "sleep_preserve_parameter_names": [],
    "enable_cumem_allocator": False,
    "enable_nccl_comm_suspend": False,
    "kv_cache_dtype_skip_layers": [],
    "mamba_block_size": None,
    "mamba_cache_dtype": "auto",
    "mamba_ssm_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_backend": "triton",
    "mamba_ssu_algorithm": None,
    "enable_mamba_cache_stochastic_rounding": False,
    "mamba_cache_philox_rounds": 0,
    "enable_mamba_shared_prefix_checkpoint": False,
    "use_replayssm": False,
    "replayssm_buffer_len": 16,
    "pt_load_map_location": "cpu",
    "swa_bounded_replay": True,
    "performance_mode": "balanced",
    "enable_fault_tolerance": False,
    "fault_tolerance_config": None,
}
"""Name -> default. A config of another engine that is made of defaults is None here."""

TUNING = frozenset(
    (
        *("kernel_config", "moe_backend", "linear_backend", "mamba_config"),
        *("mamba_backend", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size"),
        *("performance_mode", "replayssm_buffer_len", "use_replayssm", "dp_sync_interval"),
        *("prefix_cache_retention_interval", "enable_flash_late_interaction"),
        *("sparse_indexer_topk_backend", "gdn_prefill_backend", "kda_prefill_backend"),
        *("kda_decode_backend", "ir_op_priority", "enable_flashinfer_autotune"),
        "mamba_ssu_algorithm",
    )
)
"""Options whose value changes the speed of another engine and no answer. Those of parallelism are
not among them: a caller who asks for another exchange or for overlap counts on it.
"""


def _field(name: str, default: object) -> Any:
    hint = FOREIGN_FLAGS[name.replace("_", "-")]
    return unbuilt(default, "only for other engines", hint, only_tunes=name in TUNING)


if TYPE_CHECKING:

    class ForeignArgs:
        """The base of `UnbuiltArgs` that has these fields."""

else:
    ForeignArgs = make_dataclass(
        "ForeignArgs",
        [(name, Any, _field(name, default)) for name, default in DEFAULTS.items()],
        kw_only=True,
        init=False,
        repr=False,
        eq=False,
    )
