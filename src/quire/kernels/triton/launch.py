"""Compilation and launch of Triton kernels.

A kernel's facts are of two kinds. What a model fixes (widths, head counts, dtypes) is `constexpr`,
so that the compiler can vectorise. What a step decides (numbers of rows, lengths) is never
specialised: an argument that is 1 or divisible by 16 must not cause another compilation, because a
compilation after start-up is a stall that a user sees.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

ALIGNMENT = 16
"""Bytes. Triton compiles a second time for a pointer that is not a multiple of it."""

KEEP_NAN = tl.constexpr(tl.PropagateNan.ALL)
"""Argument of `minimum`, `maximum` and `clamp`, which else turn NaN into the other operand, so that
a row whose numbers are lost goes on as one that looks well. The instruction costs a GPU the same.
"""

_COLUMNS = 1024

FLOAT32_WARPS = 8
"""Warps of a program that multiplies in float32: without tensor cores every thread keeps whole rows
of the operands in registers, so they are for few rows and many threads.
"""


class Kernel(JITFunction):  # type: ignore[type-arg]
    """A compiled kernel that is launched again without binding and hashing all of its arguments,
    which takes Triton several times as long as the launch.

    A variant is what Triton compiles for: types and alignment of tensors, types of numbers, and the
    values of all keyword arguments. The first launch of a variant is Triton's own.
    """

    def __init__(self, function: Callable[..., Any], numbers: list[str]) -> None:
        super().__init__(function, do_not_specialize=numbers)
        self._variants: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch on the current device and stream. `grid`: a tuple; constants and options, and
        nothing else, are given by name.
        """
        device = driver.active.get_current_device()
        variant = device, tuple(map(_kind, args)), tuple(kwargs.items())
        known = self._variants.get(variant)
        if known is None or triton.knobs.runtime.launch_enter_hook.calls:  # a profiler listens
            compiled = super().run(*args, grid=grid, warmup=warmup, **kwargs)
            if not warmup and compiled is not None:
                rest = list(self.signature.parameters.values())[len(args) :]
                constants = tuple(kwargs.get(p.name, p.default) for p in rest)
                self._variants[variant] = compiled, constants
            return compiled
        compiled, constants = known
        sizes = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        program = compiled.function, compiled.packed_metadata
        compiled.run(*sizes, stream, *program, None, None, None, *args, *constants)
        return compiled


def _kind(value: Any) -> Any:
    """The part of an argument that is not a constant by which Triton specializes."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, int):
        return int, -(1 << 31) <= value < 1 << 31
    return type(value)


def kernel(function: Callable[..., Any]) -> Any:
    """A Triton kernel whose numbers are not specialised: parameters in small letters without
    `constexpr` that are annotated `int` or `float`.
    """
    numbers = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.annotation in ("int", "float", int, float)
    ]
    if is_interpreted():
        return triton.jit(function, do_not_specialize=numbers)
    return Kernel(function, numbers)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on tensors of the CPU (TRITON_INTERPRET=1)."""
    return bool(triton.knobs.runtime.interpret)


def dense(x: Tensor) -> Tensor:
    """x without gaps, from an aligned address on."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def readable(x: Tensor) -> Tensor:
    """x as it is, a part of a wider one at times, or a copy where the numbers of its last dim do
    not lie next to each other or begin anywhere.
    """
    is_aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(-1) == 1
    return x if is_aligned else dense(x)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have at most on this GPU; where none runs it, on Hopper."""
    if device.type != "cuda" or is_interpreted():
        return 227 << 10
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n, and at least `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def columns_of(width: int) -> tuple[int, int]:
    """The number of programs that share a row computed element by element, and the columns of
    each. A program has one row, so that its mask depends on constants alone and memory is moved 16
    bytes at a time; rows are on axis 0 of the grid, the one that is longer than 65,535.
    """
    block = min(_COLUMNS, power_of_2(width))
    return -(-width // block), block


def dot_type(dtype: torch.dtype) -> Any:
    """The type of a product's operands: the model's; in the interpreter float32 for bfloat16, whose
    bits it multiplies as whole numbers.
    """
    if is_interpreted() and dtype is torch.bfloat16:
        return tl.float32
    return TYPES[dtype]


TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.int8: tl.int8,
    torch.float8_e4m3fn: tl.float8e4nv,
}
"""torch's names -> Triton's."""
