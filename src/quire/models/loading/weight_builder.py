"""Fills the decoder's tensors leaf by leaf: the only place of fusing, converting and placing."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from quire.errors import LoadError
from quire.hardware import weight_file
from quire.models.cutting.sharding import LeafPart
from quire.models.parameters import Parameter
from quire.ops import CodedWeight
from quire.ops.formats.coded import one_above_the_other
from quire.ops.formats.row_stack import RowStack
from quire.ops.kv import FixedScales

_HUGE_PAGE_BYTES = 2 << 20


class WeightBuilder:
    """Hands out finished tensors in the model's dtype on its device.

    Invariant: each leaf of the spec is copied or skipped exactly once; `finish` asserts that none
    was left over.
    """

    def __init__(
        self,
        leaves: Mapping[str, Parameter],
        read: Callable[[Parameter], Tensor | CodedWeight],
        *,
        dtype: torch.dtype,
        device: torch.device,
        coded: Collection[str],
        folder: Path | None,
        cache_scales: Mapping[str, FixedScales],
        sources: Mapping[str, str],
        cut: Mapping[str, LeafPart] = MappingProxyType({}),
    ) -> None:
        """`leaves`: those of the spec by name, in load order. `folder`: where large tensors are
        kept in files; None: in memory. `cache_scales`: those of keys and values that the checkpoint
        brings, by layer ("layers.0"). `read` gives a leaf in any float dtype, or in codes those
        that `coded` names, valid until its next call; on a device other than the CPU it returns
        memory that is not written again. `sources`: those of `OpenLeaves`. `cut`: the leaves of
        which this worker of several has a part.
        """
        self.dtype, self.device = dtype, device
        self._left = dict(leaves)
        self._read, self._coded = read, coded
        self._folder = folder
        self._cache_scales = cache_scales
        self._sources = sources
        self._cut = cut

    @property
    def has_codes(self) -> bool:
        """Whether some leaves are stored in codes."""
        return bool(self._coded)

    def part_of(self, name: str) -> LeafPart | None:
        """The part of a leaf that this worker of several has; None: all of it."""
        return self._cut.get(name)

    def has(self, name: str) -> bool:
        """Whether the spec has this leaf (biases, norms) and it is still to be taken."""
        return name in self._left

    def tensor(
        self, name: str, dtype: torch.dtype | None = None, into: Tensor | None = None
    ) -> Tensor:
        """One leaf as a tensor of its own, or in the memory `into`; dtype None: the model's."""
        if into is None:
            return self.merged([name], dtype)
        self._fill(into, [name])
        return into

    def linear(self, *names: str) -> tuple[Tensor | CodedWeight, Tensor | None]:
        """Weight and bias of projections with one input, one above the other: [sum of rows, C] and
        [sum of rows]. The weight of one projection is in codes where it is stored so; that of
        several is in plain numbers.
        """
        if len(names) > 1:
            return self.merged([name + ".weight" for name in names]), self._bias(names)
        [(weight, bias, _)] = self.products(names, takes_rows=False)
        assert not isinstance(weight, RowStack), "rows were not asked for"
        return weight, bias

    def products(
        self,
        names: Sequence[str],
        *,
        takes_rows: bool,
        format_of: Callable[[str], object] = lambda _: None,
    ) -> list[tuple[Tensor | RowStack | CodedWeight, Tensor | None, list[str]]]:
        """Weight and bias of projections with one input as one product, or as several whose outputs
        follow each other: where some are stored in codes and others are not, or in codes of other
        bits, groups or orders, or become other formats; with the projections of each. takes_rows:
        plain weights are packed at once, and their rows are read only then.
        """
        found: list[tuple[Tensor | RowStack | CodedWeight, Tensor | None, list[str]]] = []
        coded = self._coded
        for key, run in groupby(names, lambda n: n + ".weight" in coded or (format_of(n),)):
            alike, is_coded = list(run), key is True
            if is_coded:
                found += [(w, self._bias(part), part) for w, part in self._alike(alike)]
                continue
            leaves = [name + ".weight" for name in alike]
            plain = self._rows_of(leaves) if takes_rows else self.merged(leaves)
            found.append((plain, self._bias(alike), alike))
        return found

    def merged(self, names: Sequence[str], dtype: torch.dtype | None = None) -> Tensor:
        """Leaves concatenated along their first axis; dtype None: the model's."""
        rows = sum(self._left[name].shape[0] for name in names)
        out = self._empty(rows, *self._left[names[0]].shape[1:], dtype=dtype or self.dtype)
        self._fill(out, names)
        return out

    def stacked(self, groups: Sequence[Sequence[str]]) -> Tensor | list[CodedWeight]:
        """One `merged` tensor per group, stacked along a first axis; a list of weights in codes."""
        if self._are_codes([name for names in groups for name in names]):
            return [self._merged_codes(names) for names in groups]
        rows = sum(self._left[name].shape[0] for name in groups[0])
        shape = self._left[groups[0][0]].shape[1:]
        out = self._empty(len(groups), rows, *shape, dtype=self.dtype)
        for part, names in zip(out, groups, strict=True):
            self._fill(part, names)
        return out

    def stacked_rows(self, groups: Sequence[Sequence[str]]) -> list[RowStack] | list[CodedWeight]:
        """As `stacked`, for whoever packs the weights at once, one after the other."""
        if self._are_codes([name for names in groups for name in names]):
            return [self._merged_codes(names) for names in groups]
        return [self._rows_of(names) for names in groups]

    def cache_scales(self, at: str) -> FixedScales | None:
        """The scales of keys and values of the layer whose leaves' names begin with `at`."""
        return self._cache_scales.get(".".join(at.split(".")[:2]))

    def rows(self, *names: str) -> list[int]:
        """Number of outputs of each of these projections, which are still to be taken."""
        return [self._left[name + ".weight"].shape[0] for name in names]

    def skip(self, names: Sequence[str]) -> None:
        """These leaves, and their biases, are somebody else's."""
        for name in names:
            for end in (".weight", ".bias"):
                self._left.pop(name + end, None)

    def finish(self) -> None:
        """Check that the model is complete; an unused leaf is a bug in the decoder."""
        assert not self._left, f"the decoder left {list(self._left)[:3]} unused"

    def _empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._folder is not None and num_bytes >= weight_file.LEAST_BYTES:
            pages = weight_file.file_pages(self._folder, num_bytes)
            return torch.frombuffer(pages, dtype=dtype).view(shape)
        # fresh pages, huge ones: every page of a weight is written once, so zeroing it first is
        # wasted, and products walk over all of it in each step
        is_mapped = sys.platform == "linux" and self.device.type == "cpu"
        if not is_mapped or num_bytes < _HUGE_PAGE_BYTES:
            return torch.empty(shape, dtype=dtype, device=self.device)
        return torch.frombuffer(_fresh_pages(num_bytes), dtype=dtype).view(shape)

    def _are_codes(self, names: Sequence[str]) -> bool:
        """Whether these leaves, which become one weight, are stored in codes."""
        coded = [name for name in names if name in self._coded]
        if 0 < len(coded) < len(names):
            other = next(name for name in names if name not in self._coded)
            raise LoadError(
                f"{coded[0]} is stored quantised and {other} is not, but both are parts of one "
                "product. Quantise or ignore both."
            )
        return bool(coded)

    def _merged_codes(self, names: Sequence[str]) -> CodedWeight:
        """The weight of leaves that are one product whatever their codes are."""
        parts = [self._codes_of(name) for name in names]
        for name, part in zip(names, parts, strict=True):
            if not parts[0].fits(part):
                raise LoadError(
                    f"{names[0]} and {name} are parts of one product, but differ in the bits, the "
                    "groups or the order of their codes. Quantise them alike."
                )
        return self._as_one(parts)

    def _alike(self, names: Sequence[str]) -> list[tuple[CodedWeight, list[str]]]:
        """The weights of projections in codes, neighbours as one where they fit each other."""
        runs: list[tuple[list[CodedWeight], list[str]]] = []
        for name in names:
            part = self._codes_of(name + ".weight")
            # q, k and v are quantised alike nearly always, and then are one product; where not,
            # neighbours still are
            if not runs or not runs[-1][0][0].fits(part):
                runs.append(([], []))
            runs[-1][0].append(part)
            runs[-1][1].append(name)
        return [(self._as_one(parts), own) for parts, own in runs]

    def _codes_of(self, name: str) -> CodedWeight:
        """A copy of a leaf that is stored in codes."""
        leaf = self._left.pop(name)
        part = self._read(leaf)
        assert isinstance(part, CodedWeight), f"{name} is not stored in codes"
        return part.each(self._own).scaled(leaf.scale)

    def _as_one(self, parts: Sequence[CodedWeight]) -> CodedWeight:
        merged = one_above_the_other(parts)
        if self._folder is not None and len(parts) > 1:  # which made it in memory
            merged = merged.each(self._own)
        if merged.order is None or self.device.type == "cpu":
            return merged
        return replace(merged, order=merged.order.to(self.device))

    def _own(self, source: Tensor) -> Tensor:
        """A copy on the device."""
        return self._empty(*source.shape, dtype=source.dtype).copy_(source)

    def _bias(self, names: Sequence[str]) -> Tensor | None:
        biases = [name + ".bias" for name in names if self.has(name + ".bias")]
        return self.merged(biases) if biases else None

    def _rows_of(self, names: Sequence[str]) -> RowStack:
        leaves = [self._left.pop(name) for name in names]

        def read() -> Iterator[Tensor]:
            for leaf in leaves:
                values = self._values(leaf).to(self.dtype)
                yield values if leaf.scale == 1.0 else values * leaf.scale

        [width] = {leaf.shape[1] for leaf in leaves}
        sources = tuple(self._sources[name] for name in names if name in self._sources)
        return RowStack(
            (sum(leaf.shape[0] for leaf in leaves), width),
            self.dtype,
            read,
            sources if len(sources) == len(names) else None,
        )

    def _values(self, leaf: Parameter) -> Tensor:
        values = self._read(leaf)
        return values.widened() if isinstance(values, CodedWeight) else values

    def _fill(self, out: Tensor, names: Sequence[str]) -> None:
        at = 0
        for name in names:
            leaf = self._left.pop(name)
            values = self._values(leaf)
            part = out[at : at + leaf.shape[0]]
            # a GPU copies from pinned memory while the next leaf is looked up
            part.copy_(values, non_blocking=True)
            if leaf.scale != 1.0:
                part.mul_(leaf.scale)
            at += leaf.shape[0]


def _fresh_pages(num_bytes: int) -> mmap.mmap:
    """Memory that is returned to the system with its last tensor. The C library would keep what
    providers have packed and dropped: 240 MB after loading a 0.6B model.
    """
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them serves small pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
