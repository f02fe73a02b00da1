"""Reads the leaves of a decoder out of a folder's files, or what a worker has of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from quire.distributed.worker_group import WorkerGroup
from quire.errors import LoadError
from quire.models.cutting.leaf_part import part_of
from quire.models.cutting.sharding import LeafPart, own_parts
from quire.models.formats.storage import Storage
from quire.models.loading.ahead.headers import Sources
from quire.models.loading.cache_scales import used_cache_scales
from quire.models.loading.codes.code_layouts import coded_weight
from quire.models.loading.codes.widened_codes import widened_weight
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.load_formats import WeightFiles, open_files
from quire.models.loading.matching import match
from quire.models.loading.random_weights import DeviceRandomLeaves, RandomLeaves
from quire.models.loading.read_ahead import Read
from quire.models.loading.sharded_state import ShardedLeaves
from quire.models.loading.transforms import coded_leaves, to_leaves
from quire.models.parameters import Parameter, parameters
from quire.models.rules import Family, StoredTensor
from quire.models.spec import Decoder
from quire.ops import CodedWeight
from quire.ops.formats.coded import one_above_the_other
from quire.ops.kv import FixedScales


@dataclass(frozen=True, slots=True)
class OpenLeaves:
    """The reader of leaves, the names of those that are in codes, and the scales of keys and values
    that are used, by layer. sources: names of file contents by leaf, for leaves that are such
    contents as they are.
    """

    read: Read
    coded: frozenset[str] = frozenset()
    cache_scales: Mapping[str, FixedScales] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def open_leaves(
    folder: Path,
    decoder: Decoder,
    own: Decoder,
    *,
    load_format: LoadFormat,
    device: torch.device,
    seed: int = 0,
    family: Family | None = None,
    storage: Storage | None = None,
    group: WorkerGroup | None = None,
    kv_dtype: torch.dtype | None = None,
    files: WeightFiles | None = None,
) -> Iterator[OpenLeaves]:
    """Open the weights of a folder; yields what reads the leaves of `own`, which is the decoder or
    the part of it that a worker of `group` has. The other arguments are those of `load_model`,
    which says what is raised; dummy and sharded_state need no family. kv_dtype None: nothing will
    be cached. `files`: instead of the folder's, whatever its format.
    """
    if files is None and load_format == "dummy":
        draw = RandomLeaves(seed) if device.type == "cpu" else DeviceRandomLeaves(seed, device)
        yield OpenLeaves(_own_parts_of(draw, decoder, own, group))
        return
    if files is None and load_format == "sharded_state":
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        with closing(ShardedLeaves(folder, rank, size, parameters(own), own.stage)) as leaves:
            yield OpenLeaves(leaves)
        return
    assert family is not None, "files of a checkpoint have a family's names"
    # a worker's part of a tensor, and weights from elsewhere, are not the contents of a file
    has_sources = files is None and group is None
    with closing(files or open_files(load_format, folder, decoder)) as files:
        stored = match(family, decoder, files, storage)
        in_codes = (s for s in stored if s.layout is not None and not s.layout.is_widened)
        coded = frozenset(leaf.name for s in in_codes for leaf in s.leaves)
        scales = {} if kv_dtype is None else used_cache_scales(files, storage, kv_dtype)
        sources = _sources(files, stored) if has_sources else {}
        read = _own_parts_of(StoredLeaves(files, stored), decoder, own, group)
        yield OpenLeaves(read, coded, scales, sources)


def _sources(files: WeightFiles, stored: Iterable[StoredTensor]) -> dict[str, str]:
    """Names of file contents by leaf, for leaves that are such contents as they are."""
    found, name_of = {}, Sources()
    for tensor in stored:
        if (leaf := tensor.sole_leaf) is not None and tensor.name in files.entries:
            found[leaf.name] = name_of(files.entries[tensor.name].file, tensor.name)
    return found


class StoredLeaves:
    """Reads leaves out of checkpoint files; asked in the files' order it maps each once."""

    def __init__(self, files: WeightFiles, stored: Iterable[StoredTensor]) -> None:
        self._files = files
        self._where = {
            leaf.name: (tensor, i) for tensor in stored for i, leaf in enumerate(tensor.leaves)
        }
        self._current: tuple[str, Sequence[Tensor | CodedWeight]] = ("", [])

    def __call__(self, leaf: Parameter) -> Tensor | CodedWeight:
        """A view of the leaf in its stored dtype; holding it keeps the file mapped."""
        stored, index = self._where[leaf.name]
        if self._current[0] != stored.name:
            # let go of before the next is read: two files would be mapped otherwise
            self._current = ("", [])
            self._current = (stored.name, self._read(stored))
        return self._current[1][index]

    def _read(self, stored: StoredTensor) -> Sequence[Tensor | CodedWeight]:
        if stored.layout is None:
            return to_leaves(stored, self._files.read(stored.name))
        at = stored.at("")
        names = [name for name in stored.parts() if name in self._files.entries]
        parts = {name.removeprefix(at): self._files.read(name).contiguous() for name in names}
        if stored.layout.is_widened:
            wide = widened_weight(stored.layout, stored.module, parts, stored.shape[-1])
            return to_leaves(stored, wide)
        weight = coded_weight(stored.layout, stored.module, parts, stored.shape[-1])
        return coded_leaves(stored, weight)


def _own_parts_of(read: Read, decoder: Decoder, own: Decoder, group: WorkerGroup | None) -> Read:
    """Reads of each leaf of `decoder` what a worker has as `own`, and no more of the file."""
    if group is None:
        return read
    return parts_of(read, parameters(decoder), own_parts(decoder, own, group.rank, group.size))


def parts_of(read: Read, whole: Mapping[str, Parameter], parts: Mapping[str, LeafPart]) -> Read:
    """Reads `parts` of the leaves that `read` gives, whose names `whole` has."""

    def read_part(leaf: Parameter) -> Tensor | CodedWeight:
        part, tensor = parts.get(leaf.name), read(whole[leaf.name])
        if part is None:
            return tensor
        if isinstance(tensor, CodedWeight):
            return _part_of_codes(tensor, leaf.name, part)
        return part_of(tensor, part)

    return read_part


def _part_of_codes(weight: CodedWeight, name: str, part: LeafPart) -> CodedWeight:
    if part.axis == 0:
        return one_above_the_other([weight.rows(*run) for run in part.runs])
    [(start, length)] = part.runs
    unit = weight.unit or 1
    if weight.order is not None or start % unit or length % unit:
        raise LoadError(
            f"{name} cannot be cut over several workers: its groups of inputs with one scale are "
            "not whole in each part. Use tensor_parallel_size=1."
        )
    return weight.columns(start, length)
