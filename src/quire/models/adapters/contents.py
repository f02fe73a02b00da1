"""Sorts the tensors of an adapter's file by what they change in a model, by their names alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.errors import BadAdapter
from quire.models.adapters.targets import AdapterTargets, leaf_of
from quire.models.loading.matching import listed
from quire.models.rules import StoredTensor

_PREFIX = "base_model.model."
_PAIR = re.compile(
    r"(?P<module>.+)\.(?:lora_(?P<linear>[AB])\.weight|lora_embedding_(?P<table>[AB]))"
)
_WRAPPED = ".base_layer"
_LONGEST_NAME = 512
_NOT_SUPPORTED = (
    (r".+\.lora_magnitude_vector(\..+)?", "DoRA is not supported"),
    (r".+\.lora_[AB]\.bias", "an adapter with biases is not supported"),
    (r".+\.lora_.+\.\w+(\.weight)?", "a state of training; save_pretrained writes adapters"),
    (r".+\.token_adapter\..+", "rows of an embedding that are trained alone are not supported"),
)
"""Names that are known, and why they are refused."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The two tensors of an adapted module, by their names in the file. `module` is its name in the
    model that was trained; `is_table`: it is an embedding, a [r, V] and b [C, r].
    """

    module: str
    a: str
    b: str
    is_table: bool


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of a file: linear modules and embeddings; by module, parameters of all experts, the
    one that was wrapped first in front; and tensors of the pooling head, by name in the file.
    """

    linear: list[tuple[Pair, StoredTensor]] = field(default_factory=list)
    stacked: dict[str, list[Pair]] = field(default_factory=dict)
    head: dict[str, StoredTensor] = field(default_factory=dict)


def sort_tensors(
    shapes: Mapping[str, tuple[int, ...]], model: AdapterTargets, saved_modules: Sequence[str] = ()
) -> Contents:
    """Sort a file's tensors. Raises BadAdapter for names that the model or this release does not
    have, for a file that changes nothing, and for one without a module of the model that the config
    says was saved whole.
    """
    contents, halves, unknown = Contents(), dict[tuple[str, bool], dict[str, str]](), list[str]()
    for name, shape in shapes.items():
        if len(name) > _LONGEST_NAME:
            raise BadAdapter(f"The adapter has a tensor with a name of {len(name)} characters.")
        bare = name.removeprefix(_PREFIX)
        if found := _PAIR.fullmatch(bare):
            half, is_table = found["linear"] or found["table"], found["table"] is not None
            halves.setdefault((found["module"], is_table), {})[half] = name
        elif (head := model.head(bare.replace(".modules_to_save.", "."))) is not None:
            contents.head[name] = head
        elif not _is_copy_of_table(bare, shape, model):
            unknown.append(name)
    for (module, is_table), names in halves.items():
        pair = _pair(module, is_table, names)
        inner, depth = _unwrapped(module)
        stored = model.module(module)
        if stored is not None:
            contents.linear.append((pair, stored))
        elif model.stack(inner):
            contents.stacked.setdefault(inner, []).append(pair)
        else:
            unknown.append(pair.a)
    for pairs in contents.stacked.values():
        # the innermost first: PEFT wraps the module once for each parameter, in their order
        pairs.sort(key=lambda pair: -_unwrapped(pair.module)[1])
    if unknown:
        raise BadAdapter(_refusal(unknown, model))
    if not halves and not contents.head:
        raise BadAdapter("The adapter has no tensors.")
    _check_heads_are_whole(contents.head, model)
    heads = _modules(stored.name for stored in contents.head.values())
    for module in saved_modules:
        if model.module(module) is not None or module in _modules(model.head_names) - heads:
            raise BadAdapter(f"modules_to_save names {module[:200]}, which the adapter lacks.")
    return contents


def _modules(names: Iterable[str]) -> set[str]:
    return {name.rpartition(".")[0] for name in names}


def _check_heads_are_whole(head: Mapping[str, StoredTensor], model: AdapterTargets) -> None:
    """Raise BadAdapter for a module of the pooling head of which only a part is replaced."""
    given = {stored.name for stored in head.values()}
    for name, stored in head.items():
        module = stored.name.rpartition(".")[0]
        missing = [n for n in model.head_names if n.rpartition(".")[0] == module and n not in given]
        if missing:
            raise BadAdapter(
                f"The adapter has {name} without {missing[0]}, which this model needs."
            )


def _pair(module: str, is_table: bool, names: Mapping[str, str]) -> Pair:
    if len(names) != 2:
        there = next(iter(names.values()))
        raise BadAdapter(f"The adapter has {there} without its other half.")
    return Pair(module, names["A"], names["B"], is_table)


def _unwrapped(module: str) -> tuple[str, int]:
    """The module within wrappers, and how many there are."""
    depth = 0
    while module.endswith(_WRAPPED):
        module, depth = module.removesuffix(_WRAPPED), depth + 1
    return module, depth


def _is_copy_of_table(name: str, shape: tuple[int, ...], model: AdapterTargets) -> bool:
    """Whether it is the model's own embedding or head, which PEFT saves with their adapters. Raises
    BadAdapter for one of another vocabulary.
    """
    end = _WRAPPED + ".weight"
    stored = model.module(name.removesuffix(end)) if name.endswith(end) else None
    if stored is None or leaf_of(stored.leaves[0]) not in ("embed", "head"):
        return False
    if shape != stored.shape:
        raise BadAdapter(
            f"The adapter was made for another vocabulary: {name} is {list(shape)}, and this model "
            f"has {list(stored.shape)}."
        )
    return True


def _refusal(names: list[str], model: AdapterTargets) -> str:
    for name in names:
        for pattern, why in _NOT_SUPPORTED:
            if re.fullmatch(pattern, name.removeprefix(_PREFIX)) and not _PAIR.fullmatch(name):
                return f"The adapter has {name[:200]}: {why}."
        stored = model.module(name.removeprefix(_PREFIX).removesuffix(".weight"))
        if stored is not None:
            return (
                f"The adapter has {name[:200]}, a whole weight: modules_to_save may only name "
                "classifiers of models that classify."
            )
    shown = [name[:200] for name in names]
    return f"The adapter changes what this model does not have: {listed(shown)}."
