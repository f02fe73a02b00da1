"""Facts of a loaded model that all updates of its weights need: pieces, and names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quire.errors import LoadError, NotBuiltYet
from quire.models.cutting.sharding import own_parts
from quire.models.decoder import DecoderModel
from quire.models.formats.storage import Storage
from quire.models.layers import make_look_up
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.leaves import parts_of
from quire.models.loading.load_formats import open_files
from quire.models.loading.matching import match
from quire.models.loading.model_parts import Part, PartMemory
from quire.models.loading.options import ModelOptions
from quire.models.loading.read_ahead import Read
from quire.models.loading.readers.checkpoint_files import TensorEntry
from quire.models.loading.rounding.recipes import for_decoder
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.loading.weights import own_part
from quire.models.parameters import Parameter, parameters
from quire.models.rules import Family, StoredTensor, tensor_map
from quire.models.spec import Decoder
from quire.models.updates.names import CheckpointNames
from quire.models.updates.old_memory import PlainWriter, WeightWriter
from quire.models.updates.pieces import pieces_of
from quire.models.updates.row_targets import RowPlace, RowPlaces
from quire.ops import Ops
from quire.ops.formats.row_stack import RowStack

_READ_BYTES = 4 << 20
"""Bytes of a model's rows that are read at once."""
_SHORT = 1
"""Positions that tables of a layer's piece have: they are not copied."""


@dataclass(eq=False)
class PieceFacts:
    """A piece of a model: its leaves, the tensors of the checkpoint that have them, the names of
    those that change all of it, and the positions that its tables have. `matrices`: the names of
    tensors that are one leaf which is a matrix, as it is.
    """

    decoder: Decoder
    leaves: dict[str, Parameter]
    length: int
    stored: list[StoredTensor] = field(default_factory=list)
    required: set[str] = field(default_factory=set)
    matrices: set[str] = field(default_factory=set)


class UpdatePlan:
    """Facts of `model`, which `load_model` has loaded with the other arguments. Its weights may be
    replaced by others of the same form meanwhile.
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
        target: DecoderModel | None = None,
        writer: WeightWriter | None = None,
        has_encoders: bool = False,
        fixed: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """`writer`: of the provider that has packed the weights; None: it has none. has_encoders:
        other parts of the model run, too, and keep their weights. `fixed`: tensors of the files
        that are not weights, and stay as they are.

        Raises NotBuiltYet for weights that are not kept on the device, LoadError if the names in
        the checkpoint cannot be read.
        """
        if options.make_placement is not None:
            hint = "Start the engine without offloaded weights."
            raise NotBuiltYet("method", "start_weight_update with offloaded weights", hint)
        self.model, self.ops, self.target, self.fixed = model, ops, target, fixed
        self.writer = writer or PlainWriter()
        self.dtype, self.device = dtype, torch.device(device)
        recipe = for_decoder(options.recipe, family, decoder)
        self.options = replace(options, recipe=recipe, stored=None, aux_layers=(), stage=None)
        group = options.group
        own = own_part(decoder, recipe, storage, group, options.stage)
        self.turns_by_shape = family.turns_by_shape
        self.cut = {} if group is None else own_parts(decoder, own, group.rank, group.size)
        self.whole = parameters(decoder)
        """The leaves of all workers' parts together."""
        length = max_model_len or decoder.context or _SHORT
        pieces = pieces_of(own)
        self.pieces = [
            PieceFacts(
                d, parameters(d), _SHORT if len(pieces) > 1 and not d.learned_positions else length
            )
            for d in pieces
        ]
        stored, entries = _stored_in(folder, decoder, load_format, family, storage)
        self.names = CheckpointNames(family, decoder, stored, entries, has_encoders=has_encoders)
        self._place(stored)
        self.rows = self._row_places()

    def build(
        self,
        piece: PieceFacts,
        read: Read,
        *,
        note: Callable[[str, Part], None],
        coded: Collection[str] = (),
        memory: PartMemory | None = None,
    ) -> None:
        """Make the parts of a piece as at the start, of the whole leaves that `read` gives, those
        of `coded` in codes. `note` and `memory`: see `ModelOptions`.
        """
        weights = WeightBuilder(
            piece.leaves,
            parts_of(read, self.whole, self.cut),
            dtype=self.dtype,
            device=self.device,
            coded=coded,
            folder=None,
            cache_scales={},
            sources={},
            cut=self.cut,
        )
        DecoderModel(
            *(piece.decoder, weights, self.ops),
            max_model_len=piece.length,
            options=replace(self.options, note_part=note, memory=memory),
            target=self.target,
        )
        weights.finish()

    def embedding_in(self, part: Any, shape: Sequence[int]) -> RowStack:
        """The embedding as the model looks it up in a part that has it, some rows at a time."""
        count, width = shape

        def read() -> Iterator[Tensor]:
            look_up = make_look_up(self.ops, part, scale=1.0)
            step = max(1, _READ_BYTES // (width * self.dtype.itemsize))
            for first in range(0, count, step):
                yield look_up(torch.arange(first, min(first + step, count), device=self.device))

        return RowStack((count, width), self.dtype, read)

    def _place(self, stored: Sequence[StoredTensor]) -> None:
        """Give each stored tensor to the piece that has its leaves."""
        piece_of = {name: piece for piece in self.pieces for name in piece.leaves}
        for each in stored:
            found = {
                id(piece_of[p.name]): piece_of[p.name] for p in each.leaves if p.name in piece_of
            }
            if len(found) > 1:
                raise LoadError(
                    "A tensor of this model's checkpoint has weights of several layers: its "
                    "weights cannot be updated in place. Use collective_rpc('reload_weights', ...)."
                )
            for piece in found.values():  # none: another stage has it
                piece.stored.append(each)
                piece.required.update(self.names.required[each.name])
                if each.sole_leaf is not None and each.sole_leaf.kind == "matrix":
                    piece.matrices.add(each.name)

    def _row_places(self) -> RowPlaces:
        """The places of tensors whose rows are those of parts of this worker, as they are."""
        stored_of = {
            leaf.name: each.name
            for piece in self.pieces
            if all(each.layout is None for each in piece.stored)  # others come whole
            for each in piece.stored
            if (leaf := each.sole_leaf) is not None and leaf.shape == each.shape
        }
        leaves = {name: leaf for piece in self.pieces for name, leaf in piece.leaves.items()}
        tensors = {name for name, part in self.model.named_parts() if isinstance(part, Tensor)}
        of_part: dict[str, dict[str, str]] = {}
        of_tensor: dict[str, list[RowPlace]] = {}
        for part, weights in self.model.leaves_of.items():
            biases = [] if part in tensors else _biases_of(weights, leaves)
            if biases is None or any(
                name not in stored_of or name in self.cut for name in (*weights, *biases)
            ):
                continue
            of_part[part] = {name: stored_of[name] for name in (*weights, *biases)}
            for are_biases, names in ((False, weights), (True, biases)):
                first = 0
                for name in names:
                    place = RowPlace(part, first, are_biases)
                    of_tensor.setdefault(stored_of[name], []).append(place)
                    first += leaves[name].shape[0]
        return RowPlaces(of_tensor, of_part)


def _biases_of(weights: Sequence[str], leaves: Mapping[str, Parameter]) -> list[str] | None:
    """The biases of weights, one for each or none; None where some have one and others not."""
    names = [name.removesuffix(".weight") + ".bias" for name in weights]
    found = [name for name in names if name in leaves]
    return found if len(found) in (0, len(names)) else None


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
