"""The values that a worker is built from, and the facts about a built one for the core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.config.adapter_plan import AdapterPlan
from quire.config.hidden_states import HiddenStatesPlan
from quire.config.offload import Offload
from quire.config.profiler_config import ProfilerConfig
from quire.config.speculation import SpeculationPlan
from quire.models.foreign.implementation import ModelImpl
from quire.models.layer_memory import NumberBytes
from quire.models.loading.folder_files import LoadFormat
from quire.models.pooling.spec import PoolerSpec
from quire.runner.sampling import LogitsProcessor
from quire.runner.sampling.logprobs import LogprobsMode
from quire.scheduling.settings import KVGroupSpec

MakeProcessors = Callable[[torch.device], Sequence[LogitsProcessor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """A worker's model, device, KV memory and largest steps; the fields are those of `EnginePlan`.
    `make_processors` makes the custom logits processors for a device.
    """

    # the model
    model_folder: str
    hf_config: dict[str, Any]
    generates: bool
    pooler: PoolerSpec | None
    model_impl: ModelImpl
    load_format: LoadFormat
    weights_folder: Path | None
    packed_weights_bytes: int
    dtype: torch.dtype
    quantization: str | None
    seed: int
    max_model_len: int
    offload: Offload | None
    adapters: AdapterPlan | None
    # the device
    device: str
    num_threads: int
    use_graphs: bool
    is_deterministic: bool
    # KV memory
    block_size: int
    num_blocks: int
    memory_share: float | None
    kv_dtype: torch.dtype
    number_bytes: NumberBytes
    enable_chunked_prefill: bool
    # steps
    max_num_seqs: int
    max_num_batched_tokens: int
    keeps_experts: bool
    speculation: SpeculationPlan | None
    hidden_states: HiddenStatesPlan | None
    # sampling and profiling
    max_logprobs: int
    logprobs_mode: LogprobsMode
    make_processors: MakeProcessors
    profiler: ProfilerConfig | None
    # methods of the user's own
    extension: str | None

    @property
    def num_drafts(self) -> int:
        """The most drafts of a request in a step."""
        return 0 if self.speculation is None else self.speculation.num_tokens

    @property
    def max_sampled(self) -> int:
        """The most tokens that a step draws, drafts verified included."""
        drafts = 0 if self.speculation is None else self.speculation.max_drafts
        return self.max_num_seqs + drafts


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The facts about the workers for the scheduler and the core: the KV blocks of each, null block
    included, and the groups that share them; whether weights are in memory of a device's own.
    """

    num_blocks: int
    kv_groups: tuple[KVGroupSpec, ...]
    has_own_memory: bool
