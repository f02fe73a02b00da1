"""Options of building a decoder besides its spec and its weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.worker_group import WorkerGroup
from quire.models.loading.model_parts import Part, PartMemory
from quire.models.loading.packed_weights import PackedWeights
from quire.models.loading.weight_placement import WeightPlacement
from quire.models.spec import PipelineStage
from quire.quantization import UNQUANTIZED, Recipe


@dataclass(frozen=True, slots=True)
class AdapterRoom:
    """Room in a model's banks: `num_slots` adapters of rank `max_rank` at most, whose
    matrices are kept in `dtype`. `leaves`: those that adapters may change, by canonical name
    without `.weight`; None: all that can be changed.
    """

    num_slots: int
    max_rank: int
    dtype: torch.dtype
    leaves: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`recipe` says how weights are stored. With `spread` the experts are distributed over several
    cores, and only this core's are loaded; the model may run only inside a round. With `group` the
    spec is one worker's share of a decoder (models/cutting/sharding.py), and all workers run at the
    same time. With `stage` it is a piece of a decoder (models/cutting/stages.py), whose weights
    alone are loaded.

    `first_layer` is the place of the first layer's memory among those of the pool (`Batch.kv`): not
    0 for the second model of a pool. `aux_layers` are the layers, ascending, whose input every pass
    returns: the residual stream that enters layer i (0: the embeddings; L: the output of the last
    layer before the final norm). With `keeps_experts` every pass returns the chosen experts.
    `make_placement` makes what keeps the weights of layers; None: they are where they are made.
    `adapter_room`: the adapters that the model has room for; None: it has none. `stored`: packed
    weights of earlier starts, and for later ones; None: there are none. `note_part` is called with
    the name of each part that holds memory, and the part, as soon as it is made. `memory`: of a
    model that is there, which the parts of this one replace; None: each has memory of its own.
    """

    recipe: Recipe = UNQUANTIZED
    spread: ExpertExchange | None = None
    group: WorkerGroup | None = None
    stage: PipelineStage | None = None
    first_layer: int = 0
    aux_layers: tuple[int, ...] = ()
    keeps_experts: bool = False
    make_placement: Callable[[], WeightPlacement] | None = None
    adapter_room: AdapterRoom | None = None
    stored: PackedWeights | None = None
    note_part: Callable[[str, Part], None] | None = None
    memory: PartMemory | None = None
