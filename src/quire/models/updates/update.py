"""One update of a model's weights in place: a tensor of the checkpoint after another, in any order.

A piece of the model (pieces.py) is loaded as at the start, with the same rounding and packing, as
soon as all of its tensors are there, and its values replace those that the model has. So the model
computes with a mixture until the update is complete: `is_torn` says so, and nobody may run it then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvalidType, LoadError, NotBuiltYet, WeightMismatch
from quire.models.cutting.sharding import own_parts
from quire.models.cutting.stages import cut
from quire.models.decoder import DecoderModel
from quire.models.formats.storage import Storage
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.leaves import StoredLeaves, parts_of
from quire.models.loading.load_formats import open_files
from quire.models.loading.matching import fitted, listed, match
from quire.models.loading.model_parts import Part, tensors_within
from quire.models.loading.options import ModelOptions
from quire.models.loading.readers.checkpoint_files import TensorEntry
from quire.models.loading.readers.dtype_names import dtype_name
from quire.models.loading.readers.named_tensors import NamedTensors
from quire.models.loading.rounding.recipes import for_decoder
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.loading.weights import own_part
from quire.models.parameters import Parameter, parameters
from quire.models.rules import Family, StoredTensor, tensor_map
from quire.models.spec import Decoder
from quire.models.updates.names import CheckpointNames, Found
from quire.models.updates.old_memory import OldMemory, PlainWriter, WeightWriter
from quire.models.updates.pieces import pieces_of
from quire.ops import CodedWeight, Ops

logger = logging.getLogger(__name__)

_LINE = 4096
"""Bytes of a line of a fingerprint."""
_SHORT = 1
"""Positions that tables of a layer's piece have: they are not copied."""


@dataclass(eq=False)
class _Piece:
    """A piece of the model, with the tensors that have come for it. `held` are those whose memory
    is the sender's.
    """

    decoder: Decoder
    leaves: dict[str, Parameter]
    stored: list[StoredTensor] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    arrived: dict[str, Tensor] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)
    """Those among them that have no NaN."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The end of an update: how many tensors have come, and which tensors of the checkpoint have
    not, whose weights are those of before.
    """

    num_tensors: int
    unchanged: list[str]


class WeightUpdate:
    """An update of `model`, which `load_model` has loaded with the other arguments.

    Invariants: each tensor is used once; what is one weight in the model changes as a whole. After
    an exception the update is over, and the model as it was unless `is_torn`.
    """

    def __init__(
        self,
        model: DecoderModel,
        folder: Path,
        decoder: Decoder,
        ops: Ops,
        *,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        load_format: LoadFormat = "auto",
        seed: int = 0,
        max_model_len: int | None = None,
        family: Family,
        storage: Storage | None = None,
        weights_folder: Path | None = None,
        options: ModelOptions,
        writer: WeightWriter | None = None,
        has_encoders: bool = False,
        is_repair: bool = False,
    ) -> None:
        """`writer`: of the provider that has packed the weights; None: it has none. has_encoders:
        other parts of the model run, too, and keep their weights. is_repair: the model is torn, and
        every tensor has to come.

        Raises NotBuiltYet for weights that are not kept on the device, LoadError if the names in
        the checkpoint cannot be read.
        """
        if options.make_placement is not None:
            hint = "Start the engine without offloaded weights."
            raise NotBuiltYet("method", "start_weight_update with offloaded weights", hint)
        self._model, self._ops = model, ops
        self._writer = writer or PlainWriter()
        self._dtype, self._device = dtype, torch.device(device)
        recipe = for_decoder(options.recipe, family, decoder)
        self._options = replace(options, recipe=recipe, stored=None, aux_layers=(), stage=None)
        self._group = options.group
        own = own_part(decoder, recipe, storage, options.group)
        if options.stage is not None:
            own = cut(own, options.stage)
        self._length = max_model_len or decoder.context or _SHORT
        self._decoder, self._storage = decoder, storage
        self._turns = family.turns_by_shape
        self._cut = (
            {}
            if self._group is None
            else own_parts(decoder, own, self._group.rank, self._group.size)
        )
        self._whole = parameters(decoder)
        self._old: Mapping[str, Part] = dict(model.named_parts())
        self._pieces = [_Piece(d, parameters(d)) for d in pieces_of(own)]
        stored, entries = _stored_in(folder, decoder, load_format, family, storage)
        self._names = CheckpointNames(family, decoder, stored, entries, has_encoders=has_encoders)
        self._of_name: dict[str, _Piece] = {}
        self._place(stored)
        self._seen: dict[str, None] = {}
        self._done: set[str] = set()
        self._tied: dict[str, tuple[object, ...]] = {}
        """The fingerprints of the embedding and of a head that is the same weight."""
        self._is_repair = is_repair
        self._is_over = False
        self.is_torn = is_repair

    @property
    def is_complete(self) -> bool:
        """Whether all tensors of the model have come."""
        return all(not piece.missing for piece in self._pieces)

    def has(self, name: str) -> bool:
        """Whether a tensor of this name has come."""
        if name in self._seen:
            return True
        found = None if self._names.is_tied_head(name) else self._names.find(name)
        return found is not None and found.part in self._seen

    @property
    def num_tensors(self) -> int:
        """Number of tensors that have come."""
        return len(self._seen)

    def add(self, name: str, tensor: Tensor) -> bool:
        """Take a tensor of the checkpoint, which is not copied before `keep` or until its piece is
        loaded; returns whether it is one of this model's.

        Raises WeightMismatch for one that the model does not have, or that has come already, or has
        another shape, LoadError for another type and for NaN; then the update is over.
        """
        assert not self._is_over, "an update ends once"
        try:
            return self._add(name, tensor)
        except BaseException:
            self._is_over = True
            raise

    def keep(self) -> None:
        """Copy what waits for other tensors: the memory of those that have come will be reused."""
        for piece in self._pieces:
            for name in piece.held:
                piece.arrived[name] = piece.arrived[name].clone()
            piece.held.clear()

    def finish(self) -> UpdateReport:
        """End the update: load pieces of which some tensors have come, and leave the others as they
        are. Raises WeightMismatch where a part of a weight is missing, or anything in a repair.
        """
        assert not self._is_over, "an update ends once"
        self._is_over = True
        missing = [name for names in self._names.required.values() for name in names]
        missing = [n for n in missing if n in self._of_name and n not in self._seen]
        if self._is_repair and missing:
            raise WeightMismatch(
                f"The weights are a mixture since an earlier update has failed, and this one left "
                f"out {listed(missing)}. Send all {len(self._of_name)} tensors."
            )
        for piece in self._pieces:
            if piece.arrived:
                self._load(piece)
        self._check_tied_head()
        self.is_torn = False
        if missing:
            logger.warning("%d weights were not sent, and stay: %s.", len(missing), listed(missing))
        return UpdateReport(len(self._seen), missing)

    # tensors

    def _place(self, stored: Sequence[StoredTensor]) -> None:
        """Give each stored tensor to the piece that has its leaves."""
        piece_of = {name: piece for piece in self._pieces for name in piece.leaves}
        for each in stored:
            found = {
                id(piece_of[p.name]): piece_of[p.name] for p in each.leaves if p.name in piece_of
            }
            if len(found) > 1:  # one tensor of the checkpoint has leaves of several pieces
                self._join(list(found.values()))
                self._place(stored)
                return
        for each in stored:
            piece = next((piece_of[p.name] for p in each.leaves if p.name in piece_of), None)
            if piece is None:
                continue  # another stage has it
            piece.stored.append(each)
            piece.missing.update(self._names.required[each.name])
            self._of_name.update((name, piece) for name in each.parts())

    def _join(self, pieces: list[_Piece]) -> None:
        raise LoadError(
            "A tensor of this model's checkpoint has weights of several layers: its weights cannot "
            "be updated in place. Use collective_rpc('reload_weights', ...)."
        )

    def _add(self, name: str, tensor: Tensor) -> bool:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InvalidType(
                "weights", (name, type(tensor).__name__), "pairs of a name and a tensor"
            )
        tensor = tensor.detach()
        if self._names.is_tied_head(name):
            self._once(name)
            self._tied["head"] = self._fingerprint(tensor)
            return True
        found = self._names.find(name)
        if found is None:
            return False
        self._once(found.part)
        if (piece := self._of_name.get(found.part)) is None:
            return False  # another stage has it
        self._check(found, piece, tensor)
        if self._names.is_embedding(found.stored) and self._names.has_tied_head:
            self._tied["embedding"] = self._fingerprint(tensor)
        if not self.is_torn:
            self._check_values(found.part, tensor)
            piece.checked.add(found.part)
        piece.arrived[found.part] = tensor
        piece.held.add(found.part)
        piece.missing.discard(found.part)
        if not piece.missing:
            self._load(piece)
        return True

    def _once(self, name: str) -> None:
        if name in self._seen:
            raise WeightMismatch(f"{name} came twice in one update.")
        self._seen[name] = None

    def _check(self, found: Found, piece: _Piece, tensor: Tensor) -> None:
        shape = tuple(tensor.shape)
        stored, part = found.stored, found.stored.parts()[found.part]
        if self._turns and "transpose" in stored.steps and not part.has_shape(shape):
            turned = stored.turned()
            if turned.shape == shape:
                piece.stored[piece.stored.index(stored)] = turned
                return
        if not part.has_shape(shape):
            raise WeightMismatch(
                f"{found.part} has the shape {list(shape)} instead of {list(part.shape)}."
            )
        kind = dtype_name(tensor.dtype)
        if kind not in part.dtypes:
            raise LoadError(
                f"{found.part} came as {kind}, and the model's checkpoint has it as "
                f"{' or '.join(part.dtypes)}."
            )

    def _check_values(self, name: str, tensor: Tensor) -> None:
        """Raise LoadError for NaN. Of an update that has written nothing, before it does; of
        another one when the tensor is read to be packed, from caches if it fits into them.
        """
        if not tensor.is_floating_point():
            return
        found = self._writer.has_nan(tensor)
        if _has_nan(tensor) if found is None else found:
            raise LoadError(f"{name} has NaN among its values.")

    def _fingerprint(self, tensor: Tensor) -> tuple[object, ...]:
        """Numbers that differ for tensors that do, but for chance: a copy would take their
        memory.
        """
        sums = self._writer.sums(tensor)
        return tensor.dtype, tuple(tensor.shape), *(_sums(tensor) if sums is None else sums)

    def _check_tied_head(self) -> None:
        if len(self._tied) > 1 and self._tied["head"] != self._tied["embedding"]:
            raise WeightMismatch(
                "The head differs from the embedding, and is the same weight in this model "
                "(tie_word_embeddings)."
            )

    # pieces

    def _load(self, piece: _Piece) -> None:
        """Load a piece with what has come, and copy what is complete into the model's memory."""
        with closing(_CheckedTensors(piece, self._check_values)) as files:
            here = [s for s in piece.stored if any(n in files.entries for n in s.parts())]
            fitted(here, frozenset(files.entries), files)
            leaves = StoredLeaves(files, here)
            present = {leaf.name for each in here for leaf in each.leaves}
            self._build(piece, present, leaves)
        piece.arrived.clear()
        piece.held.clear()
        piece.checked.clear()
        self._done |= present & piece.leaves.keys()

    def _build(self, piece: _Piece, present: Collection[str], leaves: StoredLeaves) -> None:
        group = _Group()

        def read(leaf: Parameter) -> Tensor | CodedWeight:
            group.leaves.add(leaf.name)
            if leaf.name in present:
                return leaves(leaf)
            if any(s.layout is not None for s in piece.stored):
                raise WeightMismatch(
                    f"{leaf.name} is missing: a layer with quantised weights has to come whole."
                )
            return torch.zeros((), dtype=self._dtype).expand(leaf.shape)

        def have_come(leaves: Sequence[str]) -> bool:
            names = [leaf + end for leaf in leaves for end in (".weight", ".bias")]
            return all(name in present for name in names if name in piece.leaves)

        def before_write() -> None:
            self.is_torn = True

        def note(name: str, part: Part) -> None:
            if self._is_complete(group, present):
                self._replace(name, part)

        layouts = [s for s in piece.stored if s.layout is not None and not s.layout.is_widened]
        reader = parts_of(read, self._whole, self._cut)
        weights = WeightBuilder(
            piece.leaves,
            reader,
            dtype=self._dtype,
            device=self._device,
            coded=frozenset(leaf.name for s in layouts for leaf in s.leaves),
            folder=None,
            cache_scales={},
            sources={},
            cut=self._cut,
        )
        is_part = len(self._pieces) > 1
        DecoderModel(
            *(piece.decoder, weights, self._ops),
            max_model_len=_SHORT if is_part and not self._needs_length(piece) else self._length,
            options=replace(
                self._options,
                note_part=note,
                memory=OldMemory(self._old, self._writer, have_come, before_write),
            ),
        )
        weights.finish()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _needs_length(self, piece: _Piece) -> bool:
        return bool(piece.decoder.learned_positions)

    def _is_complete(self, group: _Group, present: Collection[str]) -> bool:
        """Whether the leaves that were read for a part have come; one for which nothing more was
        read is made of those of the part before. Raises WeightMismatch where some have not.
        """
        if group.leaves:
            names, group.leaves = sorted(group.leaves), set()
            missing = [name for name in names if name not in present]
            if missing and len(missing) < len(names):
                raise WeightMismatch(
                    f"{listed(missing)} did not come, and is one weight with "
                    f"{listed([n for n in names if n in present])}: send all of them in one update."
                )
            group.is_complete = not missing
        return group.is_complete

    def _replace(self, name: str, new: Part) -> None:
        """Copy the values of a part into the memory of the model's own."""
        old = self._old.get(name)
        assert old is not None, f"the model has no part {name}"
        if difference := _difference(old, new):
            raise LoadError(
                f"The new values of {name} need another {difference} than those of the start: "
                "reload them with collective_rpc('reload_weights', ...)."
            )
        self.is_torn = True
        pairs = (tensors_within(each, with_addresses=False) for each in (old, new))
        for mine, its in zip(*pairs, strict=True):
            if mine.data_ptr() != its.data_ptr():
                mine.copy_(its)


@dataclass
class _Group:
    """The leaves that were read since the last part was made, and whether those had all come."""

    leaves: set[str] = field(default_factory=set)
    is_complete: bool = False


def _stored_in(
    folder: Path,
    decoder: Decoder,
    load_format: LoadFormat,
    family: Family,
    storage: Storage | None,
) -> tuple[list[StoredTensor], Mapping[str, TensorEntry] | None]:
    """The tensors of the model's checkpoint, and the names in its files; None: there are none."""
    if load_format in ("dummy", "sharded_state"):
        stored = tensor_map(family, decoder)
        return ([s.in_codes(storage) for s in stored] if storage else stored), None
    with closing(open_files(load_format, folder, decoder)) as files:
        return match(family, decoder, files, storage), dict(files.entries)


class _CheckedTensors(NamedTensors):
    """The tensors that have come for a piece, which are checked before they are read."""

    def __init__(self, piece: _Piece, check: Callable[[str, Tensor], None]) -> None:
        super().__init__(piece.arrived.items())
        self._left = piece.arrived.keys() - piece.checked
        self._check = check

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if name in self._left:
            self._left.discard(name)
            self._check(name, tensor)
        return tensor


def _sums(tensor: Tensor) -> list[int]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    end = len(data) // _LINE * _LINE
    lines = data[:end].view(torch.int64).view(-1, _LINE // 8)
    sums = []
    for each in (lines.sum(0), lines.sum(1)):  # as numbers of 64 bits, without a wider copy
        places = torch.arange(1, len(each) + 1, device=each.device)
        sums.append(int((each * places).sum()))
    return [*sums, *data[end:].tolist()]


def _has_nan(tensor: Tensor) -> bool:
    """Whether a tensor has NaN. Its sum says that it has none, in the time of a copy."""
    if tensor.element_size() == 1:
        tensor = tensor.float()
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


def _difference(old: Any, new: Any, name: str = "form") -> str:
    """The name of a field in which two parts differ apart from their values; empty: of none."""
    if isinstance(old, Tensor) or isinstance(new, Tensor):
        is_same = (
            isinstance(old, Tensor)
            and isinstance(new, Tensor)
            and (old.shape, old.dtype) == (new.shape, new.dtype)
        )
        return "" if is_same else name
    if type(old) is not type(new):
        return name
    if is_dataclass(old):
        pairs = ((f.name, getattr(old, f.name), getattr(new, f.name)) for f in fields(old))
        return next((found for n, a, b in pairs if (found := _difference(a, b, n))), "")
    if isinstance(old, list | tuple):
        if len(old) != len(new):
            return name
        each = (_difference(a, b, name) for a, b in zip(old, new, strict=True))
        return next(filter(None, each), "")
    is_fact = isinstance(old, bool | int | float | str | torch.dtype)
    return name if is_fact and old != new else ""
