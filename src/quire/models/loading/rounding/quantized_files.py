"""Writes a checkpoint whose linear modules are rounded, in the format of compressed-tensors: tensor
by tensor, so that no more than one file of weights is in memory.

The numbers are those of an engine that rounds while it loads: the same functions make them. What is
rounded is what the reader of the written config says, so that both cannot differ.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvalidParameter, LoadError, NotBuiltYet
from quire.models.families import find_family, read_spec
from quire.models.formats import read_storage
from quire.models.formats.rounding_rules import RoundingRules, kind_of
from quire.models.loading.folder_files import found_format
from quire.models.loading.load_formats import WeightFiles, open_files
from quire.models.loading.matching import match
from quire.models.loading.rounding.recipes import format_of
from quire.models.loading.rounding.scheme_configs import quantization_config
from quire.models.loading.sharded_state import write_tensors
from quire.models.reading.text_part import PART
from quire.models.rules import StoredTensor, tensor_map
from quire.ops.fp8 import fp8_weight
from quire.ops.quantized import WeightFormat, quantize_weight

_CONFIG = "config.json"
_OTHERS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.md", "LICENSE*")
"""Files of a model folder that a checkpoint keeps."""
_WEIGHTS = "model-{:05d}-of-{:05d}.safetensors"
_PIECE = 1 << 24
"""Weights that are rounded at once."""


@dataclass(frozen=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that was written: its files, the modules that were rounded, and the bytes of
    weights in it and in the one that was read.
    """

    folder: Path
    files: int
    modules: int
    read_bytes: int
    written_bytes: int

    def as_json(self) -> dict[str, Any]:
        """The figures, for the last line of a program's output."""
        return {
            "folder": str(self.folder),
            "files": self.files,
            "rounded_modules": self.modules,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "ratio": round(self.written_bytes / max(1, self.read_bytes), 4),
        }


def write_quantized(
    folder: Path, config: Mapping[str, Any], rules: RoundingRules, target: Path, *, most_bytes: int
) -> WrittenCheckpoint:
    """Write the checkpoint of `folder`, whose config.json is `config`, to the folder `target` in
    files of at most `most_bytes` (a larger tensor has a file of its own).

    Raises InvalidParameter where that has files already or the checkpoint is quantised, NotBuiltYet
    for a model whose text is only a part, LoadError for what cannot be read or written.
    """
    _check(folder, config, target)
    decoder, family = read_spec(config), find_family(config)
    with closing(open_files(found_format(folder), folder, decoder)) as files:
        stored = match(family, decoder, files)
        chosen = list(_chosen(stored, rules))
        if decoder.tie:  # a head that is rounded is a matrix of its own
            untied = tensor_map(family, replace(decoder, tie=False))
            heads = [s for s in untied if s.leaves[0].name == "head.weight"]
            chosen += [replace(h, source=stored[0].name) for h in _chosen(heads, rules)]
        if not any(linear.format is not None for linear in chosen):
            raise InvalidParameter("quantization_config", rules, "rules that fit some module")
        changed = _changed(config, chosen)
        try:
            target.mkdir(parents=True, exist_ok=True)
            _copy_others(folder, target)
            writer, read_bytes = _Writer(target, most_bytes), 0
            linears = {linear.tensor.name: linear for linear in chosen}
            others = (_Linear(tensor, None) for tensor in stored if tensor.name not in linears)
            written = (c for c in chosen if c.source is None or c.format is not None)
            for linear in (*others, *written):
                writer.add(dict(_tensors_of(linear, files)))
                read_bytes += 0 if linear.source else files.read(linear.tensor.name).nbytes
            count = writer.finish()
            # last, so that a folder in which writing has stopped has no config.json
            text = json.dumps(changed, indent=2, sort_keys=True)
            (target / _CONFIG).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise LoadError(f"The checkpoint cannot be written to {target}: {error}.") from error
    rounded = sum(linear.format is not None for linear in chosen)
    return WrittenCheckpoint(target, count, rounded, read_bytes, writer.written_bytes)


@dataclass(frozen=True, slots=True)
class _Linear:
    """A stored tensor and what it becomes; None: it keeps its values. source: the tensor that has
    its values, where the checkpoint does not store it.
    """

    tensor: StoredTensor
    format: WeightFormat | None
    source: str | None = None


def _check(folder: Path, config: Mapping[str, Any], target: Path) -> None:
    if read_storage(config) is not None:
        raise InvalidParameter("model", str(folder), "a checkpoint that is not quantised")
    instead = "Give an engine `quantization` instead, which rounds while it loads."
    if PART in config:
        raise NotBuiltYet("model", f"{folder}, whose text is a part of it", instead)
    if (found := found_format(folder)) not in ("safetensors", "pt"):
        raise NotBuiltYet("model", f"{folder} with files of the format {found}", instead)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidParameter("out", str(target), "a folder that is new or empty")


def _chosen(stored: Iterable[StoredTensor], rules: RoundingRules) -> Iterator[_Linear]:
    """The weights of linear modules with their formats. Raises NotBuiltYet where a stored tensor
    holds several that the rules tell apart.
    """
    scheme_of = rules.scheme_finder()
    for tensor in stored:
        if not tensor.is_linear:
            continue
        kinds = {kind_of(leaf.name) for leaf in tensor.leaves}
        formats = {
            None if kind is None else format_of(scheme_of(kind, tensor.module), kind)
            for kind in kinds
        }
        if len(formats) > 1:
            hint = "Give all kinds of modules that it holds one scheme."
            raise NotBuiltYet("quantization_config", f"two formats for {tensor.name}", hint)
        yield _Linear(tensor, formats.pop())


def _changed(config: Mapping[str, Any], chosen: Iterable[_Linear]) -> dict[str, Any]:
    chosen = list(chosen)
    formats = {linear.tensor.module: linear.format for linear in chosen}
    changed = {**config, "quantization_config": quantization_config(formats)}
    if any(linear.source is not None and linear.format is not None for linear in chosen):
        changed["tie_word_embeddings"] = False
    return changed


def _copy_others(folder: Path, target: Path) -> None:
    """Copy what is neither weights nor their index nor the config."""
    for pattern in _OTHERS:
        for file in folder.glob(pattern):
            if file.is_file() and file.name != _CONFIG and not file.name.endswith(".index.json"):
                shutil.copyfile(file, target / file.name)


def _tensors_of(linear: _Linear, files: WeightFiles) -> Iterator[tuple[str, Tensor]]:
    """Yield what is written of a tensor, by name."""
    tensor = linear.tensor
    values = files.read(linear.source or tensor.name)
    if linear.format is None:
        yield tensor.name, values
        return
    if "transpose" in tensor.steps:
        values = values.t()
    for part, made in _parts(values, linear.format).items():
        yield f"{tensor.module}.{part}", made


def _parts(weight: Tensor, format: WeightFormat) -> dict[str, Tensor]:
    """weight [out, in] in the tensors that the format's config has."""
    if format.name == "fp8":
        rounded = fp8_weight(weight, None)
        return {"weight": rounded.numbers, "weight_scale": rounded.scales[:, None]}
    rows = max(1, _PIECE // weight.shape[1])
    numbers, scales = [], []
    for piece in weight.split(rows):
        made = quantize_weight(piece, None, format)
        numbers.append(made.q.flatten(1)[:, : weight.shape[1]])
        scales.append(made.scales)
    codes, steps = torch.cat(numbers), torch.cat(scales)
    if format.name == "int4":
        steps = steps.bfloat16()  # in which they are whole
    if format.rounds_rows:
        return {"weight": codes, "weight_scale": steps}
    bits = 8 if format.name == "int8" else 4
    return {
        "weight_packed": _words(codes, bits),
        "weight_scale": steps,
        "weight_shape": torch.tensor(weight.shape),
    }


def _words(codes: Tensor, bits: int) -> Tensor:
    """int8 [out, in] around 0 -> int32 [out, W] around the middle, the first code lowest."""
    each = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each))
    fields = (padded.view(torch.uint8) ^ (1 << bits - 1)) & ((1 << bits) - 1)
    if bits == 4:
        fields = fields[:, ::2] | (fields[:, 1::2] << 4)
    return fields.contiguous().view(torch.int32)


class _Writer:
    """Writes tensors into files of at most so many bytes, and the index of several files."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes
        self._tensors: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._files: list[list[str]] = []
        self.written_bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors of one weight."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._tensors and self._held_bytes + size > self._most_bytes:
            self._write()
        for name, tensor in tensors.items():
            self._tensors[name] = tensor.to("cpu", copy=True).contiguous()
        self._held_bytes += size
        self.written_bytes += size

    def finish(self) -> int:
        """Write what is left, give the files their names, and return how many there are."""
        self._write()
        count = len(self._files)
        index: dict[str, str] = {}
        for number, names in enumerate(self._files):
            name = _WEIGHTS.format(number + 1, count) if count > 1 else "model.safetensors"
            # names say how many files there are, which is known only now
            self._unfinished(number).replace(self._folder / name)
            index |= dict.fromkeys(names, name)
        if count > 1:
            about = {"metadata": {"total_size": self.written_bytes}, "weight_map": index}
            path = self._folder / "model.safetensors.index.json"
            path.write_text(json.dumps(about, indent=2, sort_keys=True), encoding="utf-8")
        return count

    def _write(self) -> None:
        write_tensors(self._tensors, self._unfinished(len(self._files)), {"format": "pt"})
        self._files.append(list(self._tensors))
        self._tensors, self._held_bytes = {}, 0

    def _unfinished(self, number: int) -> Path:
        return self._folder / f"unfinished-{number}.part"
