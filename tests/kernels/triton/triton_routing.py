"""Choices of experts by Triton beside `quire.ops.moe.route`, for test_triton_routing: run with
TRITON_INTERPRET=1; prints JSON: what is wrong in which case.
"""

from __future__ import annotations

import itertools
import json
import random

import torch

from quire.kernels.triton.moe.routing import grouped, route
from quire.ops.routing import RouteArgs
from quire.ops.routing import route as definition

SHAPES = ((1, 1, 1, 1), (6, 2, 1, 1), (8, 8, 1, 1), (12, 3, 3, 2), (64, 6, 8, 3), (5, 2, 5, 4))
"""Experts, top k, groups, top groups."""
SCORES = ("softmax", "sigmoid", "softmax_topk")


def routes(rng):
    for shape, score, renorm, biased in itertools.product(
        SHAPES, SCORES, (False, True), (False, True)
    ):
        experts, top_k, groups, top_groups = shape
        if score == "softmax_topk":
            groups = top_groups = 1
        floor = 0.7 if biased else 0.0
        best = 1 if renorm else 2
        args = RouteArgs(
            top_k, score, renorm, 1.7, groups, top_groups, 1e-20, floor, group_best=best
        )
        logits = torch.randn(3, experts, generator=rng) * 3
        bias = torch.randn(experts, generator=rng) if biased else None
        yield f"{shape} {score} {renorm} {biased}", args, logits, bias


def wrong_routes(rng):
    for name, args, logits, bias in routes(rng):
        chosen, weights = route(logits, args, bias)
        right, right_weights = definition(logits, args, bias)
        if not torch.equal(chosen, right):
            yield f"{name}: {chosen.tolist()} instead of {right.tolist()}"
        elif not torch.allclose(weights, right_weights, rtol=1e-5, atol=1e-7):
            yield f"{name}: {weights.tolist()} instead of {right_weights.tolist()}"


def wrong_hostile_routes(rng):
    """Whatever the numbers, a token has different experts that exist; where one of its scores is
    lost, so are weights.
    """
    lost = (float("nan"), float("inf"), float("-inf"))
    for name, args, logits, bias in [*routes(rng)][::5]:
        for i, value in enumerate(lost):
            logits[i, :: i + 1] = value
        logits = torch.cat([logits, torch.full((1, logits.shape[1]), float("nan"))])
        chosen, weights = route(logits, args, bias)
        for row in chosen.tolist():
            if len({*row}) != args.top_k or not all(0 <= id < logits.shape[1] for id in row):
                yield f"{name}: {row}"
        if not weights[[0, 3]].isnan().any(1).all():
            yield f"{name}: NaN is lost"


def wrong_groups(seed):
    rng = random.Random(seed)
    for count, experts, rows in ((1, 1, 16), (7, 3, 16), (40, 6, 16), (1500, 5, 64), (90, 70, 16)):
        chosen = [min(int(rng.expovariate(0.7)), experts - 1) for _ in range(count)]
        pairs = grouped(torch.tensor(chosen, dtype=torch.int32), experts, rows)
        right = sorted(range(count), key=lambda pair: (chosen[pair], pair))
        if pairs.order.tolist() != right:
            yield f"{count} of {experts}: order"
        found, expert_of = [], dict(enumerate(chosen))
        for expert, start, end in zip(pairs.experts, pairs.starts, pairs.ends, strict=True):
            mine = pairs.order[start:end].tolist() if start < end else []
            if len(mine) > rows or any(expert_of[pair] != expert for pair in mine):
                yield f"{count} of {experts}: program of {expert}"
            found += mine
        if found != right:
            yield f"{count} of {experts}: programs"


def main():
    rng = torch.Generator().manual_seed(5)
    found = [*wrong_routes(rng), *wrong_hostile_routes(rng), *wrong_groups(6)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
