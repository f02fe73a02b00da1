"""Costs of a spec per token: parameters, arithmetic and traffic, the same for all families."""

from __future__ import annotations

import math
from collections.abc import Iterable

from quire.models.formats.rounding_rules import (
    BITS_PER_WEIGHT,
    HEAD_BITS,
    RoundingRules,
    kind_of,
)
from quire.models.formats.storage import Storage
from quire.models.parameters import num_parameters, num_repeated_parameters, outer_parameters
from quire.models.rules import Family, StoredTensor, tensor_map
from quire.models.spec import Block, Decoder, single_mixers

__all__ = [
    "active_parameters",
    "coded_tensors",
    "flops_per_token",
    "num_parameters",
    "size_in_codes",
    "size_rounded",
]


def active_parameters(decoder: Decoder) -> int:
    """The number of weights that one token is multiplied with: only the chosen ones of E experts,
    with the head but without the embedding.
    """
    idle = sum(_idle_expert_weights(block, decoder.dim) for block in decoder.blocks)
    embedding = 0 if decoder.tie else outer_parameters(decoder)["embed.weight"].size
    return num_parameters(decoder) - embedding - table_parameters(decoder) - idle


def table_parameters(decoder: Decoder) -> int:
    """The number of weights of which a token looks up a row, apart from the embedding's."""
    leaves = outer_parameters(decoder)
    tables = (leaves.get(name) for name in ("positions.weight", "inputs.embed.weight"))
    return sum(0 if leaf is None else leaf.size for leaf in tables)


def flops_per_token(decoder: Decoder, context: int = 0) -> int:
    """Multiplications and additions for a new token that sees `context` tokens in full layers."""
    weights = active_parameters(decoder) + num_repeated_parameters(decoder)
    mixers = (mixer for block in decoder.blocks for mixer in single_mixers(block.mixer))
    return 2 * weights + sum(mixer.flops(context) for mixer in mixers)


def coded_tensors(family: Family, decoder: Decoder, storage: Storage) -> list[StoredTensor]:
    """The tensors stored as codes; those of layers alone where the config does not say."""
    stored = [tensor.in_codes(storage) for tensor in tensor_map(family, decoder)]
    return [t for t in stored if t.layout is not None and not _is_left_to_files(t, storage)]


def size_in_codes(coded: Iterable[StoredTensor]) -> tuple[int, int]:
    """Number of weights in these tensors of codes, and their bytes with scales and zero points."""
    count = num_bytes = 0
    for tensor in coded:
        assert tensor.layout is not None, "the tensor is stored as it is"
        count += sum(leaf.size for leaf in tensor.leaves)
        *rows, inputs = tensor.shape
        num_bytes += tensor.layout.num_bytes(math.prod(rows), inputs)
    return count, num_bytes


def size_rounded(family: Family, decoder: Decoder, rules: RoundingRules) -> tuple[int, int]:
    """Number of weights that these rules round while they are loaded, and their bytes."""
    scheme_of = rules.scheme_finder()
    count, bits = 0, 0.0
    for tensor in tensor_map(family, decoder):
        for leaf in tensor.leaves:
            kind = kind_of(leaf.name) if leaf.is_linear else None
            scheme = None if kind is None else scheme_of(kind, tensor.module)
            if scheme is not None:
                count += leaf.size
                bits += leaf.size * (HEAD_BITS if kind == "head" else BITS_PER_WEIGHT[scheme])
    if decoder.tie and scheme_of("head", "lm_head") is not None:
        bits += decoder.vocab * decoder.dim * HEAD_BITS  # a matrix of its own next to the table
    return count, int(bits / 8)


def _is_left_to_files(tensor: StoredTensor, storage: Storage) -> bool:
    in_layer = all(leaf.name.startswith("layers.") for leaf in tensor.leaves)
    return tensor.is_router or (storage.is_decided_by_files and not in_layer)


def _idle_expert_weights(block: Block, dim: int) -> int:
    moe = block.experts
    if moe is None:
        return 0
    inner = moe.width * (1 + moe.gated)
    biases = (inner + dim) * moe.bias
    return (moe.experts - moe.top_k) * ((inner + moe.width) * dim + biases)
