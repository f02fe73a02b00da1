"""One update of a model's weights in place: a tensor of the checkpoint after another, in any order.

A piece of the model (pieces.py) is loaded as at the start, with the same rounding and packing, as
soon as all of its tensors are there, and its values replace those that the model has. So the model
computes with a mixture until the update is complete: `is_torn` says so, and nobody may run it then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from quire.errors import InvalidType, LoadError, WeightMismatch
from quire.models.decoder import DecoderModel
from quire.models.loading.leaves import StoredLeaves, parts_of
from quire.models.loading.matching import fitted, listed
from quire.models.loading.model_parts import Part
from quire.models.loading.readers.dtype_names import dtype_name
from quire.models.loading.readers.named_tensors import NamedTensors
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.parameters import Parameter
from quire.models.rules import StoredTensor
from quire.models.updates.names import Found
from quire.models.updates.old_memory import OldMemory
from quire.models.updates.plan import PieceFacts, UpdatePlan
from quire.ops import CodedWeight

logger = logging.getLogger(__name__)

_LINE = 4096
"""Bytes of a line of a fingerprint."""


@dataclass(eq=False)
class _Piece:
    """The tensors that have come of a piece of the model; the memory of those in `held` is the
    sender's.
    """

    facts: PieceFacts
    stored: list[StoredTensor]
    missing: set[str]
    arrived: dict[str, Tensor] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    checked: set[str] = field(default_factory=set)
    """Names of tensors that were found to have no NaN."""


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The end of an update: how many tensors have come, and which tensors of the checkpoint have
    not, whose weights are those of before.
    """

    num_tensors: int
    unchanged: list[str]


class WeightUpdate:
    """An update of a model's weights.

    Invariants: each tensor is used once; what is one weight in the model changes as a whole. After
    an exception the update is over, and the model as it was unless `is_torn`.
    """

    def __init__(self, plan: UpdatePlan, *, is_repair: bool = False) -> None:
        """is_repair: the model is torn, and every tensor has to come."""
        self._plan, self._names = plan, plan.names
        self._old: Mapping[str, Part] = dict(plan.model.named_parts())
        self._pieces = [_Piece(p, list(p.stored), set(p.required)) for p in plan.pieces]
        self._of_name = {
            name: piece for piece in self._pieces for each in piece.stored for name in each.parts()
        }
        self._seen: dict[str, None] = {}
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

    def _add(self, name: str, tensor: Tensor) -> bool:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise InvalidType(
                "weights", (name, type(tensor).__name__), "pairs of a name and a tensor"
            )
        tensor = tensor.detach()
        if self._names.is_tied_head(name):
            self._once(name)
            self._tied["head"] = self._look_at(name, tensor)
            return True
        if (fixed := self._plan.fixed.get(name)) is not None:
            if fixed.shape != tensor.shape or not torch.equal(fixed, tensor.to(fixed)):
                raise WeightMismatch(f"{name} is not a weight, and has to be that of the start.")
            return False
        found = self._names.find(name)
        if found is None:
            return False
        self._once(found.part)
        if (piece := self._of_name.get(found.part)) is None:
            return False  # another stage has it
        self._check(found, piece, tensor)
        if self._names.is_embedding(found.stored) and self._names.has_tied_head:
            self._tied["embedding"] = self._look_at(found.part, tensor)
            piece.checked.add(found.part)
        # once something is written, an early look would save nothing: it is checked while it is
        # packed
        elif not self.is_torn:
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
        if self._plan.turns_by_shape and "transpose" in stored.steps and not part.has_shape(shape):
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
        found = self._plan.writer.look_at(tensor, adds_up=False)
        if _has_nan(tensor) if found is None else found[0]:
            raise LoadError(f"{name} has NaN among its values.")

    def _look_at(self, name: str, tensor: Tensor) -> tuple[object, ...]:
        """Check a tensor's values, and return numbers that differ for tensors that do, but for
        chance: a copy would take their memory.
        """
        tensor = tensor.contiguous()  # which decides who looks, and so which numbers they are
        found = self._plan.writer.look_at(tensor, adds_up=True)
        has_nan, sums = (_has_nan(tensor), _sums(tensor)) if found is None else found
        if has_nan:
            raise LoadError(f"{name} has NaN among its values.")
        return tensor.dtype, tuple(tensor.shape), *sums

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
            self._build(piece, files, here)
        piece.arrived.clear()
        piece.held.clear()
        piece.checked.clear()

    def _build(self, piece: _Piece, files: _CheckedTensors, here: Sequence[StoredTensor]) -> None:
        plan, group, leaves = self._plan, _Group(), StoredLeaves(files, here)
        present = {leaf.name for each in here for leaf in each.leaves}

        def read(leaf: Parameter) -> Tensor | CodedWeight:
            group.leaves.add(leaf.name)
            if leaf.name in present:
                return leaves(leaf)
            if any(s.layout is not None for s in piece.stored):
                raise WeightMismatch(
                    f"{leaf.name} is missing: a layer with quantised weights has to come whole."
                )
            # in place of what did not come; nothing that is made of it is copied
            return torch.zeros((), dtype=plan.dtype).expand(leaf.shape)

        def have_come(leaves: Sequence[str]) -> bool:
            names = [leaf + end for leaf in leaves for end in (".weight", ".bias")]
            return all(name in present for name in names if name in piece.facts.leaves)

        def before_write() -> None:
            self.is_torn = True

        def note(name: str, part: Part) -> None:
            if self._is_complete(group, present):
                self._replace(name, part)

        layouts = [s for s in piece.stored if s.layout is not None and not s.layout.is_widened]
        memory = OldMemory(self._old, plan.writer, have_come, before_write, files.check_skipped)
        files.memory = memory
        weights = WeightBuilder(
            piece.facts.leaves,
            parts_of(read, plan.whole, plan.cut),
            dtype=plan.dtype,
            device=plan.device,
            coded=frozenset(leaf.name for s in layouts for leaf in s.leaves),
            folder=None,
            cache_scales={},
            sources={},
            cut=plan.cut,
        )
        DecoderModel(
            *(piece.facts.decoder, weights, plan.ops),
            max_model_len=piece.facts.length,
            options=replace(plan.options, note_part=note, memory=memory),
            target=plan.target,
        )
        weights.finish()
        if plan.device.type == "cuda":
            # copies may still read what has come, whose memory is the sender's
            torch.cuda.synchronize(plan.device)

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
        try:
            pairs = [(mine, its) for mine, its in _pairs(old, new) if not _is_same(mine, its)]
        except _Different as error:
            raise LoadError(
                f"The new values of {name} need another {error} than those of the start: reload "
                "them with collective_rpc('reload_weights', ...)."
            ) from None
        self.is_torn = True
        for mine, its in pairs:
            mine.copy_(its)


@dataclass
class _Group:
    """The leaves that were read since the last part was made, and whether those had all come."""

    leaves: set[str] = field(default_factory=set)
    is_complete: bool = False


class _CheckedTensors(NamedTensors):
    """The tensors that have come for a piece. Each is checked before it is read, or while it is
    packed where its values are those of one weight that is.
    """

    def __init__(self, piece: _Piece, check: Callable[[str, Tensor], None]) -> None:
        super().__init__(piece.arrived.items())
        self._left = piece.arrived.keys() - piece.checked
        self._skipped: list[str] = []
        self._matrices = piece.facts.matrices
        self._check = check
        self.memory: OldMemory | None = None

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        if name in self._left:
            self._left.discard(name)
            if self.memory is not None and self.memory.looks and name in self._matrices:
                self._skipped.append(name)
            else:
                self._check(name, tensor)
        return tensor

    def check_skipped(self) -> None:
        """Check those that were to be looked at while they were packed."""
        for name in self._skipped:
            self._check(name, super().read(name))


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
    if not tensor.is_floating_point():
        return False
    if tensor.element_size() == 1:
        # torch does not add up floats of 8 bits
        tensor = tensor.float()
    # infinities of both signs have such a sum, too
    return bool(tensor.sum().isnan()) and bool(tensor.isnan().any())


class _Different(Exception):
    """Names the field in which two parts differ apart from their values."""


def _pairs(old: Any, new: Any, name: str = "form") -> Iterator[tuple[Tensor, Tensor]]:
    """The tensors of two parts that are alike, but for those that are places in memory. Raises
    _Different.
    """
    if old is new:
        return
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise _Different(name)
        yield old, new
    elif type(old) is not type(new):
        raise _Different(name)
    elif is_dataclass(old):
        for each in fields(old):
            if not each.metadata.get("addresses"):
                yield from _pairs(getattr(old, each.name), getattr(new, each.name), each.name)
    elif isinstance(old, list | tuple):
        if len(old) != len(new):
            raise _Different(name)
        for a, b in zip(old, new, strict=True):
            yield from _pairs(a, b, name)
    elif isinstance(old, bool | int | float | str | torch.dtype) and old != new:
        raise _Different(name)


def _is_same(old: Tensor, new: Tensor) -> bool:
    """Whether two tensors are in the same memory."""
    return old.data_ptr() == new.data_ptr()
