"""The experts of tokens, and the pairs of token and expert grouped by expert: three launches.

Nothing here waits for the device, and nothing depends on the order in which programs run.
"""

# ruff: noqa: N803  (constants of kernels are in capitals)

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.launch import KEEP_NAN, dense, kernel, power_of_2
from quire.kernels.triton.linear.triton_linear import Pairs
from quire.ops.routing import RouteArgs, scaled_by_expert
from quire.ops.routing import route as plain_route

_PAIRS = 1024
_TILES = 64
_SCORES = ("softmax", "sigmoid", "softmax_topk")


@kernel
def _scores(x: tl.tensor, is_expert: tl.tensor, SCORE: tl.constexpr) -> Any:
    """The scores of one token's router logits x."""
    if SCORE == "softmax":
        weight = tl.where(is_expert, tl.exp(x - tl.max(tl.where(is_expert, x, float("-inf")))), 0.0)
        return weight / tl.sum(weight)
    elif SCORE == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-x))
    else:  # a third path for the compiler, not for Python
        return x


@kernel
def _first_best(rank: tl.tensor, is_free: tl.tensor, id: tl.tensor, END: tl.constexpr) -> Any:
    """The lowest id of the free ones with the largest rank, no rank being NaN."""
    best = tl.max(tl.where(is_free, rank, float("-inf")), 0)
    return tl.min(tl.where(is_free & (rank == best), id, END), 0)


@kernel
def _best_groups(
    rank: tl.tensor,
    is_expert: tl.tensor,
    member: tl.tensor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    LANES: tl.constexpr,
) -> Any:
    """Marks the groups [LANES] with the largest sums of their one or two best of rank [LANES,
    members].
    """
    group = tl.arange(0, LANES)
    rank = tl.where(is_expert, rank, float("-inf"))
    total = tl.max(rank, 1)
    if SIZE > 1 and GROUP_BEST > 1:
        first = tl.min(tl.where(rank == total[:, None], member, SIZE), 1)
        second = tl.max(tl.where(member == first[:, None], float("-inf"), rank), 1)
        both = total + second
        # infinity minus infinity: a group that has a NaN, whose rank is infinite, is the best
        total = tl.where(both == both, both, float("inf"))
    is_free = group < GROUPS
    for _ in range(TOP_GROUPS):
        is_free = is_free & (group != _first_best(total, is_free, group, GROUPS))
    return (group < GROUPS) & (is_free == 0)


@kernel
def _route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SCORE: tl.constexpr,
    RENORM: tl.constexpr,
    RENORM_EPS: tl.constexpr,
    RENORM_MIN: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    LANES: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHOICES: tl.constexpr,
) -> None:
    """The choice of token program_id(0) among GROUPS * SIZE experts, and the weights of it."""
    token = tl.program_id(0).to(tl.int64)
    experts: tl.constexpr = GROUPS * SIZE
    group, member = tl.arange(0, LANES)[:, None], tl.arange(0, MEMBERS)[None, :]
    id = group * SIZE + member
    is_expert = (group < GROUPS) & (member < SIZE)
    x = tl.load(logits + token * experts + id, is_expert, other=0.0).to(tl.float32)
    score = _scores(x, is_expert, SCORE)
    rank = score
    if HAS_BIAS:
        rank += tl.load(bias + id, is_expert, other=0.0).to(tl.float32)
    rank = tl.where(rank == rank, rank, float("inf"))  # NaN is chosen first, as by torch
    if GROUPS > 1:
        is_kept = _best_groups(rank, is_expert, member, GROUPS, SIZE, TOP_GROUPS, GROUP_BEST, LANES)
        rank = tl.where(is_kept[:, None], rank, float("-inf"))
    id, rank = tl.ravel(id), tl.ravel(rank)
    # a lane beyond a group has the id of the next group's first expert
    is_free, score = tl.ravel(is_expert), tl.ravel(tl.where(is_expert, score, 0.0))
    choice = tl.arange(0, CHOICES)
    ids = tl.zeros((CHOICES,), tl.int32)
    found = tl.zeros((CHOICES,), tl.float32)
    for i in range(TOP_K):
        best = _first_best(rank, is_free, id, experts)
        is_free = is_free & (id != best)
        ids = tl.where(choice == i, best, ids)
        # one lane is read as a sum in which all others are 0
        found = tl.where(choice == i, tl.sum(tl.where(id == best, score, 0.0), 0), found)
    is_choice = choice < TOP_K
    if SCORE == "softmax_topk":
        largest = tl.max(tl.where(is_choice, found, float("-inf")), 0)
        found = tl.where(is_choice, tl.exp(found - largest), 0.0)
        found = found / tl.sum(found, 0)
    elif RENORM:
        total = tl.sum(found, 0) + RENORM_EPS
        found = found / (tl.maximum(total, RENORM_MIN, KEEP_NAN) if RENORM_MIN > 0.0 else total)
    to = token * TOP_K + choice
    tl.store(chosen + to, ids, is_choice)
    tl.store(weights + to, found * SCALE, is_choice)


@kernel
def _order_kernel(
    chosen: tl.tensor,
    order: tl.tensor,
    firsts: tl.tensor,
    counts: tl.tensor,
    num_pairs: int,
    END: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The pairs of expert program_id(0), one after the other -> their part of `order`, where it
    begins, and how many they are.
    """
    expert = tl.program_id(0)
    first, count = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        found = tl.load(chosen + at, at < num_pairs, other=END)
        first += tl.sum((found < expert).to(tl.int32), 0)
        count += tl.sum((found == expert).to(tl.int32), 0)
    tl.store(firsts + expert, first)
    tl.store(counts + expert, count)
    for start in range(0, num_pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_own = tl.load(chosen + at, at < num_pairs, other=END) == expert
        place = first + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place, at, is_own)
        first += tl.sum(is_own.to(tl.int32), 0)


@kernel
def _tiles_kernel(
    firsts: tl.tensor,
    counts: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    ends: tl.tensor,
    num_tiles: int,
    E: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Assigns pairs to the programs of a product, for BLOCK programs: see `Pairs`."""
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    tiles = (tl.load(counts + lane, lane < E, other=0) + ROWS - 1) // ROWS
    is_over = (tl.cumsum(tiles, 0)[None, :] <= tile[:, None]) & (lane < E)[None, :]
    expert = tl.sum(is_over.to(tl.int32), 1)
    before = tl.sum(tl.where(is_over, tiles[None, :], 0), 1)
    is_used = expert < E
    # spare programs read what is there
    expert = tl.minimum(expert, E - 1)
    first = tl.load(firsts + expert)
    start = first + (tile - before) * ROWS
    end = tl.minimum(start + ROWS, first + tl.load(counts + expert))
    inside = tile < num_tiles
    tl.store(experts + tile, expert, inside)
    tl.store(starts + tile, start, inside)
    # an end of 0 marks a spare program
    tl.store(ends + tile, tl.where(is_used, end, 0), inside)


def route(
    logits: Tensor,
    args: RouteArgs,
    select_bias: Tensor | None = None,
    expert_scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `quire.ops.routing.route`; of equal scores the lowest expert is chosen. Scores for which
    there is no kernel are computed by the definition.
    """
    if args.score not in _SCORES:
        chosen, weights = plain_route(logits, args, select_bias, expert_scales)
        return chosen, weights
    logits = dense(logits)
    tokens, size = len(logits), logits.shape[1] // args.groups
    chosen = logits.new_empty(tokens, args.top_k, dtype=torch.int32)
    weights = logits.new_empty(tokens, args.top_k, dtype=torch.float32)
    if tokens:
        _route_kernel[(tokens,)](
            logits,
            logits if select_bias is None else dense(select_bias),
            chosen,
            weights,
            GROUPS=args.groups,
            SIZE=size,
            TOP_K=args.top_k,
            TOP_GROUPS=args.top_groups,
            GROUP_BEST=args.group_best,
            SCORE=args.score,
            RENORM=args.renorm,
            RENORM_EPS=args.renorm_eps,
            RENORM_MIN=args.renorm_min,
            SCALE=args.scale,
            HAS_BIAS=select_bias is not None,
            LANES=power_of_2(args.groups),
            MEMBERS=power_of_2(size),
            CHOICES=power_of_2(args.top_k),
            num_warps=1,
        )
    return chosen, scaled_by_expert(weights, chosen, expert_scales)


def grouped(chosen: Tensor, num_experts: int, rows: int) -> Pairs:
    """Pairs [P] int32 with their experts -> programs of at most `rows` pairs of one expert each, at
    least one pair. Their number is the most that any choice could need, so that the host need not
    know the choice.
    """
    num_pairs = len(chosen)
    most = min(num_pairs, num_pairs // rows + num_experts)
    order = torch.empty_like(chosen)
    firsts, counts = (chosen.new_empty(num_experts) for _ in range(2))
    experts, starts, ends = (chosen.new_empty(most) for _ in range(3))
    _order_kernel[(num_experts,)](
        chosen, order, firsts, counts, num_pairs, END=num_experts, BLOCK=_PAIRS
    )
    _tiles_kernel[(-(-most // _TILES),)](
        firsts,
        counts,
        experts,
        starts,
        ends,
        most,
        E=num_experts,
        LANES=power_of_2(num_experts),
        ROWS=rows,
        BLOCK=_TILES,
    )
    return Pairs(order, experts, starts, ends, rows)
