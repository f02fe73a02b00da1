"""Whole tensors of a model's checkpoint with patches: a few new values in each of some tensors.

The values that no patch changes are those that the model has, where they can be read back. Of
weights that are kept in another form, or in part, they are those of the files that the model was
loaded from, with the patches of all updates since.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor

from quire.distributed.named_tensors import TensorMeta, TensorPatch
from quire.errors import LoadError, WeightMismatch, WeightUpdateError
from quire.models.loading.load_formats import WeightFiles
from quire.models.loading.model_parts import Part
from quire.models.loading.readers.dtype_names import dtype_name
from quire.models.updates.current import current_tensors
from quire.models.updates.plan import PieceFacts, UpdatePlan

_NO_FILES = (
    "Weights that are kept in another form than the checkpoint's, or on several workers, are "
    "patched in the values of the files that they were loaded from, and these weights are of none: "
    "send whole tensors by another backend, or reload them first."
)


class PatchedWeights:
    """The weights of a model that patches change.

    Invariant: `_earlier` has the patches of updates that all workers have ended, for what is not
    read back from the model.
    """

    def __init__(
        self, plan: UpdatePlan, open_files: Callable[[], WeightFiles] | None, loaded_at: float
    ) -> None:
        """`open_files`: of the weights that the model has now, as they were at this time (of
        `time.time`); None: they are in no files.
        """
        self._plan = plan
        self._open_files = open_files
        self._loaded_at = loaded_at
        self._is_readable: dict[PieceFacts, bool] = {}
        self._earlier: dict[str, TensorPatch] = {}
        self._new: dict[str, TensorPatch] = {}

    def tensors(self, patches: Iterable[TensorPatch]) -> Iterator[dict[str, Tensor]]:
        """The tensors of each piece that patches change, with those that change together with
        them; `commit` says that all workers have loaded them.

        Raises before the first ones WeightMismatch for a name or a shape that is not one of the
        model's, LoadError for another type than that of the files, WeightUpdateError where values
        are needed and are in no files, or in files that have changed.
        """
        self._new = {}
        given = self._by_name(patches)
        old = dict(self._plan.model.named_parts())
        touched = [p for p in self._plan.pieces if not given.keys().isdisjoint(_names_of(p))]
        from_files = [piece for piece in touched if not self._can_read(piece, old)]
        with ExitStack() as stack:
            files: WeightFiles | None = None
            if from_files:
                if self._open_files is None:
                    raise WeightUpdateError(_NO_FILES)
                files = stack.enter_context(closing(self._open_files()))
                self._check_files(files, from_files, given)
            for piece in touched:
                if files is not None and piece in from_files:
                    tensors = self._of_files(files, piece, given)
                elif (found := current_tensors(self._plan, piece, old)) is not None:
                    tensors = found
                else:
                    raise WeightUpdateError(_NO_FILES)
                for name in tensors.keys() & given.keys():
                    _apply(given[name], tensors[name])
                yield tensors

    def commit(self) -> None:
        """All workers have loaded the tensors of the last patches."""
        self._earlier |= self._new
        self._new = {}

    def _by_name(self, patches: Iterable[TensorPatch]) -> dict[str, TensorPatch]:
        """One patch for each tensor, by the name of the checkpoint."""
        found: dict[str, list[TensorPatch]] = {}
        for patch in patches:
            name, shape = patch.meta.name, patch.meta.shape
            if (place := self._plan.names.find(name)) is None:
                continue
            part = place.stored.parts()[place.part]
            if not part.has_shape(shape):
                raise WeightMismatch(
                    f"{name} has the shape {list(shape)} instead of {list(part.shape)}."
                )
            found.setdefault(place.part, []).append(patch)
        return {name: _merged(each) for name, each in found.items()}

    def _can_read(self, piece: PieceFacts, old: Mapping[str, Part]) -> bool:
        """Whether the values of a piece can be read back."""
        if piece not in self._is_readable:
            self._is_readable[piece] = current_tensors(self._plan, piece, old) is not None
        return self._is_readable[piece]

    def _check_files(
        self, files: WeightFiles, pieces: Sequence[PieceFacts], given: Mapping[str, TensorPatch]
    ) -> None:
        names = [name for piece in pieces for name in _names_of(piece)]
        for file in {files.entries[name].file: None for name in names if name in files.entries}:
            if _changed_at(file) > self._loaded_at:
                raise WeightUpdateError(
                    f"{file} has changed since the weights were loaded from it, and patches "
                    "need the values of before: reload the weights first."
                )
        for name in (name for name in names if name in given):
            if name not in files.entries:
                raise WeightMismatch(f"{name} is not in the files of the checkpoint.")
            kind, stored = dtype_name(given[name].meta.dtype), files.entries[name].dtype
            if kind != stored:
                raise LoadError(
                    f"{name} came as {kind}, and the files of the checkpoint have it as "
                    f"{stored}: patches of weights in another form have the type of the files."
                )

    def _of_files(
        self, files: WeightFiles, piece: PieceFacts, given: Mapping[str, TensorPatch]
    ) -> dict[str, Tensor]:
        """The tensors of a piece before the new patches, which are noted."""
        found = {}
        for name in (name for name in _names_of(piece) if name in files.entries):
            tensor = files.read(name)
            earlier, new = self._earlier.get(name), given.get(name)
            if earlier is not None or new is not None:
                tensor = tensor.clone()  # the file's pages are not written
            if earlier is not None:
                _apply(earlier, tensor)
            if new is not None:
                self._new[name] = _kept(earlier, new, tensor)
            found[name] = tensor
        return found


def _changed_at(file: Path) -> float:
    """The time at which a file was written, or put into its place; infinite where it is gone."""
    try:
        return file.stat().st_ctime
    except OSError:
        return math.inf


def _names_of(piece: PieceFacts) -> list[str]:
    """The names of the checkpoint's tensors of a piece."""
    return [name for stored in piece.stored for name in stored.parts()]


def _merged(patches: Sequence[TensorPatch]) -> TensorPatch:
    """One patch with each place once: of several values the last."""
    places = torch.cat([p.places for p in patches if p.places is not None]).long()
    order = torch.argsort(places, stable=True)
    in_order = places[order]
    is_last = torch.ones_like(in_order, dtype=torch.bool)
    is_last[:-1] = in_order[1:] != in_order[:-1]
    chosen = order[is_last]
    values = torch.cat([p.values for p in patches])[chosen]
    return TensorPatch(patches[-1].meta, places[chosen].to(torch.int32), values)


def _kept(earlier: TensorPatch | None, new: TensorPatch, tensor: Tensor) -> TensorPatch:
    """Both patches of `tensor`, which has the earlier one; the whole tensor where it is smaller."""
    both = new
    if earlier is not None:
        both = earlier if earlier.places is None else _merged([earlier, new])
    assert both.places is None or both.places.dtype is torch.int32
    if both.places is not None and both.places.nbytes + both.values.nbytes < tensor.nbytes:
        return both
    meta = TensorMeta(new.meta.name, tensor.dtype, tuple(tensor.shape))
    whole = TensorPatch(meta, None, tensor.reshape(-1).clone())
    _apply(new, whole.values)
    return whole


def _apply(patch: TensorPatch, tensor: Tensor) -> None:
    """Write the values of a patch into a tensor."""
    flat, values = tensor.view(-1), patch.values.to(tensor.dtype)
    if patch.places is None:
        flat.copy_(values)
        return
    if tensor.dtype.itemsize == 1:  # torch has no places of floats of 8 bits
        flat, values = flat.view(torch.uint8), values.view(torch.uint8)
    flat[patch.places.long()] = values
