"""The values that a worker is built from, and the facts about a built one for the core."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from quire.config.adapter_plan import AdapterPlan
from quire.config.plan_parts import MemoryPlan, ModelPlan, ParallelPlan, SamplingPlan
from quire.config.resolve.dtype import number_bytes
from quire.config.speculation import SpeculationPlan
from quire.models.layer_memory import NumberBytes
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.rounding.recipes import recipe_of
from quire.quantization import Recipe
from quire.runner.encoder_outputs import Encoder
from quire.runner.model import RunnableModel
from quire.runner.sampling import LogitsProcessor
from quire.scheduling.settings import KVGroupSpec, StepsPlan

MakeProcessors = Callable[[torch.device], Sequence[LogitsProcessor]]
MakeEncoders = Callable[[RunnableModel], Mapping[str, Encoder]]


def no_encoders(model: RunnableModel) -> Mapping[str, Encoder]:
    """The encoders of a model of text."""
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Parts of the engine's plan. `make_processors` makes the custom logits processors for a
    device, `make_encoders` those of a model that is loaded, by modality.
    """

    model: ModelPlan
    parallel: ParallelPlan
    memory: MemoryPlan
    steps: StepsPlan
    speculation: SpeculationPlan | None
    adapters: AdapterPlan | None
    sampling: SamplingPlan
    make_processors: MakeProcessors
    make_encoders: MakeEncoders = no_encoders
    plan: Any = None
    """The whole plan, with which processes of workers are started."""
    program: str = ""
    """The module of the program that they run."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        found: torch.dtype = getattr(torch, self.model.dtype)
        return found

    @property
    def kv_dtype(self) -> torch.dtype:
        """The type of keys and values in KV memory."""
        found: torch.dtype = getattr(torch, self.memory.kv_dtype)
        return found

    @property
    def number_bytes(self) -> NumberBytes:
        """The bytes of a number of each kind in KV memory."""
        return number_bytes(self.model.dtype, self.memory.kv_dtype)

    @property
    def device_type(self) -> str:
        """The kind of device that the model runs on."""
        return self.parallel.device

    @property
    def reports_experts(self) -> bool:
        """Whether outputs have the experts of their tokens."""
        return self.sampling.enable_return_routed_experts

    @property
    def weights_folder(self) -> Path | None:
        """Folder of mapped weights; None: they are in memory."""
        folder = self.model.weights_folder
        return None if folder is None else Path(folder)

    @property
    def weights_format(self) -> LoadFormat:
        return cast(LoadFormat, self.model.load_format)

    @property
    def weights_seed(self) -> int:
        """The seed of weights that are drawn."""
        return self.model.seed

    @property
    def recipe(self) -> Recipe:
        """The rule of what is rounded while weights are loaded."""
        return recipe_of(self.model.quantization, self.model.rounding_rules)

    @property
    def max_len(self) -> int:
        """The most tokens of a request."""
        return self.model.max_model_len

    @property
    def key_size(self) -> int:
        """The tokens of a key, and of the blocks of groups that have no size of their own."""
        return self.memory.block_size

    @property
    def num_rows(self) -> int:
        """The most requests in a step."""
        return self.steps.max_num_seqs

    @property
    def step_size(self) -> int:
        """The most tokens in a step."""
        return self.steps.max_num_batched_tokens

    @property
    def num_drafts(self) -> int:
        """The most drafts of a request in a step."""
        return 0 if self.speculation is None else self.speculation.num_tokens

    @property
    def max_sampled(self) -> int:
        """The most tokens that a step draws, drafts verified included."""
        drafts = 0 if self.speculation is None else self.speculation.max_drafts
        return self.num_rows + drafts


@dataclass(frozen=True, slots=True)
class MediaFacts:
    """Facts about media: the modalities that the workers have encoders for, how many rows
    these make in a step and are kept (0: there are none), and on how many axes a token of the model
    has a position.
    """

    modalities: tuple[str, ...] = ()
    num_rows: int = 0
    axes: int = 1


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The facts about the workers for the scheduler and the core: the KV blocks of each, null block
    included, and the groups that share them; whether weights are in memory of a device's own; what
    they make of media.
    """

    num_blocks: int
    kv_groups: tuple[KVGroupSpec, ...]
    has_own_memory: bool
    media: MediaFacts = field(default_factory=MediaFacts)
