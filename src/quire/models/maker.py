"""Makes the weights of a decoder's parts: leaves, packed as recipe and ops provider have it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from quire.distributed.worker_group import WorkerGroup
from quire.errors import NotBuiltYet
from quire.models.adapters.adapted_ops import AdaptedExperts, AdaptedLinear, adapted
from quire.models.adapters.adapted_projection import AdaptedSharedProjection
from quire.models.adapters.banks import AdapterBanks
from quire.models.cutting.sharding import LeafPart, own_segments
from quire.models.layers import Projection, SharedProjection
from quire.models.loading.model_parts import Part, PartMemory
from quire.models.loading.packed_weights import PackedWeights
from quire.models.loading.separate_products import SeparateLinear, with_separate_products
from quire.models.loading.weight_builder import WeightBuilder
from quire.models.positions import Rope
from quire.models.rotary_tables import log_positions, rotary_table
from quire.models.spec import Norm
from quire.ops import (
    CodedWeight,
    ExpertWeights,
    LinearWeight,
    NormWeight,
    Ops,
    RotaryTable,
)
from quire.ops.formats.row_stack import RowStack
from quire.ops.quantized import WeightFormat
from quire.quantization import Recipe, Role

W = TypeVar("W")


class Maker:
    """Makes each weight once, in load order; `parts` lists, by name, each part that holds memory,
    once. Names are canonical (`parameters.py`), most of them leaves' own.
    """

    def __init__(
        self,
        weights: WeightBuilder,
        ops: Ops,
        max_model_len: int,
        recipe: Recipe,
        group: WorkerGroup | None,
        adapters: AdapterBanks | None,
        stored: PackedWeights | None = None,
        note_part: Callable[[str, Part], None] | None = None,
        memory: PartMemory | None = None,
    ) -> None:
        """`adapters` gets a bank for each product that adapters may change; None: there are no
        adapters. `stored` has weights that were packed before; None: there are none. `note_part`
        and `memory`: see `ModelOptions`.
        """
        self.parts: list[tuple[str, Part]] = []
        self.leaves_of: dict[str, tuple[str, ...]] = {}
        """Leaves by the part that is their rows, one above the other, as they are."""
        self.weights = weights
        may_differ = weights.has_codes or bool(recipe.own)
        # only where parts of one product may differ: the wrapper costs a look at each call while a
        # step is recorded
        own = with_separate_products(ops) if may_differ else ops
        self.ops = own if adapters is None else adapted(own, adapters)
        self.adapters = adapters
        self._stored = stored
        self._note_part = note_part
        self._memory = memory
        self.max_model_len = max_model_len
        self.group = group
        self._recipe = recipe
        self._tables: dict[Rope, RotaryTable] = {}
        self._logs: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.device

    def format_of(self, role: Role, leaf: str | None = None) -> WeightFormat | None:
        """The format of projections of this role, or of this leaf; None: the model's dtype."""
        return self._recipe.format_of(role, leaf)

    def format_for(
        self, role: Role, weight: Tensor | RowStack | CodedWeight, leaf: str
    ) -> WeightFormat | None:
        """The format that the recipe gives a leaf's weight; one in codes stays as it is."""
        # codes are kept as the checkpoint has them: rounding them again would add a second error
        return None if isinstance(weight, CodedWeight) else self.format_of(role, leaf)

    def format_of_experts(
        self, weight: Tensor | RowStack | CodedWeight, leaves: Sequence[str]
    ) -> WeightFormat | None:
        """The format of a layer's experts by one's weight. Raises NotBuiltYet for several."""
        if isinstance(weight, CodedWeight):
            return None
        formats = {self.format_of("expert", leaf) for leaf in leaves}
        if len(formats) > 1:
            raise NotBuiltYet(
                "quantization_config",
                f"other formats for some of the experts ({leaves[0]}, ...)",
                "Give all experts of a layer one format.",
            )
        return formats.pop()

    def keep(self, name: str, part: Part) -> None:
        """List a part that was made elsewhere."""
        self.parts.append((name, part))
        if self._note_part is not None:
            self._note_part(name, part)

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """A leaf, after `change`; dtype None: the model's."""
        tensor = self.weights.tensor(name, dtype)
        if change is not None:
            tensor = change(tensor)
        else:
            self.leaves_of[name] = (name,)
        self.keep(name, tensor)
        return tensor

    def merged(self, name: str, leaves: Sequence[str]) -> Tensor:
        """Leaves concatenated along their first axis."""
        tensor = self.weights.merged(leaves)
        self.keep(name, tensor)
        return tensor

    def ones(self, count: int) -> Tensor:
        """Stand-in for the weight of a norm that has none."""
        return torch.ones(count, dtype=self.dtype, device=self.device)

    def norm(self, at: str, n: Norm, divisor: float = 1.0) -> NormWeight:
        """A norm over the last axis: of vectors that a model has divided by `divisor`, where what
        is normalised here was not. Only epsilon shows it.
        """
        assert n.kind != "rms_bare", "only of queries and keys"
        weight = None if n.kind == "none" else self.tensor(at + ".weight")
        bias = self.tensor(at + ".bias") if n.bias else None
        return NormWeight(n.kind, n.eps * divisor**2, weight, bias)

    def linear(
        self,
        name: str,
        *leaves: str,
        role: Role = "projection",
        change: Callable[[Tensor], Tensor] | None = None,
        is_adaptable: bool = True,
        gated: bool = False,
    ) -> LinearWeight:
        """A projection of several leaves, one above the other; weight and bias after `change`. Its
        product is one of `linear`, `hidden` or `logits`, or else not adaptable. `gated`: that of
        `pack_linear`.
        """
        sizes = self.weights.rows(*leaves)

        def pack() -> LinearWeight:
            products = self._products(role, leaves, change)
            is_one = len(products) == 1
            packed = tuple(
                self.ops.pack_linear(weight, bias, stored_as, gated=gated and is_one)
                for weight, bias, stored_as in products
            )
            return packed[0] if is_one else SeparateLinear(packed)

        packed = self.packed(name, leaves, pack)
        self.keep(name, packed)
        if change is None:
            self.note_rows(name, leaves)
        if self.adapters is None or not is_adaptable:
            return packed
        bank = self.adapters.add(
            leaves, sizes, packed.in_features, parts=self._parts_of(leaves), change_rows=change
        )
        if bank is not None and isinstance(packed, SeparateLinear):
            raise NotBuiltYet(
                "enable_lora",
                f"adapters of {name}, whose parts are quantised in different ways",
                "Use a checkpoint whose projections of one product are quantised alike.",
            )
        return packed if bank is None else AdaptedLinear(packed, bank)

    @property
    def has_adapters(self) -> bool:
        """Whether there are banks of adapters beside the weights."""
        return self.adapters is not None

    def packed(self, name: str, leaves: Sequence[str], pack: Callable[[], W]) -> W:
        """The packed weight of these leaves, of an earlier start where one has kept it."""
        found: W | None
        if self._stored is None:
            if (found := self.written(name, leaves)) is not None:
                return found
            with self.replacing(name, leaves):
                return pack()
        found = self._stored.find(name)
        if found is None:
            found = pack()
            self._stored.note(name, found)
        else:
            # its pages are never read
            self.weights.skip(leaves)
        return found

    def written(self, name: str, leaves: Sequence[str]) -> Any | None:
        """The part of this name of another model, which has its values already, so that the leaves
        are not read; None: it is to be made.
        """
        found = None if self._memory is None else self._memory.find(name)
        if found is not None:
            self.weights.skip(leaves)
        return found

    def note_rows(self, name: str, leaves: Sequence[str]) -> None:
        """Note that a part is the rows of these leaves, as they are."""
        self.leaves_of[name] = tuple(leaf + ".weight" for leaf in leaves)

    def replacing(self, name: str, leaves: Sequence[str]) -> AbstractContextManager[None]:
        """A context in which a part is packed into another model's memory; see `PartMemory`."""
        return nullcontext() if self._memory is None else self._memory.packing(name, leaves)

    def table(self) -> Tensor:
        """The embedding as a tensor, which is in memory of its own unless a part has its name."""
        if (found := self.written("embed.weight", ["embed"])) is not None:
            assert isinstance(found, Tensor), "a table"
            return found
        old = None if self._memory is None else self._memory.tensor("embed.weight", ["embed"])
        return self.weights.tensor("embed.weight", into=old)

    def linear_and_rows(self, leaf: str, role: Role) -> tuple[Tensor, LinearWeight]:
        """A projection of one leaf, and its weight [out, in] as a tensor of the model's dtype."""
        weight, bias = self.weights.linear(leaf)
        rows = self._widened(weight)
        packed = self.ops.pack_linear(rows, bias, self.format_for(role, rows, leaf))
        self.keep(leaf, packed)
        return rows, self.adaptable(leaf, packed, is_table=False)

    def adaptable(self, leaf: str, weight: Any, is_table: bool) -> Any:
        """A table or packed head weight [V, C] made elsewhere, with a bank for adapters."""
        if self.adapters is None:
            return weight
        if isinstance(weight, Tensor):
            rows, width = weight.shape
        else:
            rows, width = weight.out_features, weight.in_features
        sizes = ([width], rows) if is_table else ([rows], width)
        bank = self.adapters.add([leaf], *sizes, is_table=is_table)
        return weight if bank is None else AdaptedLinear(weight, bank)

    def adaptable_experts(
        self,
        weights: ExpertWeights,
        experts: Sequence[str],
        inputs: Sequence[str],
        down_shape: Sequence[int],
        segments: int,
    ) -> Any:
        """The packed experts whose leaves' names begin with `experts`, with banks where there are
        adapters: of the products `inputs`, and of "down", whose weight is [C, F] and whose inputs
        have so many segments.
        """
        adapters = self.adapters
        if adapters is None:
            return weights
        dim, width = down_shape
        into = [[at + part for part in inputs] for at in experts]
        up = adapters.add_stack(into, [width] * len(inputs), dim)
        back = [[at + "down"] for at in experts]
        down = adapters.add_stack(back, [dim], width, segments=segments)
        return AdaptedExperts(weights.experts, weights, up, down)

    def row_linear(
        self, name: str, units: int, change: Callable[[Tensor], Tensor] | None = None
    ) -> Projection:
        """A projection whose inputs workers may share, cut between `units` (heads, or the width),
        of which this worker has so many; its weight after `change`. Where they do not, each has all
        of it.
        """
        group, needs_peaks, segments = self.group_of(name + ".weight"), False, 1

        def pack() -> LinearWeight:
            nonlocal needs_peaks, segments
            products = self._products("projection", [name], change, changes_bias=False)
            [(weight, bias, stored_as)] = products
            scaled, needs_peaks = 0, stored_as is not None and stored_as.rounds_rows
            if isinstance(weight, CodedWeight):
                scaled, needs_peaks = weight.unit, weight.needs_peaks
            is_cut = group is not None
            segments = self.segments(units, weight.shape[1], stored_as, scaled, is_cut=is_cut)
            peaks = None
            if group is not None and stored_as is not None:
                # rows are cut over the workers, and all parts of a row need the scale of the whole
                # one
                peaks = group.largest(self.ops.row_peaks(weight))
            packed: LinearWeight = self.ops.pack_linear(weight, bias, stored_as, segments, peaks)
            return packed

        # segments and peaks are found while packing, and `pack` does not run where an earlier start
        # has done it
        packed = self.packed(name, [name], pack)
        self.keep(name, packed)
        if change is None:
            self.note_rows(name, [name])
        bank = None
        if self.adapters is not None:
            bank = self.adapters.add(
                *([name], [packed.out_features], packed.in_features),
                segments=packed.segments,
                parts=self._parts_of([name]),
                change_columns=change,
            )
        if group is None:
            weight = packed if bank is None else AdaptedLinear(packed, bank)
            return partial(self.ops.linear, w=weight)
        projection = SharedProjection(self.ops, group, packed, needs_peaks)
        if bank is None or self.adapters is None:
            return projection
        return AdaptedSharedProjection(projection, bank, self.adapters)

    def _parts_of(self, leaves: Sequence[str]) -> list[LeafPart | None]:
        """The parts of leaves that this worker has."""
        return [self.weights.part_of(leaf + ".weight") for leaf in leaves]

    def group_of(self, leaf: str) -> WorkerGroup | None:
        """The workers that share a leaf; None: this one has all of it."""
        return None if self.weights.part_of(leaf) is None else self.group

    @property
    def takes_rows(self) -> bool:
        """Whether weights are packed from rows as read; a group's workers read theirs first."""
        return self.ops.takes_rows and self.group is None

    def _products(
        self,
        role: Role,
        leaves: Sequence[str],
        change: Callable[[Tensor], Tensor] | None,
        changes_bias: bool = True,
    ) -> list[tuple[Tensor | RowStack | CodedWeight, Tensor | None, WeightFormat | None]]:
        """Weights and biases of projections, after `change`, to be packed at once, and what they
        become: of one product, or of several where they are not stored alike or do not become so.
        """
        format_of = partial(self.format_of, role)
        if change is None:
            found = self.weights.products(leaves, takes_rows=self.takes_rows, format_of=format_of)
            return [(w, b, self.format_for(role, w, names[0])) for w, b, names in found]
        formats = {format_of(leaf) for leaf in leaves}
        if len(formats) > 1:
            raise NotBuiltYet(
                "quantization_config",
                f"other formats for {', '.join(leaves)}",
                "Their rows are taken apart while they are loaded: give all of them one format.",
            )
        # `change` moves rows between the leaves, so they have to be one tensor first
        weight, bias = self.weights.linear(*leaves)
        if bias is not None and changes_bias:
            bias = change(bias)
        return [(change(self._widened(weight)), bias, formats.pop())]

    def _widened(self, weight: Tensor | CodedWeight) -> Tensor:
        return weight.widened().to(self.dtype) if isinstance(weight, CodedWeight) else weight

    def segments(
        self,
        units: int,
        inputs: int,
        stored_as: WeightFormat | None,
        scaled: int = 0,
        *,
        is_cut: bool = True,
    ) -> int:
        """Number of segments in which a product sums a worker's inputs; `scaled`: how many of them
        have one scale in a weight that is stored in codes. is_cut: the workers have a part of the
        inputs each.
        """
        workers = self.group.size if is_cut and self.group is not None else 1
        group = scaled if stored_as is None else stored_as.group
        return own_segments(units * workers, inputs * workers, group, workers)

    def rotary(self, rope: Rope | None) -> RotaryTable | None:
        """The table of a rotation, one for all layers with the same; None: nothing rotates."""
        if rope is None:
            return None
        if rope not in self._tables:
            learned = self.weights.tensor("rope.factors", torch.float32) if rope.learned else None
            table = rotary_table(rope, self.max_model_len, self.device, learned)
            self._tables[rope] = table
            if rope.learned:
                self.keep("rope.table", table.cos_sin)
        return self._tables[rope]

    def log_positions(self) -> Tensor:
        """ln(1 + position) of all positions, fp32, one table for all layers."""
        if self._logs is None:
            self._logs = log_positions(self.max_model_len).to(self.device)
        return self._logs
