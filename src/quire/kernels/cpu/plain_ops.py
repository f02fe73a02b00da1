"""Ops without a native kernel as Python entries of a recorded program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops.attention import AttentionPlan
from quire.ops.catalog import CATALOG, Ops


@dataclass(slots=True)
class CurrentPlan:
    """Stands in a recorded batch for an attention plan, of which each step has one of its own.

    `plan` is set before every replay; during recording it is a plan for no rows.
    """

    plan: AttentionPlan


def recordable(ops: Ops, runtime: CpuRuntime) -> Ops:
    """`ops` whose functions outside of the native code record themselves, too: those of other
    providers, and those for which the native one has their definitions.

    They cost what they cost without a program, and one copy of their results.
    """
    foreign = [
        choice.op
        for choice in ops.choices
        if CATALOG[choice.op].axes
        # this provider hands out plain torch's bodies, too, which do not record themselves
        and (choice.provider != "cpu" or getattr(ops, choice.op) is CATALOG[choice.op].definition)
    ]
    changes: dict[str, Any] = {
        name: _recordable(name, getattr(ops, name), runtime) for name in foreign
    }
    return ops.replace(**changes)


def _recordable(name: str, function: Callable[..., Any], runtime: CpuRuntime) -> Callable[..., Any]:
    axes, signature = CATALOG[name].axes, CATALOG[name].signature

    def op(*args: Any, **keywords: Any) -> Any:
        program = runtime.program
        if program is None:
            return function(*args, **keywords)
        arguments = signature.bind(*args, **keywords).arguments
        for argument in axes:
            if arguments.get(argument) is not None:
                # without a claim: the closure lives as long as the program, and its arena reuses
                # the memory
                arguments[argument] = program.borrow(arguments[argument])

        def run(num_tokens: int) -> tuple[Tensor, ...]:
            now = {n: _first(v, axes.get(n), num_tokens) for n, v in arguments.items()}
            result = function(**now)
            return result if isinstance(result, tuple) else (result,)

        def entry(num_tokens: int) -> None:
            for place, result in zip(places, run(num_tokens), strict=True):
                place[:num_tokens].copy_(result)

        capacity = program.capacity
        # a call without tokens tells the widths and types of results
        outputs = tuple(program.output((capacity, *y.shape[1:]), y.dtype) for y in run(0))
        places = [program.borrow(y) for y in outputs]
        program.call(entry)
        return outputs if len(outputs) > 1 else outputs[0]

    return op


def _first(value: Any, axis: int | None, num_tokens: int) -> Any:
    """The argument as it is in a step of num_tokens."""
    if isinstance(value, CurrentPlan):
        return value.plan
    return value if axis is None or value is None else value.narrow(axis, 0, num_tokens)
