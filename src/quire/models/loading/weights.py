"""From a checkpoint to a `DecoderModel`: exact, and never holding the weights twice.

Exact: before anything is read, the names and shapes of the files are compared with what the spec
needs, and one `WeightMismatch` lists both sides. While loading, each leaf is copied once from the
mapped file into the fused tensor that the decoder asked for, which goes to the ops provider at
once. The engine's weights never stay views of the file: replacing or truncating a checkpoint under
a running engine must not change or kill it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.worker_group import WorkerGroup
from quire.errors import LoadError, NotBuiltYet, WeightMismatch
from quire.models.decoder import DecoderModel
from quire.models.families import find_family
from quire.models.formats import CACHE_SCALES, Storage, read_storage
from quire.models.loading.code_layouts import coded_weight
from quire.models.loading.folder_files import LoadFormat, read_folder_config
from quire.models.loading.load_formats import WeightFiles, open_files
from quire.models.loading.random_weights import DeviceRandomLeaves, RandomLeaves
from quire.models.loading.read_ahead import Read, ReadAhead
from quire.models.loading.sharded_state import ShardedLeaves, check_pattern, save_leaves
from quire.models.loading.transforms import coded_leaves, to_leaves
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.parameters import Parameter, parameters
from quire.models.rules import Family, StoredTensor, tensor_map
from quire.models.sharding import own_part, shard
from quire.models.spec import Decoder
from quire.ops import CodedWeight, Ops
from quire.quantization import UNQUANTIZED, Recipe

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

_SHOWN = 6  # names of a mismatch that a message lists per kind


def load_model(
    folder: Path,
    decoder: Decoder,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    seed: int = 0,
    max_model_len: int | None = None,
    family: Family | None = None,
    storage: Storage | None = None,
    recipe: Recipe = UNQUANTIZED,
    progress: Progress | None = None,
    spread: ExpertExchange | None = None,
    first_layer: int = 0,
    aux_layers: Sequence[int] = (),
    group: WorkerGroup | None = None,
    keeps_experts: bool = False,
    weights_folder: Path | None = None,
) -> DecoderModel:
    """Build the decoder with the weights of a model folder, converted to `dtype`.

    `load_format`: which files have them (models/loading/load_formats.py); dummy draws them from
    `seed` and reads none (other values on a GPU, where they are made). `max_model_len` (default:
    the spec's context) sizes position tables. `family` says how tensors are named, and `storage`
    how the files store quantised weights; without a family, both are those of the folder's
    config.json. `recipe` says how other weights are kept. `progress` is called with leaf values
    done and in all. `spread`, `first_layer`, `aux_layers` and `keeps_experts`: see DecoderModel.
    `weights_folder`: where large weights are kept in files instead of memory. With `group` it is
    the model of one worker, which takes its own part of each leaf. Raises LoadError subclasses that
    name file and tensor.
    """
    if family is None and load_format != "dummy":
        config = read_folder_config(folder, load_format)
        family, storage = find_family(config), read_storage(config)
    if storage is not None and storage.keeps_rows:
        logger.warning(
            "The checkpoint rounds activations to 4 bits; here they keep their values, and only "
            "its weights are in 4 bits."
        )
    place = torch.device(device)
    length = _checked_length(decoder, max_model_len)
    own = _own_part(decoder, recipe, storage, group)

    def build(read: Read, coded: frozenset[str]) -> DecoderModel:
        weights = WeightBuilder(
            own,
            read,
            dtype=dtype,
            device=place,
            progress=progress,
            coded=coded,
            folder=weights_folder,
        )
        model = DecoderModel(
            own,
            weights,
            ops,
            max_model_len=length,
            recipe=recipe,
            spread=spread,
            first_layer=first_layer,
            aux_layers=aux_layers,
            group=group,
            keeps_experts=keeps_experts,
        )
        weights.finish()
        return model

    with open_leaves(
        *(folder, decoder, own),
        load_format=load_format,
        device=place,
        seed=seed,
        family=family,
        storage=storage,
        group=group,
    ) as leaves:
        if place.type == "cpu" or load_format == "dummy":
            return build(leaves.read, leaves.coded)
        ahead = ReadAhead(leaves.read, parameters(own).values(), is_pinned=True)
        try:
            return build(ahead, leaves.coded)
        finally:
            ahead.close()


def save_sharded_state(
    folder: Path,
    decoder: Decoder,
    target: Path,
    *,
    device: torch.device,
    load_format: LoadFormat,
    seed: int,
    family: Family,
    storage: Storage | None,
    recipe: Recipe,
    group: WorkerGroup | None,
    pattern: str | None = None,
    max_size: int | None = None,
) -> list[Path]:
    """Write the weights that `load_model` would read for a worker into files of its own in
    `target`, for the load format sharded_state; `pattern` and `max_size`: see `save_leaves`.

    Raises InvalidParameter for these, NotBuiltYet for weights in codes, LoadError for what cannot
    be read or written.
    """
    check_pattern(pattern)
    own = _own_part(decoder, recipe, storage, group)
    with open_leaves(
        *(folder, decoder, own),
        load_format=load_format,
        device=device,
        seed=seed,
        family=family,
        storage=storage,
        group=group,
    ) as leaves:
        if leaves.coded:
            raise NotBuiltYet(
                "method",
                "save_sharded_state of a quantised checkpoint",
                "Keep the checkpoint: each worker reads its part of it.",
            )
        rank = 0 if group is None else group.rank
        return save_leaves(target, rank, parameters(own).values(), leaves.read, max_size=max_size)


def _own_part(
    decoder: Decoder, recipe: Recipe, storage: Storage | None, group: WorkerGroup | None
) -> Decoder:
    """What a worker has of the decoder."""
    return decoder if group is None else shard(decoder, group.size, _group_size(recipe, storage))


@dataclass(frozen=True, slots=True)
class OpenLeaves:
    """What reads leaves, and the names of those that are in codes."""

    read: Read
    coded: frozenset[str] = frozenset()


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
) -> Iterator[OpenLeaves]:
    """Open the weights of a folder; yields what reads the leaves of `own`, which is the decoder or
    the part of it that a worker of `group` has. The other arguments are those of `load_model`,
    which says what is raised; dummy and sharded_state need no family.
    """
    if load_format == "dummy":
        draw = RandomLeaves(seed) if device.type == "cpu" else DeviceRandomLeaves(seed, device)
        yield OpenLeaves(_parts_of(draw, decoder, group))
        return
    if load_format == "sharded_state":
        rank, size = (0, 1) if group is None else (group.rank, group.size)
        with closing(ShardedLeaves(folder, rank, size, parameters(own))) as leaves:
            yield OpenLeaves(leaves)
        return
    assert family is not None, "files of a checkpoint have a family's names"
    with closing(open_files(load_format, folder, decoder)) as files:
        stored = match(family, decoder, files, storage)
        coded = frozenset(leaf.name for s in stored if s.layout is not None for leaf in s.leaves)
        yield OpenLeaves(_parts_of(StoredLeaves(files, stored), decoder, group), coded)


def match(
    family: Family, decoder: Decoder, files: WeightFiles, storage: Storage | None = None
) -> list[StoredTensor]:
    """The tensors to read, named as in the files. Raises WeightMismatch unless names and shapes fit
    exactly, LoadError for a type that is not the format's.
    """
    stored = tensor_map(family, decoder)
    bare = not any(name.startswith(family.prefix) for name in files.entries)
    if family.prefix and bare:  # a checkpoint of the decoder without its head's wrapper
        stored = [_without_prefix(s, family.prefix) for s in stored]
    stored = [_under_its_name(s, family, files) for s in stored]
    if storage is not None:
        stored = [_in_codes(s, storage, files) for s in stored]
    depth = len(decoder.blocks)
    parts = {name: part for s in stored for name, part in s.parts().items()}
    expected = {n: p.shape for n, p in parts.items() if n in files.entries or not p.is_optional}
    found = {
        n: expected[n] if n in expected and parts[n].has_shape(e.shape) else e.shape
        for n, e in files.entries.items()
        if n in expected or not (family.ignores(n, depth) or _is_of_cache(n, storage))
    }
    if drafts := sorted(n for n in files.entries if family.is_of_drafts(n, depth)):
        logger.info(
            "Not loaded: layers that predict further tokens, which are not run (%s).",
            _listed(drafts),
        )
    head = family.head_prefix + "lm_head.weight"
    if decoder.tie and head in found:
        _check_tied_head(files, head, stored[0].name)
        found.pop(head)
    if problems := list(_differences(expected, found)):
        raise WeightMismatch("The checkpoint does not fit the model: " + "; ".join(problems) + ".")
    for name in expected:
        entry, allowed = files.entries[name], parts[name].dtypes
        if entry.dtype not in allowed:
            raise LoadError(
                f"{entry.file}: {name} is stored as {entry.dtype}, and config.json describes no "
                f"quantised weight there; supported are {', '.join(allowed)}."
            )
    return stored


def _under_its_name(stored: StoredTensor, family: Family, files: WeightFiles) -> StoredTensor:
    """The tensor under its older name, where the files have that one alone."""
    for end, older in family.other_ends:
        name = stored.name.removesuffix(end) + older
        if stored.name.endswith(end) and stored.name not in files.entries and name in files.entries:
            return replace(stored, name=name)
    return stored


def _is_of_cache(name: str, storage: Storage | None) -> bool:
    """Whether it is a scale of keys and values of a quantised checkpoint."""
    return storage is not None and CACHE_SCALES.fullmatch(name) is not None


def _in_codes(stored: StoredTensor, storage: Storage, files: WeightFiles) -> StoredTensor:
    coded = stored.in_codes(storage)
    if coded.layout is None or not (storage.is_decided_by_files or coded.is_router):
        return coded
    has_codes = coded.at(coded.layout.marker) in files.entries
    return stored if stored.name in files.entries and not has_codes else coded


class StoredLeaves:
    """Reads leaves out of checkpoint files; asked in the order of the files' tensors it maps each
    once.
    """

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
            self._current = ("", [])
            self._current = (stored.name, self._read(stored))
        return self._current[1][index]

    def _read(self, stored: StoredTensor) -> Sequence[Tensor | CodedWeight]:
        if stored.layout is None:
            return to_leaves(stored, self._files.read(stored.name))
        at = stored.at("")
        names = [name for name in stored.parts() if name in self._files.entries]
        parts = {name.removeprefix(at): self._files.read(name).contiguous() for name in names}
        weight = coded_weight(stored.layout, stored.module, parts, stored.shape[-1])
        return coded_leaves(stored, weight)


def _parts_of(read: Read, decoder: Decoder, group: WorkerGroup | None) -> Read:
    """Reads of each leaf of `decoder` what a worker of the group has of it, and no more of the
    file.
    """
    if group is None:
        return read
    whole, rank, size = parameters(decoder), group.rank, group.size

    def read_part(leaf: Parameter) -> Tensor | CodedWeight:
        part = own_part(whole[leaf.name], rank, size)
        tensor = read(whole[leaf.name])
        if isinstance(tensor, CodedWeight):
            return tensor if part is None else _part_of_codes(tensor, leaf.name, *part)
        return tensor if part is None else tensor.narrow(*part)

    return read_part


def _part_of_codes(
    weight: CodedWeight, name: str, axis: int, start: int, length: int
) -> CodedWeight:
    if axis == 0:
        return weight.rows(start, length)
    unit = weight.unit or 1
    if weight.order is not None or start % unit or length % unit:
        raise LoadError(
            f"{name} cannot be cut over several workers: its groups of inputs with one scale are "
            "not whole in each part. Use tensor_parallel_size=1."
        )
    return weight.columns(start, length)


def _group_size(recipe: Recipe, storage: Storage | None) -> int:
    """Inputs of projections that must stay together when these are cut."""
    stored_as = recipe.format_of("projection")
    if storage is not None:
        return storage.group
    return 0 if stored_as is None else stored_as.group


def _checked_length(decoder: Decoder, max_model_len: int | None) -> int:
    length = decoder.context if max_model_len is None else max_model_len
    if length is None:
        return sys.maxsize  # nothing in the model has a size by positions
    if decoder.learned_positions and length > decoder.learned_positions:
        raise LoadError(
            f"max_model_len={length} is not possible: the model has learned "
            f"{decoder.learned_positions} positions and knows no others."
        )
    return length


def _without_prefix(stored: StoredTensor, prefix: str) -> StoredTensor:
    name = stored.name.removeprefix(prefix)
    return replace(stored, name=name)


def _check_tied_head(files: WeightFiles, head: str, embedding: str) -> None:
    """A tied checkpoint may carry the head as well, but only as a copy."""
    if embedding not in files.entries:
        return
    if not torch.equal(files.read(embedding), files.read(head)):
        raise WeightMismatch(
            "config.json says that the head is the embedding (tie_word_embeddings), but "
            f"{head} differs from {embedding}. One of the two is wrong; "
            'hf_overrides={"tie_word_embeddings": false} takes the head as it is stored.'
        )


def _differences(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> Iterable[str]:
    missing = [name for name in expected if name not in found]
    extra = sorted(name for name in found if name not in expected)
    if missing:
        yield f"missing {_listed(missing)}"
    if extra:
        yield f"unknown {_listed(extra)}"
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    if wrong:
        shapes = [f"{n} {list(found[n])} instead of {list(expected[n])}" for n in wrong]
        yield f"wrong shape {_listed(shapes)}"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
