"""The least time that a workload takes on a machine, from the spec of the model: formulas, no
measurement.

Prefill is bound by arithmetic: every token once through all layers, only the last of a prompt
through the head. A decode step is bound by the larger of two: reading the weights once and the K/V
of its requests, or its arithmetic.
"""

from __future__ import annotations

import math

import msgspec

from quire.models import kv_bytes_per_token
from quire.models.figures import active_parameters, flops_per_token, num_parameters
from quire.models.parameters import parameters
from quire.models.spec import Decoder


class Workload(msgspec.Struct, frozen=True):
    """`num_requests` of `input_len` + `output_len` tokens each, of which `max_num_seqs` run
    together.
    """

    num_requests: int
    input_len: int
    output_len: int
    max_num_seqs: int


def least_seconds(
    decoder: Decoder, work: Workload, itemsize: int, read_bytes_per_s: float, flops_per_s: float
) -> float:
    """Time below which the workload cannot end on a machine with these two limits."""
    together = min(work.num_requests, work.max_num_seqs)
    waves = work.num_requests / together
    prefill = work.num_requests * prefill_flops(decoder, work.input_len) / flops_per_s
    decode = sum(
        max(
            step_bytes(decoder, together, context, itemsize) / read_bytes_per_s,
            together * flops_per_token(decoder, context) / flops_per_s,
        )
        for context in range(work.input_len + 1, work.input_len + work.output_len)
    )
    return prefill + waves * decode


def prefill_flops(decoder: Decoder, length: int) -> float:
    """Operations of one prompt: a token sees half of it on average, and the head runs once."""
    head = 2 * decoder.vocab * decoder.dim
    body = flops_per_token(decoder, length // 2) - head
    return length * body + head


def step_bytes(decoder: Decoder, num_rows: int, context: int, itemsize: int) -> float:
    """Bytes that a decode step reads: the weights that its rows use, once, and their K/V."""
    return itemsize * _weights_read(decoder, num_rows) + num_rows * context * kv_bytes_per_token(
        decoder, itemsize
    )


def _weights_read(decoder: Decoder, num_rows: int) -> float:
    """Weights that some row uses. Of the experts, each is chosen by a row with equal chance."""
    active = active_parameters(decoder)
    embedding = 0 if decoder.tie else parameters(decoder)["embed.weight"].size
    whole = num_parameters(decoder) - embedding
    if active >= whole:
        return active
    experts, top_k = _experts(decoder)
    used = experts * (1 - math.pow(1 - top_k / experts, num_rows))
    return active + (whole - active) * (used - top_k) / (experts - top_k)


def _experts(decoder: Decoder) -> tuple[int, int]:
    from quire.models.spec import Moe

    return next(
        (block.mlp.experts, block.mlp.top_k)
        for block in decoder.blocks
        if isinstance(block.mlp, Moe) and block.mlp.experts > block.mlp.top_k
    )
