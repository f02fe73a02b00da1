"""Views of the plan except the model's: KV cache, cores, steps, device, files, traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.config.views.view import Fact, Fixed, PlanView, Tuned

if TYPE_CHECKING:
    import torch


class CacheView(PlanView):
    """`vllm_config.cache_config`: sizes of the KV cache; `num_gpu_blocks` counts the null block."""

    name = "cache_config"
    parts = ("memory",)
    num_gpu_blocks = Fact("num_blocks")
    num_cpu_blocks = Fixed(0)
    cache_dtype = Fact("kv_dtype")
    prefix_caching_hash_algo = Tuned("sha256")
    prefix_cache_retention_interval = Tuned(0)
    gpu_memory_utilization = Fact("memory_utilization")
    kv_cache_memory_bytes = Fact("kv_cache_bytes")


class ParallelView(PlanView):
    """`vllm_config.parallel_config`: the workers of a core, and the cores of an engine."""

    name = "parallel_config"
    parts = ("parallel",)
    rank = Fact()
    nnodes_within_dp = Fact("nnodes")
    node_rank_within_dp = Fact("node_rank")
    use_all2all = Fact("enable_expert_parallel")
    use_ubatching = Fixed(False)
    num_ubatches = Fixed(0)

    @property
    def worker_extension_cls(self) -> str:
        """The class whose methods workers have besides their own; empty without one."""
        return str(self.plan.parallel.worker_extension_cls or "")

    @property
    def world_size(self) -> int:
        """The workers of one core."""
        size: int = self.tensor_parallel_size * self.pipeline_parallel_size
        return size

    @property
    def world_size_across_dp(self) -> int:
        """The workers of all cores."""
        cores: int = self.data_parallel_size
        return self.world_size * cores

    @property
    def local_world_size(self) -> int:
        """The workers of one core on this machine."""
        return self.world_size // int(self.plan.parallel.nnodes)

    @property
    def data_parallel_index(self) -> int:
        """The same as `data_parallel_rank`."""
        return self.data_parallel_rank

    @property
    def local_engines_only(self) -> bool:
        """Whether the front end serves with the cores of this machine alone."""
        return self.data_parallel_external_lb or self.data_parallel_hybrid_lb

    @property
    def data_parallel_size_local(self) -> int:
        """The cores on this machine, or on each that Ray chooses."""
        parallel: Any = self.plan.parallel
        return int(parallel.data_parallel_size_local or len(parallel.data_parallel_ranks))

    @property
    def data_parallel_rank(self) -> int:
        """The first core on this machine; 0 on a machine without cores."""
        ranks: tuple[int, ...] = self.plan.parallel.data_parallel_ranks
        return ranks[0] if ranks else 0

    @property
    def data_parallel_master_ip(self) -> str:
        """Address of the front end for cores on other machines; this one where there are none."""
        address: str | None = self.plan.parallel.data_parallel_address
        return address or "127.0.0.1"

    @property
    def data_parallel_external_lb(self) -> bool:
        """Whether load is balanced outside, with one core here."""
        return bool(self.plan.parallel.data_parallel_mode == "external")

    @property
    def data_parallel_hybrid_lb(self) -> bool:
        """Whether load is balanced between machines outside, and between cores here."""
        return bool(self.plan.parallel.data_parallel_mode == "hybrid")


class SchedulerView(PlanView):
    """`vllm_config.scheduler_config`: how much a step computes, and of whom."""

    name = "scheduler_config"
    parts = ("steps",)
    max_model_len = Fact(part="model")
    stream_interval = Fact(part="serving")
    chunked_prefill_enabled = Fact("enable_chunked_prefill")
    policy = Fact("scheduling_policy")

    @property
    def async_scheduling(self) -> bool:
        """Whether a step is planned while another one runs."""
        return bool(self.plan.steps.max_steps_in_flight > 1)

    @property
    def runner_type(self) -> str:
        """generate or pooling."""
        return "generate" if self.plan.model.generates else "pooling"


class DeviceView(PlanView):
    """`vllm_config.device_config`."""

    name = "device_config"
    device_type = Fact("device", "parallel")

    @property
    def device(self) -> torch.device:
        """The device as torch names it; torch is imported for it."""
        import torch

        return torch.device(self.plan.parallel.device)


class SpeculativeView(PlanView):
    """`vllm_config.speculative_config`, of an engine that drafts."""

    name = "speculative_config"
    method = Fact(part="speculation")
    num_speculative_tokens = Fact("num_tokens", "speculation")

    @property
    def model(self) -> str | None:
        """The weights or the class that drafts; None where tokens alone do."""
        plan: Any = self.plan.speculation
        found: str | None = plan.custom_class if plan.draft is None else plan.draft.model
        return found


class LoadView(PlanView):
    """`vllm_config.load_config`."""

    name = "load_config"
    load_format = Fact(part="model")


class ObservabilityView(PlanView):
    """`vllm_config.observability_config`."""

    name = "observability_config"
    otlp_traces_endpoint = Fact(part="serving")
    custom_histogram_buckets = Fact("histogram_buckets", "serving")
    per_request_spec_decode_metrics = Fact("draft_reports", "sampling")
