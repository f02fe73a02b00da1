"""Linear layers and experts of a model of transformers whose weights a checkpoint stores in codes.

transformers builds them without weights and loads the rest; the codes are read by Quire, and
multiplied with as they are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.errors import LoadError, WeightMismatch
from quire.models.foreign.coded_layer import CodedExpertsLayer, CodedLinearLayer
from quire.models.foreign.spec import ForeignDecoder, ForeignExperts, ForeignLinear
from quire.models.formats.storage import FLOATS, CodeLayout, Storage, StoredPart
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
    expert: int | None = None
    """The number of the expert whose product it is."""

    @property
    def parts(self) -> Mapping[str, StoredPart]:
        """The module's tensors, by their names in the files."""
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
    spec: ForeignDecoder,
    storage: Storage | None,
    files: CheckpointFiles,
    renamed: Callable[[str], str] = str,
) -> tuple[CodedModule, ...]:
    """The linear layers, and the products of each expert, that the files have in codes. Raises
    WeightMismatch where config.json says something else, or their tensors do not fit, LoadError for
    experts that files have in another way. `renamed`: from names in files to transformers'.
    """
    if storage is None:
        check_types(files, ())
        return ()
    modules = {renamed(name).rpartition(".")[0]: name.rpartition(".")[0] for name in files.entries}
    found = tuple(_found(spec, storage, files, modules))
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
    named = ("missing", missing), ("wrong shape", wrong)
    problems = [f"{word} {listed(names)}" for word, names in named if names]
    if problems:
        raise WeightMismatch("The checkpoint does not fit the model: " + "; ".join(problems) + ".")
    return found


def check_types(files: CheckpointFiles, modules: tuple[CodedModule, ...]) -> None:
    """Raise LoadError for other 8-bit floats: transformers would take them for the weights."""
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


def _found(
    spec: ForeignDecoder, storage: Storage, files: CheckpointFiles, modules: Mapping[str, str]
) -> Iterator[CodedModule]:
    """`modules`: names in files by those of transformers."""
    for linear in spec.linears:
        at = _name_in(files, linear.name)
        if not _has(files, at):
            at = modules.get(linear.name, at)
        layout = storage.layout_of(at)
        if layout is None:
            continue
        has_codes = f"{at}.{layout.marker}" in files.entries
        if has_codes or not storage.is_decided_by_files:
            yield CodedModule(linear, layout, at)
    for experts in spec.experts:
        yield from _found_experts(experts, storage, files)


def _found_experts(
    experts: ForeignExperts, storage: Storage, files: CheckpointFiles
) -> Iterator[CodedModule]:
    """The products of experts, whose files have tensors of their own for each."""
    into, back = (experts.width, experts.dim), (experts.dim, experts.width)
    for gate, up, down in _EXPERT_NAMES:
        sizes = {gate: into, up: into, down: back} if experts.is_gated else {up: into, down: back}
        places = [(number, part) for number in range(experts.count) for part in sizes]
        names = {f"{experts.name}.{number}.{part}": (number, part) for number, part in places}
        layouts = {name: storage.layout_of(name) for name in names}
        coded = [n for n, at in layouts.items() if at and f"{n}.{at.marker}" in files.entries]
        if not coded:
            continue
        if len(coded) < len(names) or experts.has_bias:
            what = "have biases" if experts.has_bias else "are in codes in part"
            raise LoadError(
                f"{experts.name}: experts of a model that runs through transformers {what} "
                f"({coded[0]}), which is not implemented. Use a checkpoint in bfloat16."
            )
        for name, (number, part) in names.items():
            layout = layouts[name]
            assert layout is not None, "those with codes have a layout"
            yield CodedModule(ForeignLinear(experts.name, *sizes[part]), layout, name, number)
        return
    stacked = [n for n in files.entries if n.startswith(experts.name + ".")]
    others = [n for n in stacked if files.entries[n].dtype not in FLOATS]
    if others:
        raise LoadError(
            f"{listed(others)}: experts in codes of a model that runs through transformers are "
            f"read where each has tensors of its own ({experts.name}.0.gate_proj.weight, or w1), "
            "and these have others. Use a checkpoint in bfloat16, or one that stores each expert."
        )


def _name_in(files: CheckpointFiles, name: str) -> str:
    """The files' name of a module; a checkpoint of the layers alone lacks a wrapper's name."""
    bare = name.partition(".")[2]
    return next((at for at in (name, bare) if _has(files, at)), name)


def _has(files: CheckpointFiles, module: str) -> bool:
    return any(f"{module}.{end}" in files.entries for end in _ENDS)


_EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")
"""Names in files of the gate, the inputs and the outputs of an expert."""
_DOWNS = tuple(down for *_, down in _EXPERT_NAMES)
_ENDS = ("weight", "qweight", "weight_packed")
"""A tensor that a linear layer has in each of the formats."""


def without_weights(kind: Any, modules: tuple[CodedModule, ...], spec: ForeignDecoder) -> Any:
    """A class of transformers whose layers and experts in codes have no weights."""
    sizes = {experts.name: experts for experts in spec.experts}

    def build(self: Any, *inputs: Any, **named: Any) -> None:
        kind.__init__(self, *inputs, **named)
        for name, is_expert in {m.linear.name: m.expert is not None for m in modules}.items():
            plain = self.get_submodule(name)
            new = CodedExpertsLayer(plain, sizes[name]) if is_expert else CodedLinearLayer(plain)
            self.set_submodule(name, new)

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
        if module.expert is not None:
            _fill_expert(layer, module, _on(weight, device, model.dtype))
        elif isinstance(weight, CodedWeight) and name not in opened:
            layer.codes = _on(weight, device, model.dtype)
        else:
            wide = weight.widened() if isinstance(weight, CodedWeight) else weight
            model.set_submodule(name, _plain(layer, wide.to(device, model.dtype)))


def _on(weight: CodedWeight | Tensor, device: torch.device, dtype: torch.dtype) -> Any:
    """A copy on the device."""
    if isinstance(weight, Tensor):
        return weight.to(device, dtype, copy=True)
    codes = weight.each(lambda part: part.to(device, copy=True))
    order = None if codes.order is None else codes.order.to(device)
    return replace(codes, order=order)


def _fill_expert(layer: CodedExpertsLayer, module: CodedModule, weight: Any) -> None:
    """Modules come in the order of experts, and of their gates, inputs and outputs."""
    assert module.expert is not None
    is_down = module.stored_at.endswith(_DOWNS)
    (layer.down if is_down else layer.up[module.expert]).append(weight)


def _plain(layer: CodedLinearLayer, weight: Tensor) -> nn.Linear:
    # no memory for a weight that is replaced at once
    with torch.device("meta"):
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = layer.bias
    return plain
