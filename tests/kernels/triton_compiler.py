"""Compiles the Triton kernels for an NVIDIA GPU that need not be there, and checks their numbers.

The ops are called with bfloat16 tensors of the host. Each launch is noted instead of run, and what
was noted is compiled down to machine code for Hopper. The last line printed is JSON: for each
kernel how many variants were noted, and why the largest of them does not compile, or null.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton_cases import ROUNDED

from quire.kernels.triton import implementations
from quire.ops import Facts, bind
from quire.ops.cases import CASES, FP8_CASES

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """What a kernel was called with: types of arguments, values of constants, options."""

    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]


def noting_launches() -> dict[str, Launch]:
    """From now on launches end up in the result, each variant once."""
    launches: dict[str, Launch] = {}

    def note(kernel, *args, grid, warmup, **kwargs):
        names = kernel.arg_names
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        types = {p.name: type_of(kernel, p, given[p.name]) for p in kernel.params}
        constants = {name: given[name] for name, type in types.items() if type == "constexpr"}
        options = {name: value for name, value in kwargs.items() if name not in names}
        key = f"{kernel.__name__} {types} {constants}"
        launches.setdefault(key, Launch(kernel, types, constants, options))

    JITFunction.run = note
    return launches


def type_of(kernel, parameter, value) -> str:
    if parameter.is_constexpr:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    assert parameter.do_not_specialize, f"{kernel.__name__}: {parameter.name} is specialised"
    return "i32" if isinstance(value, int) else "fp32"


def main() -> None:
    """Note what the ops launch, then compile."""
    launches = noting_launches()
    host = Facts(torch.device("cpu"), torch.bfloat16)
    for is_fixed in (False, True):
        offered = implementations(replace(host, is_deterministic=is_fixed))
        served = [replace(found, supports=lambda _: True) for found in offered]
        ops = bind(host, served, ["triton"])
        for case in CASES + FP8_CASES + ROUNDED:
            if not case.is_bench:
                case.run(ops, case.prepare(ops, case.draw(torch.bfloat16)).arguments)
    print(json.dumps(compiled(launches)))


def compiled(launches: dict[str, Launch]) -> dict[str, dict]:
    """Compile one variant of each kernel, the one with the most constants that are not 0, and one
    that has 8-bit floats, where there is any.
    """
    by_kernel = defaultdict(list)
    for launch in launches.values():
        has_fp8 = POINTERS[torch.float8_e4m3fn] in launch.types.values()
        by_kernel[launch.kernel.__name__ + " fp8" * has_fp8].append(launch)
    return {name: report_of(variants) for name, variants in by_kernel.items()}


def report_of(variants: list[Launch]) -> dict:
    chosen = max(variants, key=lambda v: sum(map(bool, v.constants.values())))
    source = ASTSource(fn=chosen.kernel, signature=chosen.types, constexprs=chosen.constants)
    try:
        triton.compile(source, target=HOPPER, options=chosen.options)
    except Exception as error:
        return {"variants": len(variants), "failure": f"{chosen.constants}: {error}"}
    return {"variants": len(variants), "failure": None}


if __name__ == "__main__":
    main()
