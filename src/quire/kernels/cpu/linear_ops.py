"""The native ops that multiply with a weight: projections, feed-forward layers, logits.

An output is summed over its inputs in one order that depends on the weight alone, so that a row's
bits do not depend on the other rows: see csrc/kernels/linear.cpp and quantized.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.errors import NotBuiltYet
from quire.hardware.packed_ahead import part_key, take_packed
from quire.kernels.cpu import unpacking
from quire.kernels.cpu.lora_ops import CpuLora
from quire.kernels.cpu.row_arguments import address_of, rows_at
from quire.kernels.cpu.runtime import CpuRuntime, NativeOps
from quire.ops.formats.coded import CodedWeight
from quire.ops.formats.row_stack import RowStack
from quire.ops.quantized import MOST, WeightFormat
from quire.ops.rounding import scales_of
from quire.ops.segments import Addend

_CODED_GROUP = 128
"""Inputs of a group of codes that share a scale in a panel, at most."""

PanelMemory = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Shape and dtype -> zeroed memory for the panels of a weight."""
AnyAddend = Addend | CpuLora
AnyWeight = Tensor | RowStack | CodedWeight


@dataclass(frozen=True, slots=True)
class CodeFacts:
    """Facts of a weight in codes besides its panels: the scales' type, whether there are zero
    points, how rows are rounded (type, group, scale), and the table that codes are indices of.
    """

    scale_type: str
    has_zeros: bool
    rounding: tuple[str, int, float]
    table: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A weight in panels of outputs (csrc/kernels/linear_pack.cpp and quantized.cpp say how they
    look); `dtype` is that of the activations. form: "plain", or how it is rounded; rounds_rows: see
    `WeightFormat`. order: that of a weight in codes. gated: see `pack_linear`; scales are in the
    order of the panels. group, codes: what else the native weight was made from. memory: that of
    the panels, which threads may still fill; block: of those threads.
    """

    native: Any
    dtype: torch.dtype
    in_features: int
    out_features: int
    memory: Tensor
    scales: Tensor | None
    bias: Tensor | None
    segments: int
    form: str
    rounds_rows: bool
    order: Tensor | None = None
    gated: bool = False
    group: int = 0
    codes: CodeFacts | None = None
    block: Any = None

    @property
    def panels(self) -> Tensor:
        """The memory of its panels when they are packed."""
        self.wait()
        return self.memory

    def wait(self) -> None:
        """Return when its panels are packed."""
        if self.block is not None:
            self.block.wait()

    @property
    def has_whole_sums(self) -> bool:
        """Whether its partial sums are whole numbers, of int32."""
        return self.form == "int8" and self.rounds_rows

    def plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies of its values as rows, in which nothing is packed: weight, weight_scale and bias.
        A weight in codes has its memory as it is.
        """
        out, of, gated = self.out_features, self.in_features, self.gated
        bias = None if self.bias is None else self.bias[:out]
        if self.codes is None and self.form == "plain":
            rows = unpacking.plain_rows(self.panels, out, of, gated=gated)
            yield from unpacking.named(rows, None, bias)
        elif self.codes is None and self.form == "int4":
            rows, scales = unpacking.nibble_rows(self.panels, self.group, out, of, gated=gated)
            yield from unpacking.named(rows, scales, bias)
        elif self.form == "int8" and self.scales is not None:
            rows = unpacking.byte_rows(self.panels, out, of, gated=gated)
            width = len(self.scales) // len(self.panels)
            scales = unpacking.in_order(self.scales, out, gated=gated, width=width)
            yield from unpacking.named(rows, scales, bias)
        else:
            yield from unpacking.named(self.panels, self.scales, bias)

    def share(self, rank: int, size: int) -> CpuLinear | None:
        """The outputs that one of `size` workers computes, in the memory of this weight; None where
        they are not whole panels.
        """
        count, width = len(self.panels) // size, self.native.panel_width
        first, out = rank * count * width, count * width
        if self.gated or out * size != self.out_features:
            return None
        native = self.native.outputs(first, out, self.panels[0].nbytes)
        return replace(
            self,
            native=native,
            out_features=out,
            memory=self.panels[rank * count :][:count],
            scales=None if self.scales is None else self.scales[first:][:out],
            bias=None if self.bias is None else self.bias[first:],
        )

    def conclude(self, total: Tensor, peaks: Tensor | None) -> Tensor:
        """total [T, out] of all segments times the scales that are left, plus bias -> fp32."""
        if self.rounds_rows and self.scales is not None:
            total = total.float() * self.scales[: self.out_features]
        if self.rounds_rows:
            assert peaks is not None, "rows that are rounded have a scale"
            total = total * scales_of(peaks, MOST)[:, None]
        return total if self.bias is None else total + self.bias[: self.out_features]


class LinearOps(NativeOps):
    """Packing of weights, products with them and lookup of their rows; see quire.ops for each."""

    def __init__(self, runtime: CpuRuntime, dtype: torch.dtype) -> None:
        """dtype: that of the model's activations."""
        super().__init__(runtime)
        native = runtime.native
        self._dtype = dtype
        self._width = native.panel_width
        self._forms = native.WeightForm.__members__
        self._row_types = native.RowType.__members__
        self._acts = native.Act.__members__
        self._finishes = native.FinishKind.__members__

    def pack_linear(
        self,
        weight: AnyWeight,
        bias: Tensor | None,
        stored_as: WeightFormat | None = None,
        segments: int = 1,
        peaks: Tensor | None = None,
        gated: bool = False,
        memory: PanelMemory | None = None,
        is_packed: bool = False,
    ) -> CpuLinear:
        """weight [out, in], bias [out]; both are copied, into `panel_bytes` of `memory` (None: of
        the weight's own), where the weight is already if it `is_packed`.
        """
        assert self._runtime.program is None, "weights are packed before recording"
        nibbles = weight.as_nibbles() if isinstance(weight, CodedWeight) else None
        if nibbles is not None:
            return self._pack_nibbles(nibbles, bias, segments, gated, memory)
        shape, dtype = self._panel_shape(weight, stored_as, gated)
        # who gives memory wants the panels there, and what was packed ahead lies elsewhere
        key = None if memory is not None else self.key_of(weight, stored_as, gated)
        block = packed_block([key], math.prod(shape) * dtype.itemsize)
        if block is None:
            panels = (memory or self._runtime.weight_memory)(shape, dtype)
        else:
            panels = torch.frombuffer(block.memory(), dtype=dtype).view(shape)
        if isinstance(weight, CodedWeight):
            pack = self._pack_integers if weight.is_of_integers else self._pack_coded
            return pack(weight, bias, segments, gated, panels)
        scales = None
        if stored_as is not None and stored_as.name == "int8":
            scales = torch.zeros(len(panels) * self._width)
        assert weight.shape[1] % segments == 0, "segments are of equal length"
        packed = self._linear(
            weight,
            "plain" if stored_as is None else stored_as.name,
            panels,
            bias,
            segments,
            scales=scales,
            group=0 if stored_as is None else stored_as.group,
            rounds_rows=stored_as is not None and stored_as.rounds_rows,
            gated=gated,
        )
        if block is not None:
            return replace(packed, native=block.unpacked(packed.native), block=block)
        if is_packed:
            return packed
        first = 0
        for part in weight.read() if isinstance(weight, RowStack) else [weight]:
            rows, count = self._runtime.dense(part), len(part)
            self._runtime.pack(
                *(packed.native, first, count, *rows_at(rows)),
                packed.panels.data_ptr(),
                address_of(None if peaks is None else peaks[first:]),
            )
            first += count
        return packed

    def key_of(self, weight: AnyWeight, stored_as: WeightFormat | None, gated: bool) -> str | None:
        """The key under which a weight may be packed already; None: it is not packed ahead."""
        if stored_as is not None or not isinstance(weight, RowStack) or weight.sources is None:
            return None
        return part_key(str(weight.dtype).removeprefix("torch."), gated, weight.sources)

    def panel_bytes(self, weight: AnyWeight, stored_as: WeightFormat | None, gated: bool) -> int:
        """The memory that the panels of a weight take, whole lines of 64 bytes."""
        shape, dtype = self._panel_shape(weight, stored_as, gated)
        return math.prod(shape) * dtype.itemsize

    def _panel_shape(
        self, weight: AnyWeight, stored_as: WeightFormat | None, gated: bool
    ) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and type of a weight's panels; inputs are filled up to whole pairs, fours or
        groups.
        """
        out_features, in_features = weight.shape
        count, width = self._num_panels(out_features, gated), self._width
        if isinstance(weight, CodedWeight):
            if weight.is_of_integers:
                return (count, -(-in_features // 4), 4 * width), torch.uint8
            if (nibbles := weight.as_nibbles()) is not None:
                return self._nibble_shape(count, in_features, nibbles.group), torch.uint8
            group = _coded_group(weight)
            of_group = (
                group * weight.bits // 8 + weight.scales.itemsize + (weight.zeros is not None)
            )
            row = -(-in_features // group) * of_group
            return (count, -(-row * width // 64) * 64), torch.uint8
        if stored_as is None:
            return (count, -(-in_features // 2), 2 * width), weight.dtype
        if stored_as.name == "fp8":
            raise NotBuiltYet("quantization", "fp8 on CPUs", "Use int8, which is as small.")
        if stored_as.name == "int8":
            return (count, -(-in_features // 4), 4 * width), torch.uint8
        return self._nibble_shape(count, in_features, stored_as.group), torch.uint8

    def _nibble_shape(self, count: int, in_features: int, group: int) -> tuple[int, ...]:
        return count, -(-in_features // group), group * self._width // 2 + 2 * self._width

    def _num_panels(self, out_features: int, gated: bool) -> int:
        halves = 2 if gated else 1
        assert out_features % halves == 0, "gates and what they multiply are as many"
        return halves * -(-out_features // (halves * self._width))

    def _by_panels(self, rows: Tensor, gated: bool) -> Tensor:
        """rows [out, *] of a weight as [panels, width, *], filled up with zeros."""
        halves = rows.unflatten(0, (2 if gated else 1, -1))
        missing = -halves.shape[1] % self._width
        padded = F.pad(halves, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else halves
        return padded.unflatten(1, (-1, self._width)).transpose(0, 1).flatten(0, 1)

    def _pack_integers(
        self,
        weight: CodedWeight,
        bias: Tensor | None,
        segments: int,
        gated: bool,
        panels: Tensor,
    ) -> CpuLinear:
        """Codes are q + 128, as panels of int8 have them."""
        missing = -weight.in_features % 4
        codes = F.pad(weight.codes, (0, missing)) if missing else weight.codes.contiguous()
        words = self._by_panels(codes.view(torch.int32), gated)
        panels.view(torch.int32).copy_(words.transpose(1, 2))
        scales = self._by_panels(weight.scales[:, 0].float(), gated).flatten().clone()
        return self._linear(
            weight, "int8", panels, bias, segments, scales=scales, rounds_rows=True, gated=gated
        )

    def _pack_nibbles(
        self,
        weight: CodedWeight,
        bias: Tensor | None,
        segments: int,
        gated: bool,
        memory: PanelMemory | None,
    ) -> CpuLinear:
        """As panels of int4 have them: of each group four inputs of 16 outputs in a line, with
        those of 16 others in the upper halves, and after them the scales.
        """
        shape, dtype = self._panel_shape(weight, None, gated)
        panels = (memory or self._runtime.weight_memory)(shape, dtype)
        group, groups = weight.group, -(-weight.in_features // weight.group)
        # filled up with the code of 0 in both halves
        both = F.pad(weight.codes, (0, groups * group // 2 - weight.codes.shape[1]), value=0x88)
        numbers = torch.stack((both & 15, both >> 4), 2).flatten(1)
        halves = self._by_panels(numbers, gated).unflatten(1, (2, -1))
        pairs = halves[:, 0] | (halves[:, 1] << 4)  # [panels, lanes, in]
        lines = pairs.unflatten(2, (groups, -1, 4)).permute(0, 2, 3, 1, 4)
        scales = self._by_panels(weight.scales.bfloat16(), gated).transpose(1, 2).contiguous()
        panels[..., : group * self._width // 2] = lines.flatten(2)
        panels[..., group * self._width // 2 :] = scales.view(torch.uint8)
        return self._linear(
            *(weight, "int4", panels, bias, segments),
            group=group,
            rounds_rows=True,
            gated=gated,
        )

    def _pack_coded(
        self,
        weight: CodedWeight,
        bias: Tensor | None,
        segments: int,
        gated: bool,
        panels: Tensor,
    ) -> CpuLinear:
        weight = weight.with_group(_coded_group(weight)).each(Tensor.contiguous)
        assert segments == 1 or weight.in_features % (segments * weight.group) == 0
        form = "floats8" if weight.are_floats else f"codes{weight.bits}"
        form = form if weight.table is None else "table4"
        packed = self._linear(weight, form, panels, bias, segments, group=weight.group, gated=gated)
        parts = (weight.codes, weight.scales, weight.zeros, panels)
        self._context.pack_coded(packed.native, *map(address_of, parts))
        return packed

    def _linear(
        self,
        weight: AnyWeight,
        form: str,
        panels: Tensor,
        bias: Tensor | None,
        segments: int,
        *,
        scales: Tensor | None = None,
        group: int = 0,
        rounds_rows: bool = False,
        gated: bool = False,
    ) -> CpuLinear:
        """The weight that these panels, which may be filled later, and scales are of."""
        out_features, in_features = weight.shape
        coded = weight if isinstance(weight, CodedWeight) and form != "int4" else None
        return self.weight_of(
            panels,
            scales,
            self._wide_bias(bias, len(panels)),
            None if coded is None else coded.order,
            dtype=self._dtype if isinstance(weight, CodedWeight) else weight.dtype,
            in_features=in_features,
            out_features=out_features,
            segments=segments,
            form=form,
            rounds_rows=rounds_rows,
            gated=gated,
            group=group,
            codes=None if coded is None else _code_facts(coded),
        )

    def weight_of(
        self,
        panels: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        order: Tensor | None,
        *,
        dtype: torch.dtype,
        in_features: int,
        out_features: int,
        segments: int,
        form: str,
        rounds_rows: bool,
        gated: bool,
        group: int,
        codes: CodeFacts | None,
    ) -> CpuLinear:
        """The weight of these panels, which may be filled later; the arguments are the fields of
        `CpuLinear`.
        """
        native = self._native.PackedWeight(
            self._types[dtype],
            self._forms[form],
            in_features,
            out_features,
            group,
            panels.data_ptr(),
            address_of(scales),
            address_of(bias),
            form != "plain" and not rounds_rows,
            segments,
            gated,
        )
        if codes is not None:
            to, rows, scale = codes.rounding
            table = None if codes.table is None else torch.tensor(codes.table)  # copied
            native = native.with_codes(
                self._types[getattr(torch, codes.scale_type)],
                codes.has_zeros,
                address_of(order),
                self._row_types[to],
                rows,
                scale,
                address_of(table),
            )
        return CpuLinear(
            *(native, dtype, in_features, out_features, panels, scales, bias, segments),
            *(form, rounds_rows, order, gated, group, codes),
        )

    def _wide_bias(self, bias: Tensor | None, num_panels: int) -> Tensor | None:
        if bias is None:
            return None
        wide = torch.zeros((num_panels + 1) * self._width)
        wide[: len(bias)] = bias
        return wide

    def embed_packed(self, ids: Tensor, w: CpuLinear, scale: float = 1.0) -> Tensor:
        """ids [T] -> [T, in]: columns of panels, put together again."""
        assert w.scales is None and w.memory.dtype is w.dtype, "a rounded weight is not a table"
        runtime = self._runtime
        ids = runtime.dense(ids)
        runtime.keep(len(ids), ids, w.memory)
        out = runtime.output((len(ids), w.in_features), w.dtype)
        self._context.embed(
            self._types[w.dtype],
            len(ids),
            w.in_features,
            scale,
            ids.data_ptr(),
            w.memory.data_ptr(),
            w.out_features,
            0,
            w.native,
            *(0, 0, 0, 0),
            out.data_ptr(),
        )
        return out

    def linear(self, x: Tensor, w: CpuLinear, addend: AnyAddend | None = None) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._product(x, w, w.out_features, addend=addend)

    def hidden(
        self,
        x: Tensor,
        up: CpuLinear,
        act: str,
        gated: bool,
        addend: AnyAddend | None = None,
    ) -> Tensor:
        """x [T, C] -> [T, F], rounded once, after activation and gate."""
        width = up.out_features // 2 if gated else up.out_features
        return self._product(x, up, width, "gated" if gated else "plain", act, addend=addend)

    def logits(
        self,
        x: Tensor,
        head: CpuLinear,
        scale: float = 1.0,
        softcap: float | None = None,
        addend: AnyAddend | None = None,
    ) -> Tensor:
        """x [R, C] -> fp32 [R, V]."""
        cap = softcap or 0.0
        return self._product(
            x, head, head.out_features, "logits", "none", scale, cap, addend=addend
        )

    def linear_partial(self, x: Tensor, w: CpuLinear, peaks: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out]."""
        sums = self._product(x, w, w.out_features, "partial", peaks=peaks)
        return sums.view(torch.int32) if w.has_whole_sums else sums

    def linear_total(
        self,
        parts: Tensor,
        w: CpuLinear,
        peaks: Tensor | None,
        dtype: torch.dtype,
        addend: Addend | None = None,
    ) -> Tensor:
        """parts [T, N, out] -> [T, out]."""
        assert not w.gated and parts.shape[2] == w.out_features
        assert peaks is not None or not w.rounds_rows, "rows that are rounded have a scale"
        runtime, (num_tokens, count, width) = self._runtime, parts.shape
        assert parts.is_contiguous() or runtime.program is None
        parts = parts.contiguous()
        scales, peaks = (w.scales, peaks) if w.rounds_rows else (None, None)
        values, rows = (None, None) if addend is None else (addend.values, addend.rows)
        assert values is None or values.is_contiguous()
        runtime.keep(num_tokens, parts, scales, peaks, w.bias, values, rows)
        y = runtime.output((num_tokens, width), dtype)
        self._context.linear_total(
            self._types[dtype],
            num_tokens,
            width,
            count,
            parts.dtype is torch.int32,
            *map(address_of, (parts, scales, peaks, w.bias, values, rows, y)),
        )
        return y

    def _product(
        self,
        x: Tensor,
        w: CpuLinear,
        width: int,
        finish: str = "plain",
        act: str = "none",
        scale: float = 1.0,
        softcap: float = 0.0,
        *,
        addend: AnyAddend | None = None,
        peaks: Tensor | None = None,
    ) -> Tensor:
        """[T, width] of what becomes of x times the weight (csrc/kernels/kernels.hpp, Finish)."""
        runtime = self._runtime
        assert x.shape[1] == w.in_features and x.dtype is w.dtype
        assert w.gated == (finish == "gated"), "weights of gates are packed as such, others are not"
        x = runtime.dense(x)
        num_tokens = x.shape[0]
        values, rows = (addend.values, addend.rows) if isinstance(addend, Addend) else (None, None)
        if values is not None:
            assert values.shape[1] == w.out_features and values.is_contiguous()
        lora: tuple[Any, ...] = ()
        if isinstance(addend, CpuLora):
            assert addend.bank.shape.out_features == w.out_features
            lora = addend.bank.native, addend.factors.data_ptr(), addend.slots.data_ptr()
        runtime.keep(num_tokens, x, w.memory, w.scales, w.bias, w.order, values, rows, peaks)
        dtype = torch.float32 if finish in ("logits", "partial") else x.dtype
        y = runtime.output((num_tokens, width), dtype)
        self._context.linear(
            w.native,
            num_tokens,
            *rows_at(x),
            *rows_at(y),
            self._finishes[finish],
            self._acts[act],
            scale,
            softcap,
            *map(address_of, (values, rows, peaks)),
            *lora,
        )
        return y


def _code_facts(weight: CodedWeight) -> CodeFacts:
    how = weight.rounding
    return CodeFacts(
        str(weight.scales.dtype).removeprefix("torch."),
        weight.zeros is not None,
        ("kept", 0, 0.0) if how is None else (how.to, how.group, how.scale or 0.0),
        None if weight.table is None else tuple(map(float, weight.table)),
    )


def _coded_group(weight: CodedWeight) -> int:
    """Inputs that share a scale in a panel."""
    return math.gcd(weight.group, _CODED_GROUP)


def packed_block(keys: Sequence[str | None], num_bytes: int) -> Any:
    """The native block of weights that threads pack or have packed, by their keys; None: they do
    not.
    """
    block = take_packed(keys)
    return None if block is None or block.size != num_bytes else block
