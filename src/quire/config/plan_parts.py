"""The parts of a plan: a component takes those that are named after its concerns, never the whole.

The part of steps is the scheduler's own (scheduling/settings.py), those of adapters and drafts have
files of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from quire.clusters.ray_place import RayPlace
from quire.config.ec_transfer_config import ECTransferConfig
from quire.config.facts import DescribedModel
from quire.config.hidden_states import HiddenStatesPlan
from quire.config.offload import Offload
from quire.config.pooler_config import PoolerConfig
from quire.config.profiler_config import ProfilerConfig
from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.distributed.mesh import ExpertsPlace, Mesh
from quire.hardware.launched import LaunchedProcess
from quire.models.formats.rounding_rules import RoundingRules
from quire.models.pooling.spec import PoolerSpec
from quire.params.weight_transfer import WeightTransferPlan
from quire.plugins.tables import LOAD_FORMATS
from quire.tiers.kv_events_config import KVEventsPlan
from quire.tiers.kv_transfer_config import KVTransferConfig
from quire.tiers.plan import KVTierPlan


class ModelPlan(DescribedModel, msgspec.Struct, frozen=True, kw_only=True):
    """The model: its files, names, sizes, types, tokenizer and template.

    `generates`: whether requests may ask for text. `pooler`: of an engine that pools, and
    `pooler_config` as it was given; its vectors have `embedding_size` numbers before they are cut;
    input is made small letters where it `lowers_input`, and `prompts` are what clients may put
    before texts. `tokenizer_folder` None: no tokenizer. `weights_folder`: where weights are kept in
    mapped files; None: in memory. A core's weights take about `weight_bytes`, and the files of
    packed ones at most `packed_weights_bytes`. `offload`: which weights stay in host memory while a
    GPU runs the model; None: none. `takes_prompt_embeds`: prompts may be embeddings;
    `takes_media_embeds`: pictures may come as the rows that an encoder makes of them.
    `encoder_transfer`: where rows are kept outside of the engine; None: nowhere.
    """

    model: str
    model_folder: str
    served_model_names: tuple[str, ...]
    architecture: str
    model_impl: str
    vocab_size: int
    generates: bool
    pooler: PoolerSpec | None
    pooler_config: PoolerConfig | None
    embedding_size: int
    lowers_input: bool
    prompts: dict[str, str]
    hf_config: dict[str, Any]
    load_format: str
    weights_folder: str | None
    weight_bytes: int
    packed_weights_bytes: int
    offload: Offload | None
    dtype: str
    quantization: str | None
    rounding_rules: RoundingRules | None
    seed: int
    max_model_len: int
    tokenizer_folder: str | None
    tokenizer_mode: str
    chat_template: str | None
    takes_prompt_embeds: bool
    takes_media_embeds: bool
    encoder_transfer: ECTransferConfig | None

    @property
    def tokenizer_files(self) -> tuple[Path, str] | None:
        """The folder of the tokenizer, and how its files are read; None: there is no tokenizer."""
        folder = self.tokenizer_folder
        return None if folder is None else (Path(folder), self.tokenizer_mode)

    @property
    def has_drawn_weights(self) -> bool:
        """Whether the weights are random numbers, which `seed` draws."""
        return self.load_format == "dummy"

    @property
    def is_safetensors(self) -> bool:
        """Whether the weights are in safetensors files with the names of transformers."""
        return self.load_format == "safetensors"

    @property
    def is_rounded(self) -> bool:
        """Whether weights are rounded while they are loaded."""
        return self.quantization is not None or self.rounding_rules is not None

    @property
    def has_files_of_plugin(self) -> bool:
        """Whether a plugin reads the weights, which may come from anywhere at the next start."""
        return self.load_format in LOAD_FORMATS

    def files_key(self) -> dict[str, Any]:
        """The values that the numbers of the weights depend on, next to the files' contents."""
        return {
            "config": self.hf_config,
            "format": self.load_format,
            "dtype": self.dtype,
            "seed": self.seed if self.has_drawn_weights else 0,
        }

    def weights_key(self) -> dict[str, Any]:
        """The key of the weights as they are kept: rounded, and those of what the engine does."""
        return self.files_key() | {
            "quantization": self.quantization,
            "rounding_rules": repr(self.rounding_rules),
            "generates": self.generates,
            "pooler": repr(self.pooler),
        }


class ParallelPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The cores of an engine and the workers of a core: machines, processes, devices and threads.

    `data_parallel_ranks` are the cores that run here; in the mode "internal" the others run on
    other machines and connect to `data_parallel_address`. With the backend "ray" they are all on
    machines that Ray chooses, `data_parallel_size_local` on each (None: as many as have room). Each
    core's model is cut into stages of `stage_layers`, and each stage is shared by
    `tensor_parallel_size` workers. `num_threads` are each worker's own; `thread_cpus` lists the
    logical CPUs that the threads of each worker of these cores may run on, "" for any.

    The workers of `nnodes` machines, of which this is number `node_rank`, find their core at
    `master_addr`:`master_port`. `launched`: this process among those of an external launcher, of
    which each has one worker; None: the engine starts its workers itself. `rank`: the worker of its
    core that has this plan. `ray`: the cluster whose
    machines have the workers, as far as it was known to who made the plan; None: Ray has none.
    `experts_at`: where the ranks of a core that shares experts meet those of the others, which the
    core is told as it starts. `weight_transfer`: how a trainer sends new weights; None: none does.
    """

    device: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    stage_layers: tuple[int, ...]
    same_bits_as_one_rank: bool
    num_threads: int
    thread_cpus: tuple[str, ...]
    data_parallel_size: int
    max_core_restarts: int
    spare_core: str
    data_parallel_mode: str
    data_parallel_ranks: tuple[int, ...]
    data_parallel_address: str | None
    data_parallel_rpc_port: int
    data_parallel_backend: str
    data_parallel_size_local: int | None
    enable_expert_parallel: bool
    experts_at: ExpertsPlace | None
    distributed_executor_backend: str
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    launched: LaunchedProcess | None
    rank: int
    ray: RayPlace | None
    use_graphs: bool
    is_deterministic: bool
    profiler: ProfilerConfig | None
    worker_cls: str | None
    worker_extension_cls: str | None
    weight_transfer: WeightTransferPlan | None
    scheduler_cls: str | None

    @property
    def mesh(self) -> Mesh:
        """The sizes of the engine: workers that share a stage's layers, stages, and cores."""
        return Mesh(self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size)

    @property
    def is_lock_step(self) -> bool:
        """Whether the cores share experts, so that they step, and restart, together."""
        return self.enable_expert_parallel

    @property
    def own_classes(self) -> dict[str, str]:
        """The names of the user's own classes, by option."""
        backend = self.distributed_executor_backend
        named = {
            # the names of Quire's own executors have no module
            "distributed_executor_backend": backend if ":" in backend else None,
            "worker_cls": self.worker_cls,
            "worker_extension_cls": self.worker_extension_cls,
            "scheduler_cls": self.scheduler_cls,
        }
        return {option: name for option, name in named.items() if name is not None}

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def hello_endpoint(self) -> str:
        """The address at which the front end awaits cores from other machines."""
        return f"tcp://{self.data_parallel_address}:{self.data_parallel_rpc_port}"

    @property
    def spans_machines(self) -> bool:
        """Whether the workers of a core are on several machines that this plan names."""
        return self.nnodes > 1

    @property
    def node_place(self) -> tuple[int, int]:
        """The number of this machine among those of the workers, and how many these are."""
        return self.node_rank, self.nnodes

    @property
    def has_one_worker(self) -> bool:
        """Whether each core has one worker, in its own process."""
        return self.distributed_executor_backend == "uni"

    @property
    def has_whole_models(self) -> bool:
        """Whether the one worker of each core has all weights of the model."""
        return self.has_one_worker and not self.enable_expert_parallel

    @property
    def has_ray_workers(self) -> bool:
        """Whether workers are where Ray puts them."""
        return self.distributed_executor_backend == "ray"


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of each core. `num_blocks` counts the null block; `kv_cache_bytes` is the size
    of the blocks in all groups' layers. Where `measures_memory`, both are estimates: the worker
    measures what its workspace leaves of `memory_utilization`. That is the share of the free memory
    that an engine takes where a share bounds it, else the share of all memory that its sizes come
    to. `snapshot_interval` None: there are no snapshots of recurrent states. `kv_tier`: where each
    core keeps K/V outside of its blocks; None: nowhere. `kv_connector`: what brings K/V from
    elsewhere and sends it there; None: nothing. `kv_events`: where each core publishes what its
    blocks have; None: nowhere.
    """

    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    measures_memory: bool
    memory_utilization: float
    kv_dtype: str
    enable_prefix_caching: bool
    snapshot_interval: int | None
    kv_tier: KVTierPlan | None
    kv_connector: KVTransferConfig | None
    kv_events: KVEventsPlan | None

    @property
    def labels(self) -> dict[str, str]:
        """The description of the cache in metrics and logs, by the reference's names."""
        facts = {
            "block_size": self.block_size,
            "num_gpu_blocks": self.num_blocks,
            "cache_dtype": self.kv_dtype,
            "enable_prefix_caching": self.enable_prefix_caching,
        }
        return {name: str(value) for name, value in facts.items()}


class MediaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The media of prompts. `limits`: the most items of each modality in one. `allowed_domains`:
    hosts that they are fetched from, all if empty; `local_folder`: whose files may be named, "" for
    none. `processor_kwargs` change the image processor's settings; `background` is the colour under
    transparent pixels. `cache_bytes` of processed items are kept in each front end, `journal_bytes`
    of live requests' items as they came. `interleaves`: see `interleave_mm_strings`.
    """

    limits: dict[str, int]
    allowed_domains: tuple[str, ...]
    local_folder: str
    processor_kwargs: dict[str, Any]
    background: tuple[int, int, int]
    cache_bytes: int
    journal_bytes: int
    interleaves: bool


class SamplingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The options for drawing tokens and for what outputs carry. `sampling_defaults` are fields of
    SamplingParams; `max_logprobs` is at most the vocabulary.
    """

    max_logprobs: int
    logprobs_mode: str
    logits_processors: tuple[Any, ...]
    sampling_defaults: dict[str, Any]
    generation_eos_token_ids: tuple[int, ...]
    reasoning_marks: tuple[str, ...]
    structured_outputs: StructuredOutputsConfig
    draft_reports: str
    hidden_states: HiddenStatesPlan | None
    enable_return_routed_experts: bool


class ServingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The front end: how many requests wait there, how often outputs are sent, what is recorded.
    `length_buckets` are the bounds of histograms of lengths where `histogram_buckets` names none.
    `foreign_tuning` are options that only tune other engines, as they were given.
    """

    log_stats: bool
    io_processor_plugin: str | None
    stream_interval: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    otlp_traces_endpoint: str | None
    histogram_buckets: dict[str, list[float]] | None
    length_buckets: list[float]
    foreign_tuning: dict[str, str | bool | int | float | None]
