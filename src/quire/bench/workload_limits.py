"""The least time that a workload takes on a machine, from the spec of the model: formulas, no
measurement.

Each part (the prompts together, every decode step) is bound by the larger of two: its arithmetic,
or reading the weights once and the K/V of its requests. An engine that reads while it computes
could come close; none is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import msgspec

from quire.config.plan import EnginePlan
from quire.engine.core.worker_program import worker_config
from quire.models import find_family, read_spec
from quire.models.costs import (
    active_parameters,
    coded_tensors,
    flops_per_token,
    num_parameters,
    size_in_codes,
    table_parameters,
)
from quire.models.formats import read_storage
from quire.models.formats.storage import CodeLayout, RowScheme
from quire.models.layer_memory import NumberBytes
from quire.models.parameters import parameters
from quire.models.rules import StoredTensor
from quire.models.spec import Decoder, single_mixers
from quire.ops import WeightFormat

_INTEGERS = (
    CodeLayout("bytes", 8, None, has_zeros=False, rows=RowScheme()),
    CodeLayout("bitsandbytes-int8", 8, None, has_zeros=False, scale_name="SCB", rows=RowScheme()),
)
"""Layouts of weights whose products are of int8 with int8."""


class Workload(msgspec.Struct, frozen=True):
    """`num_requests` of `input_len` + `output_len` tokens, at most `num_rows` together."""

    num_requests: int
    input_len: int
    output_len: int
    num_rows: int

    @classmethod
    def on(cls, plan: EnginePlan, num_requests: int, input_len: int, output_len: int) -> Self:
        """The workload in an engine with this plan."""
        return cls(num_requests, input_len, output_len, worker_config(plan).num_rows)

    @property
    def num_together(self) -> int:
        """Requests in one step."""
        return min(self.num_requests, self.num_rows)


class Store(msgspec.Struct, frozen=True):
    """Bytes that one value takes in memory: of the layers' weights, of the head's, of K and V."""

    layers: float
    head: float
    kv: NumberBytes


def store_of(plan: EnginePlan) -> Store:
    """Storage of a model in an engine with this plan."""
    worker = worker_config(plan)
    recipe, size, kv = worker.recipe, worker.torch_dtype.itemsize, worker.number_bytes
    if coded := _coded(plan):
        layers, head = _bytes_as_stored(read_spec(plan.model.hf_config), coded, size)
        return Store(layers, head, kv)
    return Store(_bytes(recipe.projections, size), _bytes(recipe.head, size), kv)


def operand_of(plan: EnginePlan) -> str:
    """Operand of the products of an engine with this plan: a dtype or int8."""
    coded = _coded(plan)
    if coded and all(t.layout in _INTEGERS for t in coded):
        return "int8"
    worker = worker_config(plan)
    form = worker.recipe.projections
    dtype = str(worker.torch_dtype).removeprefix("torch.")
    return dtype if form is None or not form.rounds_rows else "int8"


def _coded(plan: EnginePlan) -> list[StoredTensor]:
    """The tensors that a core keeps in codes."""
    config = plan.model.hf_config
    storage = read_storage(config)
    if storage is None:
        return []
    return coded_tensors(find_family(config), read_spec(config), storage)


def _bytes_as_stored(
    decoder: Decoder, coded: Sequence[StoredTensor], itemsize: int
) -> tuple[float, float]:
    """Bytes of a weight of the layers, on average, and of the head."""
    is_head = [any(leaf.name == "head.weight" for leaf in t.leaves) for t in coded]
    sizes = []
    for wanted, whole in ((False, _layer_weights(decoder)), (True, _head_weights(decoder))):
        count, num_bytes = size_in_codes(
            t for t, of_head in zip(coded, is_head, strict=True) if of_head == wanted
        )
        sizes.append((num_bytes + (whole - count) * itemsize) / whole)
    return sizes[0], sizes[1]


def _bytes(form: WeightFormat | None, itemsize: int) -> float:
    """The bytes of one weight, with its part of the scales: an int4 group has one of two bytes."""
    if form is None:
        return itemsize
    return 0.5 + 2 / form.group if form.name == "int4" else 1.0


def least_seconds(
    decoder: Decoder, work: Workload, store: Store, read_bytes_per_s: float, flops_per_s: float
) -> float:
    """Time below which the workload cannot end on a machine with these two limits."""
    limits = (read_bytes_per_s, flops_per_s)
    return prefill_seconds(decoder, work, store, *limits) + decode_seconds(
        decoder, work, store, *limits
    )


def prefill_seconds(
    decoder: Decoder, work: Workload, store: Store, read_bytes_per_s: float, flops_per_s: float
) -> float:
    """The part of it until every request has its first token, if none gets a second meanwhile."""
    waves = work.num_requests / work.num_together
    flops = work.num_requests * prefill_flops(decoder, work.input_len)
    tokens = work.num_together * work.input_len
    reads = waves * store.layers * _layer_weights_read(decoder, tokens)
    reads += waves * store.head * _head_weights(decoder)
    return max(flops / flops_per_s, reads / read_bytes_per_s)


def decode_seconds(
    decoder: Decoder, work: Workload, store: Store, read_bytes_per_s: float, flops_per_s: float
) -> float:
    """The part of it after that: output_len - 1 steps of all requests that run together."""
    rows = work.num_together
    waves = work.num_requests / rows
    return waves * sum(
        max(
            step_bytes(decoder, rows, context, store) / read_bytes_per_s,
            rows * flops_per_token(decoder, context) / flops_per_s,
        )
        for context in range(work.input_len + 1, work.input_len + work.output_len)
    )


def prefill_flops(decoder: Decoder, length: int) -> float:
    """Operations of one prompt: a token sees half of it on average, and the head runs once."""
    head = 2 * _head_weights(decoder)
    body = flops_per_token(decoder, length // 2) - head
    return length * body + head


def step_bytes(decoder: Decoder, num_rows: int, context: int, store: Store) -> float:
    """Bytes that a decode step reads: the weights that its rows use, once, and their K/V."""
    weights = store.layers * _layer_weights_read(decoder, num_rows)
    weights += store.head * _head_weights(decoder)
    mixers = [mixer for block in decoder.blocks for mixer in single_mixers(block.mixer)]
    memories = [mixer.memory for mixer in mixers if mixer.memory is not None]
    return weights + num_rows * sum(m.step_bytes(context, store.kv) for m in memories)


def _head_weights(decoder: Decoder) -> int:
    return decoder.vocab * decoder.dim


def _layer_weights(decoder: Decoder) -> int:
    """All but the head's and tables, of which rows are looked up."""
    embedding = 0 if decoder.tie else parameters(decoder)["embed.weight"].size
    others = embedding + table_parameters(decoder) + _head_weights(decoder)
    return num_parameters(decoder) - others


def _layer_weights_read(decoder: Decoder, num_rows: int) -> float:
    """Weights that some row uses, without the head; rows choose experts with equal chance."""
    head = _head_weights(decoder)
    active, whole = active_parameters(decoder) - head, _layer_weights(decoder)
    if active >= whole:
        return active
    experts, top_k = _experts(decoder)
    # an expert is read unless every row leaves it out
    used = experts * (1 - math.pow(1 - top_k / experts, num_rows))
    return active + (whole - active) * (used - top_k) / (experts - top_k)


def _experts(decoder: Decoder) -> tuple[int, int]:
    return next(
        (moe.experts, moe.top_k)
        for moe in (block.experts for block in decoder.blocks)
        if moe is not None and moe.experts > moe.top_k
    )
