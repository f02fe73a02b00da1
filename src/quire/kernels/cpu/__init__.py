"""The provider "cpu": the native kernels of csrc/, bound to a runtime."""

from __future__ import annotations

import torch

from quire.hardware.native import find_native
from quire.kernels.cpu.attention_ops import AttentionOps
from quire.kernels.cpu.expert_ops import ExpertOps
from quire.kernels.cpu.kv_ops import KVOps
from quire.kernels.cpu.latent_ops import LatentOps
from quire.kernels.cpu.linear_ops import LinearOps
from quire.kernels.cpu.lora_ops import LoraOps
from quire.kernels.cpu.mask_ops import MaskOps
from quire.kernels.cpu.prompt_ops import PromptOps
from quire.kernels.cpu.row_ops import RowOps
from quire.kernels.cpu.runtime import CpuRuntime
from quire.kernels.cpu.sample_ops import SampleOps
from quire.kernels.cpu.state_ops import StateOps
from quire.ops.catalog import CATALOG
from quire.ops.registry import Facts, Implementation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES: tuple[type, ...] = (
    *(RowOps, LinearOps, ExpertOps, LoraOps, KVOps, AttentionOps, PromptOps),
    *(LatentOps, StateOps, MaskOps, SampleOps),
)
"""Classes of native bodies: each method that is named as an op is that op's."""


def implementations(facts: Facts) -> tuple[Implementation, ...]:
    """The native ops on `facts.runtime`; without one, on the calling thread alone."""
    native, reason = find_native()
    if native is None:
        return tuple(
            Implementation(name, "cpu", CATALOG[name].definition, lambda _: reason)
            for kind in FAMILIES
            for name in ops_of(kind)
        )
    runtime = facts.runtime or CpuRuntime()
    assert isinstance(runtime, CpuRuntime)
    families = [
        kind(runtime, facts.dtype) if kind in (LinearOps, ExpertOps) else kind(runtime)
        for kind in FAMILIES
    ]
    return tuple(
        Implementation(
            *(name, "cpu", getattr(family, name), supports), batch_invariant=True, takes_rows=True
        )
        for family in families
        for name in ops_of(type(family))
    )


def ops_of(family: type) -> list[str]:
    """The ops that one of `FAMILIES` has."""
    return [name for name in CATALOG if name in vars(family)]


def supports(facts: Facts) -> bool | str:
    """Whether activations of this kind are served, or why not."""
    if facts.device.type != "cpu":
        return f"is for the CPU, not for {facts.device.type}"
    if facts.dtype not in DTYPES:
        return f"has no {str(facts.dtype).removeprefix('torch.')}"
    return True
