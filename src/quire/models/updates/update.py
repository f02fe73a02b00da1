"""One update of a model's weights in place: a tensor of the checkpoint after another, in any order.

A piece of the model (pieces.py) is loaded as at the start, with the same rounding and packing, as
soon as all of its tensors are there, and its values replace those that the model has. A tensor that
comes by its rows, and whose rows are some of a weight, is written as they come (row_targets.py). So
the model computes with a mixture until the update is complete: `is_torn` says so, and nobody may
run it then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.errors import InvalidType, LoadError, WeightMismatch
from quire.models.loading.leaves import StoredLeaves
from quire.models.loading.matching import fitted, listed
from quire.models.loading.model_parts import Part
from quire.models.loading.readers.dtype_names import dtype_name
from quire.models.loading.readers.named_tensors import NamedTensors
from quire.models.parameters import Parameter
from quire.models.rules import StoredTensor
from quire.models.updates.alike import Different, is_same, pairs_of
from quire.models.updates.names import Found
from quire.models.updates.old_memory import OldMemory
from quire.models.updates.plan import PieceFacts, UpdatePlan
from quire.models.updates.row_targets import RowTarget, RowWriter, target_of
from quire.models.updates.values import Fingerprint, check_values
from quire.ops import CodedWeight
from quire.ops.formats.row_stack import RowStack

logger = logging.getLogger(__name__)


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
    written: set[str] = field(default_factory=set)
    """Names of tensors whose rows were written as they came."""

    @property
    def leaves_that_came(self) -> set[str]:
        """Leaves of the tensors that have come."""
        came = self.arrived.keys() | self.written
        return {leaf.name for each in self.stored if each.name in came for leaf in each.leaves}


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
        self._writers: dict[str, RowWriter | None] = {}
        """A provider's writers of the rows of parts, by their names, as far as they were asked
        for.
        """
        self._seen: dict[str, None] = {}
        self._tied: dict[str, Callable[[], tuple[object, ...]]] = {}
        """Ways to the fingerprints of the embedding and of a head that is the same weight."""
        self._is_repair = is_repair
        self._is_over = False
        self.is_torn = is_repair

    @property
    def plan(self) -> UpdatePlan:
        """The facts of the model."""
        return self._plan

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

    def add(self, name: str, tensor: Tensor | RowStack) -> bool:
        """Take a tensor of the checkpoint, which is not copied before `keep` or until its piece is
        loaded, or its rows, which are read now; returns whether it is one of this model's.

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
            if piece.arrived or piece.written:
                self._load(piece)
        self._check_tied_head()
        self.is_torn = False
        if missing:
            logger.warning("%d weights were not sent, and stay: %s.", len(missing), listed(missing))
        return UpdateReport(len(self._seen), missing)

    # tensors

    def _add(self, name: str, given: Tensor | RowStack) -> bool:
        if not isinstance(name, str) or not isinstance(given, Tensor | RowStack):
            raise InvalidType(
                "weights", (name, type(given).__name__), "pairs of a name and a tensor"
            )
        if self._names.is_tied_head(name):
            self._once(name)
            head = self._fingerprint(name, given)
            self._tied["head"] = lambda: head
            return True
        if (fixed := self._plan.fixed.get(name)) is not None:
            tensor = _whole(given)
            if fixed.shape != tensor.shape or not torch.equal(fixed, tensor.to(fixed)):
                raise WeightMismatch(f"{name} is not a weight, and has to be that of the start.")
            return False
        found = self._names.find(name)
        if found is None:
            return False
        self._once(found.part)
        if (piece := self._of_name.get(found.part)) is None:
            return False  # another stage has it
        self._check(found, piece, given)
        if isinstance(given, RowStack) and (target := self._target(found.part)) is not None:
            self._write_rows(found, given, target)
            piece.written.add(found.part)
        else:
            tensor = _whole(given)
            self._look_early(found, piece, tensor)
            piece.arrived[found.part] = tensor
            if isinstance(given, Tensor):
                piece.held.add(found.part)
        piece.missing.discard(found.part)
        if not piece.missing:
            self._load(piece)
        return True

    def _look_early(self, found: Found, piece: _Piece, tensor: Tensor) -> None:
        """Check a whole tensor's values before they are written, where that is of use."""
        if self._needs_fingerprint(found, tensor):
            embedding = self._fingerprint(found.part, tensor)
            self._tied["embedding"] = lambda: embedding
        elif not self.is_torn:
            self._check_values(found.part, tensor)
        else:
            # once something is written, an early look would save nothing: it is checked while it is
            # packed
            return
        piece.checked.add(found.part)

    def _needs_fingerprint(self, found: Found, given: Tensor | RowStack) -> bool:
        """Whether the fingerprint of an embedding is needed now: a head may have to equal it, and
        the model does not get its values as they came. Where it does, note that they are read from
        it again if a head comes, too.
        """
        if not (self._names.is_embedding(found.stored) and self._names.has_tied_head):
            return False
        kept = self._old.get("embed.weight", self._old.get("embed"))
        if kept is None or given.dtype is not self._plan.dtype:
            return True
        if found.part not in self._plan.rows.of_tensor:
            return True
        rows = self._plan.embedding_in(kept, found.stored.shape)
        self._tied["embedding"] = lambda: self._fingerprint(found.part, rows)
        return False

    def _once(self, name: str) -> None:
        if name in self._seen:
            raise WeightMismatch(f"{name} came twice in one update.")
        self._seen[name] = None

    def _check(self, found: Found, piece: _Piece, tensor: Tensor | RowStack) -> None:
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
        check_values(self._plan.writer, name, tensor)

    def _fingerprint(self, name: str, given: Tensor | RowStack) -> tuple[object, ...]:
        """Values by which tensors differ, but for chance. Raises LoadError for NaN."""
        found = Fingerprint(self._plan.writer, name)
        for rows in [given] if isinstance(given, Tensor) else given.read():
            found.add(rows)
        return given.dtype, tuple(given.shape), found.close()

    # rows

    def _target(self, name: str) -> RowTarget | None:
        """The places that a tensor's rows go to as they are; None: they do not."""
        places = self._plan.rows.of_tensor.get(name)
        if places is None:
            return None
        for place in places:
            if place.part not in self._writers:
                part = self._old.get(place.part)
                self._writers[place.part] = self._plan.writer.open_rows(part)
        return target_of(places, self._old, self._writers, self._plan.dtype)

    def _write_rows(self, found: Found, given: RowStack, target: RowTarget) -> None:
        """Write a tensor's rows as they come."""
        name, first = found.part, 0
        looked_at = None
        if self._needs_fingerprint(found, given):
            looked_at = Fingerprint(self._plan.writer, name)
        for rows in given.read():
            if looked_at is not None:
                looked_at.add(rows)
            elif not (self.is_torn and target.looks):
                self._check_values(name, rows)
            self.is_torn = True
            if target.write(first, rows, is_slice=True):
                self._check_values(name, rows)
            first += rows.shape[0]
        assert first == given.shape[0], "all rows"
        if looked_at is not None:
            embedding = given.dtype, given.shape, looked_at.close()
            self._tied["embedding"] = lambda: embedding

    def _write_arrived(self, piece: _Piece) -> None:
        """Write the tensors of a piece that have come whole, and have places for their rows. Raises
        WeightMismatch where others of one weight are missing.
        """
        targets = {name: target for name in piece.arrived if (target := self._target(name))}
        parts = {
            place.part: None
            for name in (*piece.written, *targets)
            for place in self._plan.rows.of_tensor[name]
        }
        for part in parts:
            _require_whole(self._plan.rows.of_part[part], piece.leaves_that_came)
        for name, target in targets.items():
            tensor = piece.arrived.pop(name)
            if not (target.looks or name in piece.checked):
                self._check_values(name, tensor)
            self.is_torn = True
            if target.write(0, tensor, is_slice=False):
                self._check_values(name, tensor)

    def _check_tied_head(self) -> None:
        if len(self._tied) > 1 and self._tied["head"]() != self._tied["embedding"]():
            raise WeightMismatch(
                "The head differs from the embedding, and is the same weight in this model "
                "(tie_word_embeddings)."
            )

    # pieces

    def _load(self, piece: _Piece) -> None:
        """Load a piece with what has come, and copy what is complete into the model's memory."""
        self._write_arrived(piece)
        if piece.arrived:
            self._load_others(piece)
        if self._plan.device.type == "cuda":
            # copies may still read what has come, whose memory is the sender's
            torch.cuda.synchronize(self._plan.device)
        piece.arrived.clear()
        piece.held.clear()
        piece.checked.clear()
        piece.written.clear()

    def _load_others(self, piece: _Piece) -> None:
        """Make the parts of a piece that are not rows of tensors as they are."""
        with closing(_CheckedTensors(piece, self._check_values)) as files:
            here = [s for s in piece.stored if any(n in files.entries for n in s.parts())]
            fitted(here, frozenset(files.entries), files)
            self._build(piece, files, here)

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
            if part is not self._old.get(name) and self._is_complete(group, present):
                self._replace(name, part)

        layouts = [s for s in piece.stored if s.layout is not None and not s.layout.is_widened]
        by_rows = {
            part
            for part, leaves in plan.rows.of_part.items()
            if piece.facts.leaves.keys() & leaves and all(map(self._target, leaves.values()))
        }
        memory = OldMemory(
            *(self._old, plan.writer, have_come, before_write, files.check_skipped, by_rows)
        )
        files.memory = memory
        coded = frozenset(leaf.name for s in layouts for leaf in s.leaves)
        plan.build(piece.facts, read, note=note, coded=coded, memory=memory)

    def _is_complete(self, group: _Group, present: Collection[str]) -> bool:
        """Whether the leaves that were read for a part have come; one for which nothing more was
        read is made of those of the part before. Raises WeightMismatch where some have not.
        """
        if group.leaves:
            names, group.leaves = sorted(group.leaves), set()
            group.is_complete = _require_whole(names, present)
        return group.is_complete

    def _replace(self, name: str, new: Part) -> None:
        """Copy the values of a part into the memory of the model's own."""
        old = self._old.get(name)
        assert old is not None, f"the model has no part {name}"
        try:
            pairs = [(mine, its) for mine, its in pairs_of(old, new) if not is_same(mine, its)]
        except Different as error:
            raise LoadError(
                f"The new values of {name} need another {error} than those of the start: reload "
                "them with collective_rpc('reload_weights', ...)."
            ) from None
        self.is_torn = True
        for mine, its in pairs:
            mine.copy_(its)


def _require_whole(names: Collection[str], present: Collection[str]) -> bool:
    """Whether the leaves of one weight have come. Raises WeightMismatch where some have not."""
    missing = sorted(name for name in names if name not in present)
    if missing and len(missing) < len(names):
        raise WeightMismatch(
            f"{listed(missing)} did not come, and is one weight with "
            f"{listed(sorted(n for n in names if n in present))}: send all of them in one update."
        )
    return not missing


def _whole(given: Tensor | RowStack) -> Tensor:
    """A tensor, or all of its rows in memory of their own."""
    if isinstance(given, Tensor):
        return given.detach()
    whole, first = torch.empty(given.shape, dtype=given.dtype), 0
    for rows in given.read():
        whole[first : first + len(rows)] = rows
        first += len(rows)
    return whole


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
