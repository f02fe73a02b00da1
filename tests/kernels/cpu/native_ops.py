"""The native ops of one level, and the names of cases."""

from __future__ import annotations

from functools import cache

import torch

from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import Ops, select
from tests.support.op_cases.case import Case

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@cache
def cpu_ops(isa: str | None, dtype: torch.dtype = torch.float32, num_threads: int = 2) -> Ops:
    """The provider "cpu" on a runtime of its own."""
    runtime = CpuRuntime(num_threads=num_threads, isa=isa)
    return select(device="cpu", dtype=dtype, providers=["cpu"], runtime=runtime)


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def case_id(case: Case) -> str:
    return f"{case.op}/{case.name}"
