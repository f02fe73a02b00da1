"""Support for adapters in a worker: the room of its model, and reading a file into an adapter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from quire.config.adapter_plan import AdapterPlan
from quire.executor.worker_config import WorkerConfig
from quire.models import find_family, read_spec
from quire.models.adapters.reading import check_adapter, read_adapter
from quire.models.adapters.targets import AdapterTargets
from quire.models.adapters.weights import AdapterWeights
from quire.models.loading.options import AdapterRoom


@dataclass(frozen=True, slots=True)
class AdapterSupport:
    """The room of a model's banks; `read` reads the adapter in a folder and checks it against the
    model, in any thread; `check` checks what can be checked before values are read.
    """

    room: AdapterRoom
    read: Callable[[Path], AdapterWeights]
    check: Callable[[Path], None]


def adapter_support(config: WorkerConfig, plan: AdapterPlan) -> AdapterSupport:
    """Raises InvalidParameter for a target that the model lacks."""
    model = (config.model.hf_config, config.model.pooler)
    targets = AdapterTargets(find_family(*model), read_spec(*model), plan.target_modules)
    dtype = getattr(torch, plan.lora_dtype)
    return AdapterSupport(
        AdapterRoom(plan.max_loras, plan.max_lora_rank, dtype, targets.leaves),
        partial(read_adapter, model=targets, max_rank=plan.max_lora_rank, dtype=dtype),
        partial(check_adapter, model=targets, max_rank=plan.max_lora_rank),
    )
