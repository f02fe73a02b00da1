"""The native ops that multiply with weights: projections, feed-forward layers, logits, experts.

An output is summed over its inputs in one order that depends on the weight alone, so a row's bits
do not depend on the other rows: see csrc/kernels/linear.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu_runtime import CpuRuntime, huge_tensor
from quire.ops.moe import MoeArgs, mixture
from quire.ops.registry import nbytes


@dataclass(frozen=True, slots=True)
class CpuLinear:
    """A weight in panels of outputs (csrc/kernels/linear_pack.cpp says how they look), and its bias
    in fp32.
    """

    native: Any
    in_features: int
    out_features: int
    panels: Tensor
    bias: Tensor | None

    @property
    def nbytes(self) -> int:
        return nbytes(self.panels, self.bias)


@dataclass(frozen=True, slots=True)
class CpuExperts:
    """The packed weights of each expert."""

    experts: int
    up: tuple[CpuLinear, ...]
    down: tuple[CpuLinear, ...]

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.up + self.down)


class LinearOps:
    """`pack_linear`, `linear`, `mlp`, `logits`, `pack_experts` and `moe` on a runtime; see
    quire.ops for each.
    """

    def __init__(self, runtime: CpuRuntime) -> None:
        native = runtime.native
        self._runtime = runtime
        self._context = runtime.context
        self._make = native.PackedWeight
        self._width = native.panel_width
        self._types = {
            torch.float32: native.Type.f32,
            torch.bfloat16: native.Type.bf16,
            torch.float16: native.Type.f16,
        }
        self._acts = native.Act.__members__
        self._finishes = native.FinishKind.__members__

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> CpuLinear:
        """weight [out, in], bias [out]; both are copied."""
        assert self._runtime.program is None, "weights are packed before recording"
        weight = self._runtime.dense(weight)
        out_features, in_features = weight.shape
        panels = -(-out_features // self._width)
        pairs = -(-in_features // 2)
        memory = huge_tensor((panels, pairs, 2 * self._width), weight.dtype)
        wide = None
        if bias is not None:
            wide = torch.zeros((panels + 1) * self._width)
            wide[:out_features] = bias
        native = self._make(
            self._types[weight.dtype],
            in_features,
            out_features,
            memory.data_ptr(),
            0 if wide is None else wide.data_ptr(),
        )
        self._context.pack(native, weight.data_ptr(), weight.stride(0), memory.data_ptr())
        return CpuLinear(native, in_features, out_features, memory, wide)

    def linear(self, x: Tensor, w: CpuLinear) -> Tensor:
        """x [T, in] -> [T, out]."""
        return self._product(x, w, w.out_features)

    def mlp(self, x: Tensor, up: CpuLinear, down: CpuLinear, act: str, gated: bool) -> Tensor:
        """x [T, C] -> [T, C]; the hidden layer is rounded once, after activation and gate."""
        finish = "gated" if gated else "plain"
        hidden = self._product(x, up, down.in_features, finish, act)
        return self._product(hidden, down, down.out_features)

    def logits(
        self, x: Tensor, head: CpuLinear, scale: float = 1.0, softcap: float | None = None
    ) -> Tensor:
        """x [R, C] -> fp32 [R, V]."""
        return self._product(x, head, head.out_features, "logits", "none", scale, softcap or 0.0)

    def pack_experts(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> CpuExperts:
        """gate_up [E, 2F, C], down [E, C, F], biases [E, 2F] and [E, C]; all are copied."""
        return CpuExperts(
            len(gate_up), self._pack_each(gate_up, gate_up_bias), self._pack_each(down, down_bias)
        )

    def moe(
        self,
        x: Tensor,
        router: CpuLinear,
        experts: CpuExperts,
        args: MoeArgs,
        select_bias: Tensor | None = None,
    ) -> Tensor:
        """x [T, C] -> [T, C]. Who computes what is decided while it runs, so that a program records
        it as a Python entry.
        """
        program = self._runtime.program
        if program is None:
            return self._moe(x, router, experts, args, select_bias)
        out = self._runtime.output(x.shape, x.dtype)
        source, target = program.borrow(x), program.borrow(out)

        def run(num_tokens: int) -> None:
            y = self._moe(source[:num_tokens], router, experts, args, select_bias)
            target[:num_tokens].copy_(y)

        program.call(run)
        return out

    def _moe(
        self,
        x: Tensor,
        router: CpuLinear,
        experts: CpuExperts,
        args: MoeArgs,
        select_bias: Tensor | None,
    ) -> Tensor:
        finish = "gated" if args.clamp is None else "limited"

        def expert(index: int, rows: Tensor) -> Tensor:
            up, down = experts.up[index], experts.down[index]
            hidden = self._product(rows, up, down.in_features, finish, args.act, args.clamp or 1.0)
            return self._product(hidden, down, down.out_features)

        return mixture(x, self.linear(x, router), args, select_bias, expert)

    def _pack_each(self, weight: Tensor, bias: Tensor | None) -> tuple[CpuLinear, ...]:
        biases = [None] * len(weight) if bias is None else bias.unbind()
        return tuple(self.pack_linear(w, b) for w, b in zip(weight.unbind(), biases, strict=True))

    def _product(
        self,
        x: Tensor,
        w: CpuLinear,
        width: int,
        finish: str = "plain",
        act: str = "none",
        scale: float = 1.0,
        softcap: float = 0.0,
    ) -> Tensor:
        """[T, width] of what becomes of x times the weight (csrc/kernels/kernels.hpp, Finish)."""
        runtime = self._runtime
        assert x.shape[1] == w.in_features and x.dtype is w.panels.dtype
        x = runtime.dense(x)
        num_tokens = x.shape[0]
        runtime.keep(num_tokens, x, w.panels, w.bias)
        y = runtime.output((num_tokens, width), torch.float32 if finish == "logits" else x.dtype)
        self._context.linear(
            w.native,
            num_tokens,
            x.data_ptr(),
            x.stride(0),
            y.data_ptr(),
            width,
            self._finishes[finish],
            self._acts[act],
            scale,
            softcap,
        )
        return y
