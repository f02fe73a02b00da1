"""The facts about the model that `resolve()` uses: numbers, read from its files by
config/planning.py.

Gathering reads files and queries the operating system (`quire.config.planning`); these values can
also be written by hand, to test the decisions for machines that are not available.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.config.draft_facts import DraftWish
from quire.models.cutting.rank_facts import RankFacts
from quire.models.foreign.implementation import AnyDecoder, describe_model
from quire.models.layer_memory import Latents, LayerMemory
from quire.models.max_length import LengthFacts
from quire.models.pooling.spec import PoolerSpec

EMBEDDED_NAME = "quire-embedded"
"""The name of the small model inside the package."""


class DescribedModel:
    """A model whose description follows from its config, what runs it, and its pooler."""

    __slots__ = ()
    hf_config: dict[str, Any]
    model_impl: str
    pooler: PoolerSpec | None

    @property
    def is_foreign(self) -> bool:
        """Whether transformers' code runs the model."""
        return self.model_impl == "transformers"

    @property
    def decoder(self) -> AnyDecoder:
        return describe_model(self.hf_config, self.model_impl, self.pooler)


class ModelFacts(DescribedModel, msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, in numbers.

    `model_impl`: "quire" or "transformers". `weights_format`: of the files that have its weights.
    `tokenizer_mode`: of its tokenizer's files. `memories`: what each layer remembers of a request.
    `num_experts` of a layer, 0 in a dense model; `num_expert_parameters` of those of all layers
    together. `widest`: elements of the widest activation of one token, for the workspace.
    `stored_as`: how the checkpoint is quantised, None where it is not; `num_coded_parameters` of
    its weights are then codes of `coded_bytes`. `widened_because`: why all become plain numbers
    while they are loaded, None where they do not. `num_rounded_parameters` of the weights take
    `rounded_bytes` where `quantization_config` says which are rounded. `adapter_size`: values
    of one rank of a LoRA adapter of all matrices. `layer_products`: of each layer, how many values
    the matrices of each of its products have; empty for a model of transformers.
    `pooled_length`: what the files state for prompts that are pooled, where a model generates as
    well and has the `length` of config.json.
    `generates`: it has a head that tokens are drawn with. `pooler`: of a model that pools; its
    input is made small letters where it `lowers_input`, and `prompts` are what callers may put
    before texts.
    `foreign_keys`: those of config.json that nothing reads, in words. `part_of`: the architecture
    of the whole of which the model is the text part. `layers_read_ids`: layers look tokens up in
    tables of their own.
    `drafts`: what was asked for, with the draft's files; None: nothing is drafted.
    `rank`: what each of several workers has; None: one worker has all.
    """

    name: str
    folder: str
    tokenizer_mode: str = "hf"
    weights_format: str = "safetensors"
    tokenizer_folder: str | None
    architecture: str
    model_impl: str = "quire"
    model_impl_reason: str = "a family of Quire's describes the architecture"
    model_type: str
    checkpoint_dtype: str
    hf_config: dict[str, Any]
    foreign_keys: str = ""
    part_of: str | None = None
    num_parameters: int
    adapter_size: int = 0
    num_layers: int
    layers_read_ids: bool = False
    hidden_size: int
    widest: int
    num_experts: int = 0
    num_expert_parameters: int = 0
    vocab_size: int
    stored_as: str | None = None
    num_coded_parameters: int = 0
    coded_bytes: int = 0
    num_rounded_parameters: int = 0
    rounded_bytes: int = 0
    widened_because: str | None = None
    layer_products: tuple[dict[str, int], ...] = ()
    memories: tuple[LayerMemory | None, ...]
    length: LengthFacts
    pooled_length: LengthFacts | None = None
    generation_config: dict[str, Any] = {}
    generation_config_source: str = ""
    template: str | None = None
    template_source: str = ""
    generates: bool = True
    pooler: PoolerSpec | None = None
    pooler_reason: str = "the model generates"
    pooler_note: str = ""
    lowers_input: bool = False
    prompts: dict[str, str] = {}
    drafts: DraftWish | None = None
    rank: RankFacts | None = None

    @property
    def is_embedded(self) -> bool:
        """Whether it is the small model inside the package."""
        return self.name == EMBEDDED_NAME

    @property
    def pool_memories(self) -> tuple[LayerMemory | None, ...]:
        """Memory that a request takes in the layers of all stages, those of drafts included."""
        own = self.memories if self.rank is None else self.rank.memories
        return own + (() if self.drafts is None else self.drafts.memories)

    @property
    def has_latents(self) -> bool:
        """Whether layers keep latents instead of keys and values."""
        return any(isinstance(memory, Latents) for memory in self.memories)
