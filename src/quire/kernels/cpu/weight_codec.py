"""Packed weights of the provider "cpu" as tensors and facts, for files, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from quire.kernels.cpu.expert_ops import CpuExperts, ExpertOps
from quire.kernels.cpu.linear_ops import CodeFacts, CpuLinear, LinearOps
from quire.kernels.cpu.runtime import CpuRuntime

_FACTS = (*("in_features", "out_features", "segments", "form", "rounds_rows", "gated", "group"),)
_TENSORS = ("panels", "scales", "bias", "order")
"""Tensors of a weight, in the order of `LinearOps.weight_of`; every weight has panels."""


class CpuWeightCodec:
    """Takes weights apart that this runtime's kernels have packed, and puts them together."""

    def __init__(self, runtime: CpuRuntime, dtype: torch.dtype) -> None:
        self._ops = LinearOps(runtime, dtype)
        self._expert_ops = ExpertOps(runtime, dtype)

    def take_apart(self, weight: Any) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The facts about a weight, as JSON, and its tensors; None for one of another kind."""
        if isinstance(weight, CpuLinear):
            return _facts_of(weight), _tensors_of(weight)
        if not isinstance(weight, CpuExperts):
            return None
        facts, tensors = {}, {}
        for part, experts in (("up", weight.up), ("down", weight.down)):
            facts[part] = [_facts_of(expert) for expert in experts]
            for index, expert in enumerate(experts):
                for name, tensor in _tensors_of(expert).items():
                    tensors[f"{part}.{index}.{name}"] = tensor
        return facts, tensors

    def put_together(
        self, facts: dict[str, Any], tensors: dict[str, Tensor]
    ) -> CpuLinear | CpuExperts:
        """The weight of these facts and tensors, which it keeps."""
        if "up" not in facts:
            return self._linear(facts, tensors)
        up, down = (
            tuple(
                self._linear(
                    expert, {name: tensors.get(f"{part}.{index}.{name}") for name in _TENSORS}
                )
                for index, expert in enumerate(facts[part])
            )
            for part in ("up", "down")
        )
        return self._expert_ops.experts_of(up, down)

    def _linear(self, facts: dict[str, Any], tensors: Mapping[str, Tensor | None]) -> CpuLinear:
        panels = tensors["panels"]
        assert panels is not None
        codes = facts["codes"]
        if codes is not None:
            # JSON has made lists of tuples
            table = None if codes["table"] is None else tuple(codes["table"])
            codes = CodeFacts(**codes | {"rounding": tuple(codes["rounding"]), "table": table})
        return self._ops.weight_of(
            panels,
            *(tensors.get(name) for name in _TENSORS[1:]),
            dtype=getattr(torch, facts["dtype"]),
            codes=codes,
            **{name: facts[name] for name in _FACTS},
        )


def _facts_of(weight: CpuLinear) -> dict[str, Any]:
    facts = {name: getattr(weight, name) for name in _FACTS}
    facts["dtype"] = str(weight.dtype).removeprefix("torch.")
    facts["codes"] = None if weight.codes is None else asdict(weight.codes)
    return facts


def _tensors_of(weight: CpuLinear) -> dict[str, Tensor]:
    tensors = {name: getattr(weight, name) for name in _TENSORS}
    return {name: each for name, each in tensors.items() if each is not None}
