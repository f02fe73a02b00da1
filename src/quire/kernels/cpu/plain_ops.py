"""Ops without a native kernel as Python entries of a recorded program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops.attention import AttentionPlan
from quire.ops.catalog import CATALOG
from quire.ops.select import Ops

TOKEN_AXES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "embed": {"ids": 0, "positions": 0},
        "embed_packed": {"ids": 0},
        "norm": {"x": 0},
        "add": {"x": 0, "delta": 0},
        "add_norm": {"x": 0, "delta": 0},
        "multiply": {"x": 0},
        "scale_gate": {"y": 0, "gate": 0},
        "scale_heads": {"y": 0, "gate": 0},
        "modulate": {"x": 0, "by": 0},
        "bounded_gated": {"gate_up": 0},
        "clamped_gated": {"gate_up": 0},
        "sparse_gated": {"gate_up": 0},
        "xielu": {"x": 0},
        "linear": {"x": 0},
        "row_peaks": {"x": 0},
        "linear_partial": {"x": 0, "peaks": 0},
        "linear_total": {"parts": 0, "peaks": 0},
        "hidden": {"x": 0},
        "route": {"logits": 0},
        "route_softplus": {"logits": 0, "ids": 0},
        "moe": {"x": 0, "chosen": 0, "weights": 0},
        "logits": {"x": 0},
        "rope_store": {"qkv": 0, "slots": 0, "positions": 1},
        "rope_queries": {"q": 0, "positions": 1},
        "mix_axes": {"positions": 1},
        "scale_queries": {"q": 0, "positions": 1},
        "attend": {"q": 0},
        "attend_prompts": {"q": 0, "k": 0, "v": 0},
        "attend_relative": {"q": 0, "k": 0, "v": 0},
        "heads_linear": {"x": 0},
        "latent_store": {"q": 0, "x": 0, "slots": 0, "positions": 1},
        "latent_attend": {"q": 0, "q_rotated": 0},
        "index_select": {"q": 0, "k": 0, "weights": 0, "slots": 0},
        "indexed_attend": {"q": 0, "q_rotated": 0, "chosen": 0},
        "block_select": {"q": 0, "k": 0, "slots": 0},
        "block_attend": {"q": 0, "k": 0, "v": 0, "chosen": 0, "slots": 0},
        "recent_store": {"q": 0, "key": 0, "rest": 0, "slots": 0, "positions": 1},
        "entry_select": {"q": 0, "weights": 0, "slots": 0, "positions": 1},
        "recent_attend": {"q": 0, "positions": 1, "slots": 0, "chosen": 0},
        "short_conv": {"x": 0, "reads": 0, "writes": 0, "before": 0, "after": 0},
        "mamba_scan": {"x": 0, "dt": 0, "b": 0, "c": 0, "reads": 0, "writes": 0, "gate": 0},
        "mamba2_scan": {"x": 0, "dt": 0, "b": 0, "c": 0, "reads": 0, "writes": 0},
        "gated_delta": {"q": 0, "k": 0, "v": 0, "a": 0, "b": 0, "reads": 0, "writes": 0},
        "channel_delta": {"q": 0, "k": 0, "v": 0, "a": 0, "b": 0, "reads": 0, "writes": 0},
        "gated_linear": {"x": 0, "gates": 0, "reads": 0, "writes": 0, "positions": 1},
        "gated_norm": {"y": 0, "gate": 0},
        "join_streams": {"x": 0, "other": 0},
        "enter_streams": {"x": 0, "others": 0},
        "predict_streams": {"x": 0, "routed": 0},
        "correct_streams": {"x": 0, "activated": 0, "routed": 0},
        "add_to_streams": {"x": 0, "delta": 0},
        "add_matched": {"total": 0, "y": 0, "like": 0},
        "collapse_streams": {"x": 0},
        "expand_streams": {"x": 0, "delta": 0, "mix": 0},
    }
)
"""Op of a forward pass -> its arguments that have a row per token, and which axis T is."""


@dataclasses.dataclass(slots=True)
class CurrentPlan:
    """Stands in a recorded batch for an attention plan that is another one each step.

    `plan` is set before every replay; during recording it is a plan for no rows.
    """

    plan: AttentionPlan


def recordable(ops: Ops, runtime: CpuRuntime) -> Ops:
    """`ops` whose functions outside of the native code record themselves, too: those of other
    providers, and those that the native one has from their contracts.

    They cost what they cost without a program, and one copy of their results.
    """
    foreign = [
        choice.op
        for choice in ops.choices
        if choice.op in TOKEN_AXES
        # this provider hands out plain torch's bodies, too, which do not record themselves
        and (choice.provider != "cpu" or getattr(ops, choice.op) is CATALOG[choice.op].definition)
    ]
    changes: dict[str, Any] = {
        name: _recordable(name, getattr(ops, name), runtime) for name in foreign
    }
    return dataclasses.replace(ops, **changes)


def _recordable(name: str, function: Callable[..., Any], runtime: CpuRuntime) -> Callable[..., Any]:
    axes, signature = TOKEN_AXES[name], CATALOG[name].signature

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
