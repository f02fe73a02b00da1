"""What a model runs on: a device, the ops that were chosen for it, and how steps are run there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from quire.config.environment import read_environment
from quire.config.plan import EnginePlan
from quire.kernels.cpu_plain import recordable
from quire.kernels.cpu_runtime import open_runtime
from quire.models.decoder import DecoderModel
from quire.ops import Ops, select
from quire.runner.batch import BatchBuilder
from quire.runner.device import CpuDevice, Device
from quire.runner.graphs import EagerForward, Forward, RecordedForward


@dataclass(frozen=True, slots=True)
class Target:
    """A device and its ops; `make_forward` gives what runs a model's steps there."""

    device: Device
    ops: Ops
    make_forward: Callable[[DecoderModel, BatchBuilder], Forward]


def open_target(plan: EnginePlan) -> Target:
    """The device that the plan names."""
    runtime = open_runtime(num_threads=plan.num_threads, isa=read_environment().cpu_isa)
    ops = select(device=plan.device, dtype=getattr(torch, plan.dtype), runtime=runtime)
    if runtime is None or not plan.use_graphs:
        return Target(CpuDevice(), ops, lambda model, _: EagerForward(model))
    return Target(
        CpuDevice(),
        recordable(ops, runtime),
        lambda model, batches: RecordedForward(
            model, runtime, batches.capacity_batch, num_rows=plan.max_num_seqs
        ),
    )
