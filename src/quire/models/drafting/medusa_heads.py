"""Medusa heads (Cai et al. 2024): head j guesses the token j + 2 after the one whose hidden state
it reads, by residual blocks x + silu(W @ x) and a product with the vocabulary of its own.

Files name the parts as vLLM's do (`blocks.0.layers.0.weight`, `lm_heads.0.weight`) or as the
authors' (`0.0.linear.weight`, and the number of blocks in place of a name, `0.1.weight`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import LoadError, WeightMismatch
from quire.models.drafting.medusa import MedusaSpec
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.load_formats import WeightFiles, open_files
from quire.models.loading.matching import listed
from quire.models.loading.model_parts import tensors_within
from quire.models.spec import Decoder
from quire.ops import LinearWeight, Ops

_PREFIX = "medusa_heads."


class MedusaHeads:
    """The heads with their weights. `token_ids` [V'] int64: the target's ids; None: the same."""

    def __init__(
        self,
        ops: Ops,
        blocks: Sequence[Sequence[LinearWeight]],
        heads: Sequence[LinearWeight],
        token_ids: Tensor | None,
    ) -> None:
        self._ops = ops
        self._blocks, self._heads = blocks, heads
        self.token_ids = token_ids

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """Scores of a head for hidden [R, C], as the target's head reads it -> fp32 [R, V']."""
        ops = self._ops
        for block in self._blocks[head]:
            hidden = ops.add(hidden, ops.hidden(hidden, block, "silu", False))
        return ops.logits(hidden, self._heads[head])

    def weight_tensors(self) -> Iterator[Tensor]:
        return tensors_within([self._blocks, self._heads])

    def release_weights(self) -> None:
        self._blocks, self._heads = [], []

    def take_weights(self, other: MedusaHeads) -> None:
        self._blocks, self._heads = other._blocks, other._heads
        self.token_ids = other.token_ids


def load_medusa(
    folder: Path,
    spec: MedusaSpec,
    target: Decoder,
    ops: Ops,
    *,
    load_format: LoadFormat,
    dtype: torch.dtype,
    device: torch.device,
) -> MedusaHeads:
    """Read the heads. Raises WeightMismatch for other tensors, LoadError for unknown ids."""
    with closing(open_files(load_format, folder, target)) as files:
        # only vLLM's layout has a key for biases; files of the authors show them by their tensors
        has_bias = spec.bias or any(name.endswith(".bias") for name in files.entries)
        spec = replace(spec, bias=has_bias)
        stored = _stored_names(spec, target, files)

        def read(name: str, kind: torch.dtype = dtype) -> Tensor:
            return files.read(stored[name]).to(device, kind, copy=True)

        blocks = [[_pack(ops, read, spec, h, b) for b in range(spec.blocks)] for h in _heads(spec)]
        ids = read("token_map", torch.int64) if "token_map" in stored else None
        if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= target.vocab):
            raise LoadError(f"{folder}: token_map has ids that the target does not have.")
        heads = [
            ops.pack_linear(_rows(read(f"lm_heads.{h}.weight"), ids), None, None)
            for h in ([0] if spec.has_one_head else _heads(spec))
        ]
    # one product serves all heads where they share it
    return MedusaHeads(ops, blocks, heads * (spec.heads if spec.has_one_head else 1), ids)


def _heads(spec: MedusaSpec) -> range:
    return range(spec.heads)


def _rows(head: Tensor, ids: Tensor | None) -> Tensor:
    """The rows of a head over all ids that are used."""
    return head if ids is None or len(ids) == len(head) else head[ids]


def _pack(ops: Ops, read: Any, spec: MedusaSpec, head: int, block: int) -> LinearWeight:
    at = f"blocks.{head}.layers.{block}."
    bias = read(at + "bias") if spec.bias else None
    return ops.pack_linear(read(at + "weight"), bias, None)


def _stored_names(spec: MedusaSpec, target: Decoder, files: WeightFiles) -> dict[str, str]:
    """The name that each tensor has in the files."""
    found = {_canonical(name, spec): name for name in files.entries}
    shapes = _shapes(spec, target)
    wrong = [n for n in shapes if n in found and not _fits(files, found[n], shapes[n], target)]
    missing = [n for n in shapes if n not in found]
    unknown = [found[n] for n in sorted(found) if n not in shapes]
    problems = {"missing": missing, "unknown": unknown, "wrong shape": wrong}
    if any(problems.values()):
        said = "; ".join(f"{what} {listed(names)}" for what, names in problems.items() if names)
        raise WeightMismatch(f"The checkpoint does not fit the Medusa heads: {said}.")
    return found


def _shapes(spec: MedusaSpec, target: Decoder) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for head in _heads(spec):
        for block in range(spec.blocks):
            at = f"blocks.{head}.layers.{block}."
            shapes[at + "weight"] = (target.dim, target.dim)
            if spec.bias:
                shapes[at + "bias"] = (target.dim,)
        if head == 0 or not spec.has_one_head:
            shapes[f"lm_heads.{head}.weight"] = (spec.vocab, target.dim)
    if spec.vocab < target.vocab:
        shapes["token_map"] = (spec.vocab,)
    return shapes


def _fits(files: WeightFiles, name: str, shape: tuple[int, ...], target: Decoder) -> bool:
    """Whether a tensor has a shape; a head may have the rows of all ids."""
    stored = files.entries[name].shape
    is_whole = name != "token_map" and stored[:1] == (target.vocab,)
    return stored == shape or (is_whole and stored[1:] == shape[1:] and len(shape) == 2)


def _canonical(name: str, spec: MedusaSpec) -> str:
    """The name as vLLM has it."""
    name = name.removeprefix(_PREFIX)
    if name == "lm_head.weight":
        return "lm_heads.0.weight"
    head, _, rest = name.partition(".")
    if not head.isdecimal():
        return name
    block, _, leaf = rest.partition(".")
    if block == str(spec.blocks):
        return f"lm_heads.{head}.{leaf}"
    return f"blocks.{head}.layers.{block}.{leaf.removeprefix('linear.')}"
