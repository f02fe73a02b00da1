"""Reads the folder of a LoRA adapter and checks it against a model: names, shapes, ranks, values.

What names and shapes can say is checked before a value is read. The tensors that are returned are
copies: a folder that changes under a running engine changes nothing in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from quire.errors import BadAdapter
from quire.models.adapters.contents import Contents, Pair, sort_tensors
from quire.models.adapters.peft_config import PeftConfig, read_peft_config
from quire.models.adapters.stacks import Stack, is_exchanged, split_experts, stacks_of
from quire.models.adapters.targets import AdapterTargets, leaf_of
from quire.models.adapters.tensor_files import TensorFile, open_tensors
from quire.models.adapters.weights import AdapterWeights, LowRank
from quire.models.loading.transforms import to_leaves
from quire.models.rules import StoredTensor

Changed = TypeVar("Changed", LowRank, Tensor)


def read_adapter(
    folder: Path, model: AdapterTargets, *, max_rank: int, dtype: torch.dtype
) -> AdapterWeights:
    """The adapter that PEFT wrote into a folder, for the model, with ranks of at most `max_rank`;
    a and b of its products in `dtype`, tensors of a head in fp32. Reads files and nothing else, so
    that any thread may call it.

    Raises AdapterNotFound or another BadAdapter; its one sentence names the file, key or tensor.
    """
    config = read_peft_config(folder)
    with open_tensors(folder) as file:
        contents = sort_tensors(file.shapes, model, config.saved_modules)
        reader = _Reader(file, config, model, max_rank, dtype)
        products = _once(reader.products(contents))
        head = _once(reader.head(contents.head))
    if config.keeps_tied and model.is_tied and ("embed" in products) != ("head" in products):
        raise BadAdapter(
            "The adapter keeps embedding and head tied (ensure_weight_tying), but has the tensors "
            "of only one of them; load and save it with a newer version of PEFT."
        )
    return AdapterWeights(products, head, _digest(products, head))


def check_adapter(folder: Path, model: AdapterTargets, *, max_rank: int) -> None:
    """Raise what `read_adapter` raises for reasons other than values, of which none is read; a file
    of torch.save is read as a whole.
    """
    config = read_peft_config(folder)
    with open_tensors(folder) as file:
        contents = sort_tensors(file.shapes, model, config.saved_modules)
        _Reader(file, config, model, max_rank, torch.float32).check(contents)


class _Reader:
    """Reads the tensors of one file as the config and the model say."""

    def __init__(
        self,
        file: TensorFile,
        config: PeftConfig,
        model: AdapterTargets,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        self._file, self._config, self._model = file, config, model
        self._max_rank, self._dtype = max_rank, dtype

    def check(self, contents: Contents) -> list[tuple[Stack, bool]]:
        """Check shapes and ranks -> the stacks of experts, and whether a and b are exchanged."""
        stacks = list(stacks_of(contents.stacked, self._model, self._config))
        for pair, stored in contents.linear:
            self._check_linear(pair, stored)
        for name, stored in contents.head.items():
            self._check_shape(name, stored.shape)
        return [(stack, self._check_stack(stack)) for stack in stacks]

    def products(self, contents: Contents) -> Iterator[tuple[str, LowRank]]:
        stacks = self.check(contents)
        for pair, stored in contents.linear:
            yield from self._linear(pair, stored)
        for stack, is_swapped in stacks:
            yield from self._stack(stack, is_swapped)

    def head(self, names: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
        """Each leaf of the pooling head that is replaced, by name; after `products`."""
        for name, stored in names.items():
            values = self._finite(name, self._file.read(name), torch.float32)
            for leaf, part in zip(stored.leaves, to_leaves(stored, values), strict=True):
                yield leaf.name, part.contiguous()

    def _linear(self, pair: Pair, stored: StoredTensor) -> Iterator[tuple[str, LowRank]]:
        a, b = self._file.read(pair.a).float(), self._file.read(pair.b).float()
        if pair.is_table:  # the leaf is [V, C]
            a, b = b.T, a.T
        # in float32, and rounded once, with all factors in it
        scaled = b * self._config.scaling_of(pair.module)
        a = self._finite(pair.a, a, self._dtype)
        for leaf, part in zip(stored.leaves, to_leaves(_of_rows(stored), scaled), strict=True):
            b = self._finite(pair.b, part * leaf.scale, self._dtype)
            yield leaf_of(leaf), LowRank(a, b)

    def _stack(self, stack: Stack, is_swapped: bool) -> Iterator[tuple[str, LowRank]]:
        pair, stored = stack.pair, stack.stored
        a, b = self._file.read(pair.a).float(), self._file.read(pair.b).float()
        each_a, each_b = split_experts(a, b, stack.experts, is_swapped)
        parts = to_leaves(_of_rows(stored), each_b * self._config.scaling_of(stack.name))
        for i, (leaf, part) in enumerate(zip(stored.leaves, parts, strict=True)):
            own_a = self._finite(pair.a, each_a[i % stack.experts], self._dtype)
            b = self._finite(pair.b, part * leaf.scale, self._dtype)
            yield leaf_of(leaf), LowRank(own_a, b)

    def _check_linear(self, pair: Pair, stored: StoredTensor) -> None:
        rank = self._checked_rank(pair.module)
        rows, inputs = sum(leaf.shape[0] for leaf in stored.leaves), stored.leaves[0].shape[1]
        if pair.is_table:
            rows, inputs = inputs, rows
        self._check_shape(pair.a, (rank, inputs))
        self._check_shape(pair.b, (rows, rank))
        self._check_leaves(pair.a, stored)

    def _check_stack(self, stack: Stack) -> bool:
        """Whether its a and b are exchanged."""
        shapes, pair = self._file.shapes, stack.pair
        rank = self._checked_rank(stack.name)
        self._check_leaves(pair.a, stack.stored)
        return is_exchanged(stack, shapes[pair.a], shapes[pair.b], rank, self._config)

    def _checked_rank(self, module: str) -> int:
        rank = self._config.rank_of(module)
        if rank > self._max_rank:
            raise BadAdapter(
                f"LoRA rank {rank} is greater than max_lora_rank {self._max_rank}, with which the "
                "engine was started."
            )
        return rank

    def _check_shape(self, name: str, needed: tuple[int, ...]) -> None:
        shape = self._file.shapes[name]
        if shape != needed:
            raise BadAdapter(f"{name} is {list(shape)}, and this model needs {list(needed)}.")

    def _check_leaves(self, name: str, stored: StoredTensor) -> None:
        if not all(leaf_of(leaf) in self._model.leaves for leaf in stored.leaves):
            raise BadAdapter(
                f"The adapter has {name}, which is not among the modules that lora_target_modules "
                "allows."
            )

    def _finite(self, name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A contiguous copy in a dtype, of which every value is a number."""
        found = values.to(dtype).contiguous()
        if not _are_finite(found):
            what = f"what is not in {dtype}" if _are_finite(values) else "NaN or infinity"
            raise BadAdapter(f"{name} holds {what}.")
        return found


def _once(changes: Iterator[tuple[str, Changed]]) -> dict[str, Changed]:
    found: dict[str, Changed] = {}
    for leaf, change in changes:
        if leaf in found:
            raise BadAdapter(f"The adapter changes {leaf} twice, under different names.")
        found[leaf] = change
    return found


def _of_rows(stored: StoredTensor) -> StoredTensor:
    """The division of a tensor's outputs: the first axis of b however the tensor is stored."""
    return replace(stored, steps=tuple(step for step in stored.steps if step != "transpose"))


def _are_finite(values: Tensor) -> bool:
    """Whether no value is NaN, which the smallest and the largest would be, or infinite."""
    return all(bound.isfinite().item() for bound in torch.aminmax(values))


def _digest(products: Mapping[str, LowRank], head: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of names, types, shapes and values."""
    parts = {f"{name}.a": low.a for name, low in products.items()}
    parts |= {f"{name}.b": low.b for name, low in products.items()}
    digest = sha256()
    for name, tensor in sorted({**parts, **head}.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.digest()
