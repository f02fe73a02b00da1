"""`EnginePlan`: what `resolve()` decided; nothing is automatic and every value has its reason."""

from __future__ import annotations

import textwrap
from typing import Any

import msgspec

from quire.config.adapter_plan import AdapterPlan
from quire.config.hidden_states import HiddenStatesPlan
from quire.config.offload import Offload
from quire.config.pooler_config import PoolerConfig
from quire.config.profiler_config import ProfilerConfig
from quire.config.speculation import SpeculationPlan
from quire.config.structured_outputs_config import StructuredOutputsConfig
from quire.config.views import PlanViews
from quire.models.pooling.spec import PoolerSpec


class EnginePlan(PlanViews, msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine is built from. Frozen; the builder reads it and hands values on.
    `model_config` and the like show it by the reference's nested names (config/views/).

    `generates`: whether requests may ask for text. `pooler`: of an engine that pools, and
    `pooler_config` as it was given; its vectors have `embedding_size` numbers before they are cut;
    input is made small letters where it `lowers_input`, and `prompts` are what clients may put
    before texts.
    `sampling_defaults` are fields of SamplingParams. `num_blocks` counts the null block.
    `data_parallel_ranks` are the cores that run here; in the mode "internal" the others run on
    other machines and connect to `data_parallel_address`. `num_threads`, `num_blocks` and
    `kv_cache_bytes` are each core's own; `thread_cpus` lists the logical CPUs that the threads of
    each of these cores may run on, "" for any. The latter is the size of the blocks in all groups'
    layers. With a `memory_share` both are estimates: the worker measures what its workspace leaves
    of that share of a device's free memory. `snapshot_interval` None: there are no snapshots of
    recurrent states. `tokenizer_folder` None: no tokenizer. `max_logprobs`
    is at most the vocabulary. `weights_folder`: where weights are kept in mapped files; None: in
    memory. `offload`: which weights stay in host memory while a GPU runs the model;
    None: none. `speculation` None: no tokens are drafted. `reasons` has an entry for every field
    shown by `explain()`; `notes` are messages for the user.
    """

    # the model
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
    packed_weights_bytes: int
    offload: Offload | None
    dtype: str
    quantization: str | None
    seed: int
    max_model_len: int
    tokenizer_folder: str | None
    tokenizer_mode: str
    chat_template: str | None
    # the machine
    device: str
    num_threads: int
    thread_cpus: tuple[str, ...]
    data_parallel_size: int
    max_core_restarts: int
    spare_core: str
    data_parallel_mode: str
    data_parallel_ranks: tuple[int, ...]
    data_parallel_address: str | None
    data_parallel_rpc_port: int
    enable_expert_parallel: bool
    distributed_executor_backend: str
    use_graphs: bool
    is_deterministic: bool
    # KV memory
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    memory_share: float | None
    kv_dtype: str
    enable_prefix_caching: bool
    snapshot_interval: int | None
    # scheduling
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    max_stall_s: float | None
    scheduling_policy: str
    max_steps_in_flight: int
    speculation: SpeculationPlan | None
    draft_reports: str
    hidden_states: HiddenStatesPlan | None
    enable_return_routed_experts: bool
    # adapters
    adapters: AdapterPlan | None
    # sampling and output
    max_logprobs: int
    logprobs_mode: str
    logits_processors: tuple[Any, ...]
    sampling_defaults: dict[str, Any]
    generation_eos_token_ids: tuple[int, ...]
    log_stats: bool
    stream_interval: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int
    reasoning_marks: tuple[str, ...]
    otlp_traces_endpoint: str | None
    profiler: ProfilerConfig | None
    worker_extension_cls: str | None
    structured_outputs: StructuredOutputsConfig
    reasons: dict[str, str]
    notes: tuple[str, ...] = ()

    def explain(self, width: int = 120) -> str:
        """A table of every decision: name, value, reason."""
        shown = [(name, _short(value), self.reasons[name]) for name, value in self.decided()]
        names, values = (max(len(row[i]) for row in shown) for i in (0, 1))
        indent = " " * (names + values + 4)
        lines = [
            textwrap.fill(
                f"{name:{names}}  {value:{values}}  {reason}",
                width=max(width, len(indent) + 30),
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
            for name, value, reason in shown
        ]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)]) + "\n"

    def decided(self) -> list[tuple[str, object]]:
        """The fields that are decisions, in order, with their values."""
        hidden = (*NOT_SHOWN, "reasons", "notes")
        fields = [name for name in self.__struct_fields__ if name not in hidden]
        return [(name, msgspec.structs.asdict(self)[name]) for name in fields]


NOT_SHOWN = ("hf_config", "generates", "pooler_config", "embedding_size", "lowers_input", "prompts")
"""Fields that are long, or that follow from `pooler` and the model's files."""


def _short(value: object) -> str:
    """A value in at most 40 characters."""
    if isinstance(value, dict):
        text = " ".join(f"{k}={v}" for k, v in value.items()) or "none"
    elif isinstance(value, PoolerSpec):
        text = f"{value.tasks[0]} by {' and '.join(value.poolings)}"
    elif isinstance(value, SpeculationPlan):
        text = f"{value.method}, up to {value.num_tokens}"
    elif isinstance(value, HiddenStatesPlan):
        text = value.folder
    elif isinstance(value, ProfilerConfig):
        text = value.torch_profiler_dir
    elif isinstance(value, AdapterPlan):
        text = f"{value.max_loras} of rank {value.max_lora_rank} in {value.lora_dtype}"
    elif isinstance(value, Offload):
        text = f"{len(value.layers)} layers"
    elif isinstance(value, StructuredOutputsConfig):
        text = value.backend
    elif isinstance(value, tuple):
        text = " ".join(str(item) for item in value) or "none"
    elif value is None or isinstance(value, bool):
        text = "none" if value is None else "yes" if value else "no"
    else:
        text = str(value)
    text = " ".join(text.split())
    return text if len(text) <= 40 else "..." + text[-37:]
