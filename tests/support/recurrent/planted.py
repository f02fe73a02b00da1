"""Plausible slips in the ops of layers with a recurrent state, which their cases must catch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire.ops import NO_BLOCK, Ops

Change = Callable[[Tensor], Tensor]
Bug = dict[str, Callable[..., Tensor]]


def planted(ops: Ops) -> dict[str, Bug]:
    """What goes wrong -> functions in place of those of `ops`."""

    def changed(op: str, **changes: Callable[[Any], Any]) -> Bug:
        def run(**given: Any) -> Tensor:
            wrong = {name: change(given[name]) for name, change in changes.items() if name in given}
            return getattr(ops, op)(**given | wrong)

        return {op: run}

    def swapped(op: str, one: str, other: str) -> Bug:
        def run(**given: Any) -> Tensor:
            return getattr(ops, op)(**given | {one: given[other], other: given[one]})

        return {op: run}

    def from_zero(**given: Any) -> Tensor:
        states, kept = given["states"].clone(), given["writes"][given["writes"] >= 0]
        states[given["reads"][given["reads"] >= 0]] = 0
        y = ops.gated_delta(**given | {"states": states})
        given["states"][kept] = states[kept]
        return y

    return {
        "state of another row": changed("mamba2_scan", reads=_of_another_row),
        "state not kept": changed("mamba_scan", writes=lambda w: w * 0 + NO_BLOCK),
        "state kept a token early": changed("gated_delta", writes=_a_token_early),
        "window kept a token early": changed("short_conv", writes=_a_token_early),
        "state from zero": {"gated_delta": from_zero},
        "taps from the newest on": changed("short_conv", weight=lambda w: w.flip(0)),
        "bias of the window forgotten": changed("short_conv", bias=lambda _: None),
        "window not activated": changed("short_conv", act=lambda _: None),
        "gates in each other's place": swapped("short_conv", "before", "after"),
        "input and output numbers swapped": swapped("mamba_scan", "b", "c"),
        "skip forgotten": changed("mamba_scan", skip=torch.zeros_like),
        "scan's gate forgotten": changed("mamba_scan", gate=lambda _: None),
        "growth instead of decay": changed("mamba_scan", decay=torch.neg),
        "bias of steps forgotten": changed("mamba2_scan", dt_bias=torch.zeros_like),
        "steps without limits": changed("mamba2_scan", dt_limits=lambda _: (0.0, float("inf"))),
        "numbers of another group": changed("mamba2_scan", b=_of_another_head),
        "keys of another head": changed("gated_delta", k=_of_another_head),
        "keys and queries swapped": swapped("gated_delta", "q", "k"),
        "everything is learned": changed("gated_delta", b=lambda b: b * 0 + 40),
        "nothing is forgotten": changed("gated_delta", decay=torch.zeros_like),
        "one decay for all channels": changed("channel_delta", a=_mean_of_sixes),
        "bound of decays forgotten": changed("channel_delta", bound=lambda _: None),
        "strength forgotten": changed("channel_delta", strength=lambda _: 1.0),
        "gates swapped": changed("gated_linear", gates=lambda g: g.roll(g.shape[2] // 2, 2)),
        "gates of another block": changed("gated_linear", gates=lambda g: g.roll(1, 1)),
        "root at the first token": changed("gated_linear", positions=lambda p: p + 1),
        "bias of gates forgotten": changed("gated_linear", bias=torch.zeros_like),
        "gate on the other side": changed("gated_norm", gate_first=lambda first: not first),
        "norm over all groups": _norm_over_all(ops),
    }


def _of_another_row(reads: Tensor) -> Tensor:
    found, starts = reads.clone(), reads >= 0
    found[starts] = reads[starts].roll(1)
    return found


def _a_token_early(writes: Tensor) -> Tensor:
    found = writes.clone()
    for t in range(1, len(writes)):
        if writes[t] >= 0 and writes[t - 1] < 0:
            found[t - 1], found[t] = writes[t], NO_BLOCK
    return found


def _of_another_head(x: Tensor) -> Tensor:
    """Rows in halves, each in the place of the other."""
    return x.roll(x.shape[1] // 2, 1)


def _mean_of_sixes(x: Tensor) -> Tensor:
    """The mean of each head of six channels, where there are some."""
    if x.shape[1] % 6:
        return x
    heads = x.unflatten(1, (-1, 6))
    return heads.mean(2, keepdim=True).expand_as(heads).flatten(1)


def _norm_over_all(ops: Ops) -> Bug:
    def gated_norm(**given: Any) -> Tensor:
        width, n = given["y"].shape[1], given["n"]
        is_shared = n is not None and n.weight.numel() != width
        return ops.gated_norm(**given if is_shared else given | {"group": width})

    return {"gated_norm": gated_norm}
