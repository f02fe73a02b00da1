"""Weights of a checkpoint that can be packed before the loader asks for them. Free of torch.

This follows the loader (models/assembly.py) where weights are the rows of a file's tensors as they
are; a weight that the loader makes in another way, or not at all, is never taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from quire.hardware.packed_ahead import PackedBlock, PackedPart, PackedRows, PackingPlan, part_key
from quire.models.loading.ahead.headers import PlacedTensor, Sources, placed_tensors
from quire.models.loading.products import product_of
from quire.models.parameters import Parameter, parameters
from quire.models.rules import Family, tensor_map
from quire.models.spec import Attention, Block, Decoder, Mlp, Moe

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Type of a model's weights -> its name in safetensors files."""
_LEAST_VALUES = 1 << 17
"""Smaller weights are packed by the loader in no time."""


def packing_plan(
    folder: Path, decoder: Decoder, family: Family, dtype: str, *, level: str, num_threads: int
) -> PackingPlan | None:
    """A folder's weights in load order, in a dtype, for a level of the kernels; None: none."""
    tensors = placed_tensors(folder)
    places: dict[str, PlacedTensor] = {}
    for stored in tensor_map(family, decoder) if tensors else ():
        placed = tensors.get(stored.name)
        if placed is None or placed.dtype != _DTYPES[dtype] or placed.shape != stored.shape:
            continue
        if (leaf := stored.sole_leaf) is not None:
            places[leaf.name] = placed
    files: list[Path] = []
    blocks, name_of = [], Sources()
    for weights in _weights(decoder):
        if all(leaf.name in places for leaves, _ in weights for leaf in leaves):
            parts = [
                _part(leaves, gated, places, files, dtype, name_of) for leaves, gated in weights
            ]
            blocks.append(PackedBlock(parts))
    if not blocks:
        return None
    return PackingPlan(
        dtype=dtype,
        level=level,
        num_threads=num_threads,
        files=[str(file) for file in files],
        blocks=blocks,
    )


_Weight = tuple[Sequence[Parameter], bool]
"""The leaves of a weight, one above the other, and whether it is gated."""


def _weights(decoder: Decoder) -> Iterator[list[_Weight]]:
    """The weights that one piece of memory has, in load order."""
    for key, run in groupby(parameters(decoder).values(), lambda leaf: _product(decoder, leaf)):
        leaves = [leaf for leaf in run if leaf.name.endswith(".weight")]
        if key is None or sum(leaf.size for leaf in leaves) < _LEAST_VALUES:
            continue
        if not key.endswith("experts"):
            yield [(leaves, _is_gated(leaves))]
            continue
        weights: list[_Weight] = []
        for _, own in groupby(
            leaves, lambda leaf: leaf.name.rpartition(".experts.")[2].split(".")[0]
        ):
            *up, down = own
            weights += [(up, _is_gated(up)), ([down], False)]
        yield weights


def _product(decoder: Decoder, leaf: Parameter) -> str | None:
    """The product that a leaf is a part of; None: it is not packed as it is stored."""
    if leaf.name == "embed.weight":
        # a table that is only looked up is never packed
        is_table = decoder.tie and decoder.generates and decoder.pooler is None
        return "embed" if is_table else None
    if leaf.name == "head.weight":
        return "head" if decoder.pooler is None else None
    parts = leaf.name.split(".")
    if parts[0] != "layers" or leaf.kind not in ("matrix", "bias"):
        return None
    block = decoder.blocks[int(parts[1]) - decoder.first_layer]
    product = product_of(leaf.name)
    if product in _products_as_stored(block):
        return f"{parts[1]}.{product}"
    return None


def _products_as_stored(block: Block) -> tuple[str, ...]:
    """The products of a layer that are rows of the files, and nothing else."""
    mixer: tuple[str, ...] = ()
    match block.mixer:
        case Attention(shares=None, value_dim=None, values_are_keys=False):
            mixer = ("attn.qkv", "attn.o")
    match block.mlp:
        case Mlp():
            return (*mixer, "mlp.up", "mlp.down")
        case Moe(latent=None):
            return (*mixer, "mlp.experts")
    return mixer


def _is_gated(leaves: Sequence[Parameter]) -> bool:
    return [leaf.name.split(".")[-2] for leaf in leaves] == ["gate", "up"]


def _part(
    leaves: Sequence[Parameter],
    gated: bool,
    places: Mapping[str, PlacedTensor],
    files: list[Path],
    dtype: str,
    name_of: Sources,
) -> PackedPart:
    rows, first, sources = [], 0, []
    for leaf in leaves:
        placed = places[leaf.name]
        if placed.file not in files:
            files.append(placed.file)
        count = leaf.shape[0]
        rows.append(PackedRows(files.index(placed.file), placed.at, first, count))
        sources.append(name_of(placed.file, placed.name))
        first += count
    return PackedPart(part_key(dtype, gated, sources), leaves[0].shape[1], first, gated, rows)
