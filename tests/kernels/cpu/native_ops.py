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


def has_own_code(isa: str, dtype: torch.dtype) -> bool:
    """Whether kernels of a level are not those of the level before for the dtype."""
    return isa != "avx512_bf16" or dtype is torch.bfloat16


def is_sharp(isa: str, dtype: torch.dtype, case: Case) -> bool:
    """Every case at every level, in one dtype; in bfloat16 where a level has code for nothing else.

    A case takes the same path in each dtype: they differ in how numbers are read and written, which
    the other cases of the dtype show.
    """
    return dtype is (torch.bfloat16 if isa == "avx512_bf16" else case.one_of(DTYPES))


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def case_id(case: Case) -> str:
    return f"{case.op}/{case.name}"
