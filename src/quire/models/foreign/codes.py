"""Linear layers of a model of transformers whose weights a checkpoint stores in codes.

transformers builds them without weights and loads the rest; the codes are read by Quire, and
multiplied with as they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import LoadError, WeightMismatch
from quire.models.foreign.coded_layer import CodedLinearLayer
from quire.models.foreign.spec import ForeignDecoder, ForeignLinear
from quire.models.formats.storage import CodeLayout, Storage, StoredPart
from quire.models.loading.codes.code_layouts import coded_weight
from quire.models.loading.codes.widened_codes import widened_weight
from quire.models.loading.matching import listed
from quire.models.loading.readers.checkpoint_files import CheckpointFiles
from quire.ops import CodedWeight


@dataclass(frozen=True, slots=True)
class CodedModule:
    """A linear layer in codes: its sizes, and where its tensors are in the files."""

    linear: ForeignLinear
    layout: CodeLayout
    stored_at: str

    @property
    def parts(self) -> Mapping[str, StoredPart]:
        """Its tensors by their names in the files."""
        found = self.layout.parts(self.linear.outputs, self.linear.inputs)
        return {f"{self.stored_at}.{name}": part for name, part in found.items()}

    def read(self, files: CheckpointFiles) -> CodedWeight | Tensor:
        """The weight, as views of the files; a tensor [out, in] where it becomes plain numbers."""
        parts = {
            name.removeprefix(self.stored_at + "."): files.read(name).contiguous()
            for name in self.parts
            if name in files.entries
        }
        inputs = self.linear.inputs
        if self.layout.is_widened:
            return widened_weight(self.layout, self.linear.name, parts, inputs)
        return coded_weight(self.layout, self.linear.name, parts, inputs)


def find_coded(
    spec: ForeignDecoder, storage: Storage | None, files: CheckpointFiles
) -> tuple[CodedModule, ...]:
    """The linear layers that the files have in codes. Raises WeightMismatch where config.json says
    something else, or their tensors do not fit.
    """
    if storage is None:
        check_types(files, ())
        return ()
    found = tuple(_found(spec, storage, files))
    wrong = [
        f"{name} {list(files.entries[name].shape)} instead of {list(part.shape)}"
        for module in found
        for name, part in module.parts.items()
        if name in files.entries and not part.has_shape(files.entries[name].shape)
    ]
    missing = [
        name
        for module in found
        for name, part in module.parts.items()
        if name not in files.entries and not part.is_optional
    ]
    check_types(files, found)
    problems = [f"{word} {listed(names)}" for word, names in _named(missing, wrong) if names]
    if problems:
        raise WeightMismatch("The checkpoint does not fit the model: " + "; ".join(problems) + ".")
    return found


def check_types(files: CheckpointFiles, modules: tuple[CodedModule, ...]) -> None:
    """Raise LoadError for other tensors in 8-bit floats: transformers would take these numbers for
    the weights.
    """
    in_codes = {name for module in modules for name in module.parts}
    others = [
        name
        for name, entry in files.entries.items()
        if entry.dtype.startswith("F8") and name not in in_codes
    ]
    if others:
        raise LoadError(
            f"{listed(others)}: stored in 8-bit floats, but not a linear layer's weight with "
            "scales that config.json describes (quantization_config)."
        )


def _named(missing: list[str], wrong: list[str]) -> tuple[tuple[str, list[str]], ...]:
    return ("missing", missing), ("wrong shape", wrong)


def _found(spec: ForeignDecoder, storage: Storage, files: CheckpointFiles) -> Iterator[CodedModule]:
    for linear in spec.linears:
        at = _name_in(files, linear.name)
        layout = storage.layout_of(at)
        if layout is None:
            continue
        has_codes = f"{at}.{layout.marker}" in files.entries
        if has_codes or not storage.is_decided_by_files:
            yield CodedModule(linear, layout, at)


def _name_in(files: CheckpointFiles, name: str) -> str:
    """The name that the files have for a module: a checkpoint of the layers alone lacks the name of
    their wrapper.
    """
    bare = name.partition(".")[2]
    for at in (name, bare):
        if any(f"{at}.{end}" in files.entries for end in _ENDS):
            return at
    return name


_ENDS = ("weight", "qweight", "weight_packed")
"""A tensor that a linear layer has in each of the formats."""


def without_weights(kind: Any, modules: tuple[CodedModule, ...]) -> Any:
    """A class of transformers whose layers in codes have no weights."""

    def build(self: Any, *inputs: Any, **named: Any) -> None:
        kind.__init__(self, *inputs, **named)
        for module in modules:
            name = module.linear.name
            self.set_submodule(name, CodedLinearLayer(self.get_submodule(name)))

    return type(kind.__name__, (kind,), {"__init__": build, "__module__": kind.__module__})


def fill(
    model: Any,
    modules: tuple[CodedModule, ...],
    files: CheckpointFiles,
    opened: tuple[str, ...],
    device: torch.device,
) -> None:
    """Read the codes into a model that was built without them. Layers whose weight the model's code
    reads by itself (`opened`) get it as plain numbers.
    """
    for module in modules:
        name, weight = module.linear.name, module.read(files)
        layer = model.get_submodule(name)
        if isinstance(weight, CodedWeight) and name not in opened:
            codes = weight.each(lambda part: part.to(device, copy=True))
            order = None if codes.order is None else codes.order.to(device)
            layer.codes = replace(codes, order=order)
        else:
            wide = weight.widened() if isinstance(weight, CodedWeight) else weight
            model.set_submodule(name, _plain(layer, wide.to(device, model.dtype)))


def _plain(layer: CodedLinearLayer, weight: Tensor) -> nn.Linear:
    with torch.device("meta"):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = layer.bias
    return plain
