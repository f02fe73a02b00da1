"""The operations of a decoder: one contract file per family, whose plain-torch bodies are the
definitions.

`select` chooses a provider for each op once and returns `Ops`, the namespace that models and the
runner call. The rest of what is exported here are the values that travel through ops.
"""

from quire.ops.attention import AttentionArgs, AttentionPlan
from quire.ops.batch import (
    NO_BLOCK,
    PAD_SLOT,
    Batch,
    GroupBatch,
    LayerBatch,
    PromptBatch,
    StateBatch,
)
from quire.ops.catalog import CATALOG, Choice, Ops
from quire.ops.formats.coded import CodedWeight
from quire.ops.kv import LayerKV, LayerLatents, LayerState
from quire.ops.linear import LinearWeight
from quire.ops.mixers.latent import HeadsWeight
from quire.ops.mixers.prompts import RelativeScores
from quire.ops.moe import ExpertWeights, MoeArgs
from quire.ops.norm import NormWeight
from quire.ops.quantized import WeightFormat
from quire.ops.registry import Facts, Implementation, Op
from quire.ops.rotary import QKNorm, RotaryTable
from quire.ops.routing import RouteArgs
from quire.ops.select import bind, select

__all__ = [
    "CATALOG",
    "NO_BLOCK",
    "PAD_SLOT",
    "AttentionArgs",
    "AttentionPlan",
    "Batch",
    "Choice",
    "CodedWeight",
    "ExpertWeights",
    "Facts",
    "GroupBatch",
    "HeadsWeight",
    "Implementation",
    "LayerBatch",
    "LayerKV",
    "LayerLatents",
    "LayerState",
    "LinearWeight",
    "MoeArgs",
    "NormWeight",
    "Op",
    "Ops",
    "PromptBatch",
    "QKNorm",
    "RelativeScores",
    "RotaryTable",
    "RouteArgs",
    "StateBatch",
    "WeightFormat",
    "bind",
    "select",
]
