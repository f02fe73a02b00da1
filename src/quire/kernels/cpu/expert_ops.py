"""The native mixture of experts: the choice (csrc/kernels/route.cpp), and the products of all
chosen experts of a step in one call (experts.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from quire.kernels.cpu.linear_ops import CpuLinear, LinearOps, packed_block
from quire.kernels.cpu.lora_ops import CpuBank, bank_tensors
from quire.kernels.cpu.row_arguments import address_of, rows_at
from quire.kernels.cpu.runtime import CpuRuntime, NativeOps
from quire.ops.formats.coded import CodedWeight, of_one_kind
from quire.ops.formats.row_stack import RowStack
from quire.ops.moe import ADDRESSES, ExpertAdapters, Experts, MoeArgs, pack_each
from quire.ops.quantized import WeightFormat
from quire.ops.routing import RouteArgs


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The weights of a layer's experts, whose panels lie side by side in one piece of memory.
    native [2, E, *]: gate/up and down as the kernel reads them.
    """

    experts: int
    up: tuple[CpuLinear, ...]
    down: tuple[CpuLinear, ...]
    native: Tensor = field(metadata=ADDRESSES)

    def plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of each weight, under the number of its expert."""
        for which, weights in (("up", self.up), ("down", self.down)):
            for expert, weight in enumerate(weights):
                for name, tensor in weight.plain_tensors():
                    yield f"{expert}.{which}.{name}", tensor


class ExpertOps(NativeOps):
    """Packing of experts and their products; see quire.ops.moe for each."""

    def __init__(self, runtime: CpuRuntime, dtype: torch.dtype) -> None:
        """dtype: that of the model's activations."""
        super().__init__(runtime)
        self._linear = LinearOps(runtime, dtype)
        self._scores = runtime.native.RouterScore.__members__
        self._acts = runtime.native.Act.__members__
        self._finishes = runtime.native.FinishKind.__members__

    def pack_experts(
        self,
        up: Experts,
        down: Experts,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        stored_as: WeightFormat | None = None,
        segments: int = 1,
        gated: bool = False,
    ) -> CpuExperts:
        """up [E, 2F, C] or [E, F, C], down [E, C, F], biases [E, *] and [E, C]; all are copied.

        An expert alone is often less than a huge page, and so are its products. In one piece of
        memory all of them are on huge pages.
        """
        up, down = _alike(up), _alike(down)
        sizes = (
            self._linear.panel_bytes(up[0], stored_as, gated),
            self._linear.panel_bytes(down[0], stored_as, False),
        )
        shape, key_of = (len(up), sum(sizes)), partial(self._linear.key_of, stored_as=stored_as)
        pairs = zip(up, down, strict=True)
        keys = [key for u, d in pairs for key in (key_of(u, gated=gated), key_of(d, gated=False))]
        block = packed_block(keys, math.prod(shape))
        is_packed = block is not None
        if block is None:
            memory = self._runtime.weight_memory(shape, torch.uint8)
        else:
            block.wait()
            memory = torch.frombuffer(block.memory(), dtype=torch.uint8).view(shape)
        of_up, of_down = memory.split(sizes, 1)
        pack_up = partial(self._linear.pack_linear, gated=gated, is_packed=is_packed)
        pack_down = partial(self._linear.pack_linear, segments=segments, is_packed=is_packed)
        return self.experts_of(
            pack_each(_into(of_up, pack_up), up, up_bias, stored_as),
            pack_each(_into(of_down, pack_down), down, down_bias, stored_as),
        )

    def experts_of(self, up: tuple[CpuLinear, ...], down: tuple[CpuLinear, ...]) -> CpuExperts:
        native = torch.empty(2, len(up), self._native.packed_weight_bytes, dtype=torch.uint8)
        for places, weights in zip(native, (up, down), strict=True):
            for place, weight in zip(places, weights, strict=True):
                weight.native.store(place.data_ptr())
        return CpuExperts(len(up), up, down, native)

    def route(
        self,
        logits: Tensor,
        args: RouteArgs,
        select_bias: Tensor | None = None,
        expert_scales: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """logits [T, E] -> chosen [T, k] int32 and weights [T, k] fp32; of equal scores the first
        is chosen.
        """
        runtime, (num_tokens, num_experts) = self._runtime, logits.shape
        assert num_experts >= args.top_k and num_experts % args.groups == 0
        for each in (select_bias, expert_scales):
            assert each is None or (each.dtype is torch.float32 and each.is_contiguous())
        logits = runtime.dense(logits)
        runtime.keep(num_tokens, logits, select_bias, expert_scales)
        chosen = runtime.output((num_tokens, args.top_k), torch.int32)
        weights = runtime.output((num_tokens, args.top_k), torch.float32)
        self._context.route(
            self._types[logits.dtype],
            num_tokens,
            num_experts,
            *rows_at(logits),
            args.top_k,
            self._scores[args.score],
            args.renorm,
            args.groups,
            args.top_groups,
            args.group_best,
            args.scale,
            args.renorm_eps,
            args.renorm_min,
            args.jitter,
            *map(address_of, (select_bias, expert_scales, chosen, weights)),
        )
        return chosen, weights

    def moe(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        experts: CpuExperts,
        args: MoeArgs,
        adapters: ExpertAdapters | None = None,
    ) -> Tensor:
        """x [T, C] -> [T, C]. Raises IndexError for a choice that is not an expert."""
        runtime, (num_tokens, top_k) = self._runtime, chosen.shape
        up, down = experts.up[0], experts.down[0]
        assert x.shape == (num_tokens, up.in_features) and x.dtype is up.dtype
        assert chosen.dtype is torch.int32 and chosen.is_contiguous()
        assert weights.dtype is torch.float32 and weights.is_contiguous()
        assert weights.shape == chosen.shape and up.gated == args.gated
        x = runtime.dense(x)
        runtime.keep(num_tokens, x, chosen, weights)
        if runtime.program is not None:
            # the list is long with many experts, and only a program keeps it
            runtime.keep(num_tokens, experts.native, *_tensors(experts.up + experts.down))
        banks: tuple[Any, Any] = (None, None)
        if adapters is not None:
            banks = self._bank(adapters.up, up), self._bank(adapters.down, down)
            runtime.keep(num_tokens, adapters.slots)
        y = runtime.output((num_tokens, down.out_features), x.dtype)
        finish, limit = _finish_of(args)
        self._context.experts(
            experts.experts,
            *(part.data_ptr() for part in experts.native),
            num_tokens,
            *rows_at(x),
            y.data_ptr(),
            top_k,
            chosen.data_ptr(),
            weights.data_ptr(),
            self._finishes[finish],
            self._acts[args.act],
            limit,
            args.weighs_input,
            0 if adapters is None else adapters.slots.data_ptr(),
            *banks,
        )
        return y

    def _bank(self, bank: Any, weight: CpuLinear) -> Any:
        """The native form of a bank of a product's adapters."""
        if bank is None:
            return None
        assert isinstance(bank, CpuBank)
        assert bank.shape.in_features == weight.in_features
        assert bank.shape.out_features == weight.out_features
        if (program := self._runtime.program) is not None:
            self._runtime.keep(program.capacity, *bank_tensors(bank))
        return bank.native


def _alike(weights: Experts) -> Experts:
    """The weights, in codes of one kind where they are in codes."""
    if isinstance(weights, Tensor) or isinstance(weights[0], RowStack):
        return weights
    return of_one_kind(cast(Sequence[CodedWeight], weights))


def _into(memory: Tensor, pack: Callable[..., CpuLinear]) -> Callable[..., CpuLinear]:
    """`pack` whose panels are the next row of `memory` [E, bytes]."""
    rows = iter(memory)

    def take(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return next(rows).view(dtype).view(shape)

    return partial(pack, memory=take)


def _finish_of(args: MoeArgs) -> tuple[str, float]:
    """Activation of the sums of gates and ups, and its limit (csrc/kernels/kernels.hpp)."""
    if args.clamp is not None:
        return "limited", args.clamp
    if args.bound is not None:
        return "bounded", args.bound
    return ("gated" if args.gated else "plain"), 1.0


def _tensors(weights: Sequence[CpuLinear]) -> list[Tensor | None]:
    return [part for w in weights for part in (w.panels, w.scales, w.bias, w.order)]
