"""Compiles the Triton kernels for an NVIDIA GPU that need not be there, and checks their numbers.

The ops are called with bfloat16 tensors of the host. Each launch is noted instead of run, and what
was noted is compiled down to machine code for Hopper. The last line printed is JSON: under
"kernels", for each kernel how many variants were noted, and why the largest of them does not
compile, or null; under "models", for each kernel at the shapes of real models, what one program
takes: bytes of registers that were spilled to memory, and of shared memory; under "products", the
same of products with weights, and what the machine code of their loops does; under "codes" those
with weights in codes; under "attention", how attention waits for keys and values, and how many of
its programs an SM holds; under "fixed", variants of attention over latents with `deterministic`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Literal

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from quire.kernels.triton import implementations
from quire.kernels.triton.launch import ALIGNMENT, Kernel
from quire.ops import AttentionArgs, CodedWeight, Facts, Ops, WeightFormat, bind
from quire.ops.formats.row_rounding import RowRounding
from quire.ops.formats.tables import E2M1
from quire.ops.kv import LatentShape
from tests.kernels.triton.machine_code import loop_of, programs_of, taken_by
from tests.kernels.triton.triton_cases import CODED, CODED_ROUNDED, ROUNDED
from tests.support.op_cases import CASES, FP8_CASES, Case

HOPPER = GPUTarget("cuda", 90, 32)
OF_MODELS = ("linear", "draw", "rank")
DTYPES = (torch.bfloat16, torch.float32)
HEADS = ((32, 8, 128), (8, 4, 256), (14, 2, 64))
"""Query heads, KV heads and head dim of Llama, Gemma 2 and Qwen 2."""
LATENTS = {
    "DeepSeek-V2-Lite": (16, 512, 64),
    "GLM-4.7-Flash": (20, 512, 64),
    "DeepSeek-V3": (128, 512, 64),
    "MiniCPM3": (40, 256, 32),
}
"""Heads, numbers of a latent and of a rotated key."""
STORED = (*((torch.bfloat16, heads) for heads in HEADS), (torch.float8_e4m3fn, HEADS[0]))
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

OUTPUTS, INPUTS = 4096, 14_336
"""Of the product in whose machine code is looked: the down projection of an 8B model."""
INT8, INT8_KEPT = WeightFormat("int8"), WeightFormat("int8", rounds_rows=False)
INT4, INT4_KEPT = WeightFormat("int4", 32), WeightFormat("int4", 32, rounds_rows=False)
WIDE_KEPT = WeightFormat("int4", 128, rounds_rows=False)
PRODUCTS = {
    "float fixed": (None, 1, True),
    "fp8 fixed": (WeightFormat("fp8"), 1, True),
    **{
        f"{form.name} {form.group}{'' if form.rounds_rows else ' kept'} x {rows}": (form, rows)
        for rows, forms in {
            1: (INT8, INT8_KEPT, INT4, INT4_KEPT, WIDE_KEPT),
            64: (INT8, INT4, WIDE_KEPT),
            300: (INT8_KEPT, INT4_KEPT),
        }.items()
        for form in forms
    },
}
"""Name -> format, rows, whether bits may not depend on the rows."""


@dataclass(frozen=True)
class Launch:
    """What a kernel was called with: types of arguments, values of constants, options."""

    kernel: JITFunction
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object]

    def machine_code(self):
        """For pointers as torch gives them: multiples of 16 bytes."""
        pointers = [i for i, n in enumerate(self.kernel.arg_names) if self.types[n][0] == "*"]
        source = ASTSource(
            fn=self.kernel,
            signature=self.types,
            constexprs=self.constants,
            attrs={(i,): [["tt.divisibility", ALIGNMENT]] for i in pointers},
        )
        return triton.compile(source, target=HOPPER, options=self.options)


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

    JITFunction.run = Kernel.run = note
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
    # Kernels do not run: what they would have written is zeros, which are valid indices.
    new_empty = torch.Tensor.new_empty
    torch.Tensor.new_empty = lambda *size, **given: new_empty(*size, **given).zero_()
    torch._scaled_mm = lambda a, b, *_, **given: a.new_empty(
        len(a), b.shape[1], dtype=torch.bfloat16
    )
    launches = noting_launches()
    cases = CASES + FP8_CASES + ROUNDED + CODED + CODED_ROUNDED
    run_cases([case for case in cases if not case.is_bench])
    noted = dict(launches)
    launches.clear()
    run_cases([case for case in CASES if case.is_bench and case.op in OF_MODELS])
    for dtype, is_fixed, heads in product(DTYPES, (False, True), HEADS):
        attend(dtype, is_fixed, *heads)
    for dtype, is_fixed, sizes in product(DTYPES, (False, True), LATENTS.values()):
        latent_attend(dtype, is_fixed, *sizes)
    taken = {
        f"{n} {e.kernel.__name__}": taken_by(e.machine_code())
        for n, e in enumerate(launches.values())
    }
    products = {name: report_of_product(launches, *given) for name, given in PRODUCTS.items()}
    attention = {
        f"{stored} {head_dim}": report_of_attention(launches, stored, heads, kv_heads, head_dim)
        for stored, (heads, kv_heads, head_dim) in STORED
    }
    attention |= {name: report_of_latents(launches, *sizes) for name, sizes in LATENTS.items()}
    fixed = {name: variants_of_latents(launches, *sizes) for name, sizes in LATENTS.items()}
    codes = {
        f"{name} x {rows}": report_of_codes(launches, weight(), rows)
        for name, weight in FORMS.items()
        for rows in (1, 64)
    }
    told = {
        "fixed": fixed,
        "models": taken,
        "codes": codes,
        "products": products,
        "attention": attention,
    }
    print(json.dumps({"kernels": compiled(noted), **told}))


def report_of_attention(
    launches: dict[str, Launch], stored: torch.dtype, *heads: int
) -> dict[str, dict]:
    """Of decodes and prompts, with K/V in memory of type `stored`, what there is of each kernel."""
    launches.clear()
    for num_rows in (1, 2, 40, 300):
        attend(torch.bfloat16, False, *heads, stored=stored, num_rows=num_rows)
    return report_of_loops(launches)


def report_of_latents(launches: dict[str, Launch], *sizes: int) -> dict[str, dict]:
    """The same of attention over latents."""
    launches.clear()
    for num_rows in (1, 2, 40, 300):
        latent_attend(torch.bfloat16, False, *sizes, num_rows=num_rows)
    attention = [key for key in launches if "_heads_product_kernel" not in key]
    return report_of_loops({key: launches[key] for key in attention})


def variants_of_latents(launches: dict[str, Launch], *sizes: int) -> int:
    """How many variants of the kernel serve prompts and decodes whose bits may not differ."""
    launches.clear()
    latent_attend(torch.bfloat16, True, *sizes, num_rows=2)
    return sum("_latent_attend_kernel" in key for key in launches)


def report_of_loops(launches: dict[str, Launch]) -> dict[str, dict]:
    names = [
        launch.kernel.__name__ + " shared" * launch.constants.get("SHARES", False)
        for launch in launches.values()
    ]
    assert len(set(names)) == len(names), f"a step's numbers decide what is compiled: {names}"
    codes = {name: e.machine_code() for name, e in zip(names, launches.values(), strict=True)}
    return {
        name: {"left_under_way": loop_of(code).left_under_way, "programs": programs_of(code)}
        for name, code in codes.items()
    }


def attend(
    dtype: torch.dtype,
    is_fixed: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    stored: torch.dtype | None = None,
    num_rows: int = 1,
) -> None:
    """A step with a prompt of 300 tokens and rows with one new token."""
    ops = ops_for(dtype, is_fixed)
    kv = ops.allocate_kv(64, 16, kv_heads, head_dim, stored or dtype, device=torch.device("cpu"))
    plan = ops.plan_attention(
        query_start=np.array([0, *range(300, 301 + num_rows)], dtype=np.int32),
        seq_lens=np.array([300, *[600] * num_rows], dtype=np.int32),
        block_table=torch.zeros(1 + num_rows, 40, dtype=torch.int32),
        block_size=16,
        window=None,
        kv_heads=kv_heads,
    )
    ops.attend(
        torch.zeros(300 + num_rows, heads, head_dim, dtype=dtype), kv, plan, AttentionArgs(0.1)
    )


def latent_attend(
    dtype: torch.dtype, is_fixed: bool, heads: int, rank: int, rotated: int, *, num_rows: int = 1
) -> None:
    """The same step over latents, with the products of heads around it."""
    ops = ops_for(dtype, is_fixed)
    shape = LatentShape(16, rank, rotated)
    [latents] = ops.allocate_shared_kv(64, [shape], dtype, device=torch.device("cpu"))
    plan = ops.plan_latent(
        query_start=np.array([0, *range(300, 301 + num_rows)], dtype=np.int32),
        seq_lens=np.array([300, *[600] * num_rows], dtype=np.int32),
        block_table=torch.zeros(1 + num_rows, 40, dtype=torch.int32),
        block_size=16,
    )
    tokens = 300 + num_rows
    q = torch.zeros(tokens, heads, 128 + rotated, dtype=dtype)[..., :128]
    absorb = ops.pack_heads(torch.zeros(heads, rank, 128, dtype=dtype))
    turned = torch.zeros(tokens, heads, rotated, dtype=dtype)
    means = ops.latent_attend(ops.heads_linear(q, absorb), turned, latents, plan, 0.1)
    ops.heads_linear(means, ops.pack_heads(torch.zeros(heads, 128, rank, dtype=dtype)))


def run_cases(cases: Sequence[Case]) -> None:
    """Call the ops of these cases, as they are bound with and without bits that may vary."""
    for is_fixed in (False, True):
        ops = ops_for(torch.bfloat16, is_fixed)
        for case in cases:
            case.run(ops, case.prepare(ops, case.draw(torch.bfloat16)).arguments)


def ops_for(dtype: torch.dtype, is_fixed: bool) -> Ops:
    host = Facts(torch.device("cpu"), dtype, is_deterministic=is_fixed)
    served = [replace(found, supports=lambda _: True) for found in implementations(host)]
    return bind(host, served, ["triton"])


def report_of_product(
    launches: dict[str, Launch], form: WeightFormat | None, rows: int, is_fixed: bool = False
) -> dict:
    """What a product with one weight of an 8B model takes and does; tensors have no memory."""
    launches.clear()
    ops = ops_for(torch.bfloat16, is_fixed)
    weight = torch.empty(OUTPUTS, INPUTS, dtype=torch.bfloat16, device="meta")
    x = torch.empty(rows, INPUTS, dtype=torch.bfloat16, device="meta")
    ops.linear(x, ops.pack_linear(weight, None, form))
    [launch] = [e for e in launches.values() if e.kernel.__name__ == "product_kernel"]
    code, constants = launch.machine_code(), launch.constants
    bits = {"int4": 4, "float": 16}.get(constants["STORED"], 8)
    loop = loop_of(code)
    per_thread = constants["OUTPUTS"] * constants["DEPTH"] / 32 / launch.options["num_warps"]
    return taken_by(code) | {
        "tile": {name: constants[name] for name in ("ROWS", "OUTPUTS", "DEPTH", "STAGES")},
        "programs": OUTPUTS // constants["OUTPUTS"],
        "weight_bytes": constants["OUTPUTS"] * constants["DEPTH"] * bits // 8,
        "copied_by_16": 32 * launch.options["num_warps"] * 16 * loop.copies_of_16,
        "waited_loads": loop.waited_loads,
        "operations_per_weight": loop.num_instructions / per_thread,
        "tensor_cores": loop.tensor_cores,
    }


def report_of_codes(launches: dict[str, Launch], weight: CodedWeight, rows: int) -> dict:
    """The same of a weight in codes, as far as it is checked."""
    launches.clear()
    ops = ops_for(torch.bfloat16, False)
    ops.linear(torch.zeros(rows, INPUTS, dtype=torch.bfloat16), ops.pack_linear(weight, None))
    [launch] = [e for e in launches.values() if e.kernel.__name__ == "coded_product_kernel"]
    code = launch.machine_code()
    loop = loop_of(code)
    return taken_by(code) | {"waited_loads": loop.waited_loads, "tensor_cores": loop.tensor_cores}


def codes_of(
    bits: Literal[4, 8], group: int, scales: torch.dtype, *, zeros: bool = False, **form: Any
) -> CodedWeight:
    """A weight of that size."""
    groups = (OUTPUTS, -(-INPUTS // group))
    return CodedWeight(
        *(bits, INPUTS, group),
        torch.zeros(OUTPUTS, INPUTS * bits // 8, dtype=torch.uint8),
        torch.zeros(groups, dtype=scales),
        torch.zeros(groups, dtype=torch.uint8) if zeros else None,
        **form,
    )


FORMS = {
    "awq": partial(codes_of, 4, 128, torch.float16, zeros=True),
    "gptq 32": partial(codes_of, 4, 32, torch.float16, zeros=True),
    "w8a16": partial(codes_of, 8, 128, torch.bfloat16),
    "mxfp4": partial(codes_of, 4, 32, torch.bfloat16, table=E2M1),
    "nvfp4": partial(codes_of, 4, 16, torch.float32, table=E2M1),
    "fp8 of blocks": partial(
        codes_of, 8, 128, torch.float32, are_floats=True, rounding=RowRounding("e4m3", 128)
    ),
    "fp8 kept": partial(codes_of, 8, 1 << 20, torch.float32, are_floats=True),
}
"""What checkpoints store."""


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
    try:
        chosen.machine_code()
    except Exception as error:
        return {"variants": len(variants), "failure": f"{chosen.constants}: {error}"}
    return {"variants": len(variants), "failure": None}


if __name__ == "__main__":
    main()
