"""Numbers of a model that several workers share, for plans. Free of torch."""

from __future__ import annotations

import msgspec

from quire.distributed.mesh import layers_of_stages
from quire.errors import InvalidParameter
from quire.models.cutting.sharding import has_bits_of_one, shard
from quire.models.cutting.stages import cut, stages_of
from quire.models.kv_pool import memories_of
from quire.models.layer_memory import LayerMemory
from quire.models.parameters import num_expert_parameters, num_parameters
from quire.models.spec import Decoder


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The part of each of the workers that share a stage's layers, of all stages together:
    `memories`, and values of weights. `stage_layers`: the layers of each stage. `same_bits`: the
    workers add up every product in the order of one.
    """

    memories: tuple[LayerMemory | None, ...]
    num_parameters: int
    stage_layers: tuple[int, ...]
    same_bits: bool


def rank_facts(
    decoder: Decoder,
    *,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    group: int,
    stage_layers: tuple[int, ...] | None = None,
) -> RankFacts:
    """The facts for so many workers of each stage, and stages. `group`: inputs of projections with
    one scale (0: all). `stage_layers`: the layers of each stage; None: equal shares. Raises
    LoadError for a model that cannot be cut so, InvalidParameter for more stages than layers, and
    for layers of stages that are not those of the model.
    """
    count, size = len(decoder.blocks), tensor_parallel_size
    if pipeline_parallel_size > count:
        allowed = f"the model has {count} layers, and each stage has one or more"
        raise InvalidParameter("pipeline_parallel_size", pipeline_parallel_size, allowed)
    own = shard(decoder, size, group) if size > 1 else decoder
    if stage_layers is None:
        stage_layers = layers_of_stages(count, pipeline_parallel_size)
    elif (len(stage_layers), sum(stage_layers)) != (pipeline_parallel_size, count) or (
        0 in stage_layers
    ):
        raise InvalidParameter(
            "QUIRE_PP_LAYER_PARTITION", ",".join(map(str, stage_layers)),
            f"{pipeline_parallel_size} numbers whose sum is {count}, the layers of the model, and "
            "each stage has one or more",
        )  # fmt: skip
    if pipeline_parallel_size > 1:
        # for the errors alone: what cannot be cut is refused before weights are read
        for stage in stages_of(decoder, stage_layers):
            cut(own, stage)
    experts = num_expert_parameters(own)
    return RankFacts(
        memories=memories_of([own]),
        num_parameters=num_parameters(own) - experts + -(-experts // size),
        stage_layers=stage_layers,
        same_bits=size == 1 or has_bits_of_one(decoder, size, group),
    )
