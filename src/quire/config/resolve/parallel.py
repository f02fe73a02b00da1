"""Decides which copies of an engine run here, and how load is balanced over them (rule 12.7)."""

from __future__ import annotations

from typing import NoReturn

from quire.config.resolve.decisions import Decisions
from quire.config.resolve.ranks import num_workers
from quire.errors import InvalidParameter, NotBuiltYet

INTERNAL, HYBRID, EXTERNAL = "internal", "hybrid", "external"


def decide_data_parallel(d: Decisions, is_headless: bool) -> None:
    """Fix the fields data_parallel_*. Raises InvalidParameter for arguments that contradict each
    other.
    """
    args, size = d.args, d.requested("data_parallel_size")
    if d.requested("data_parallel_backend") == "ray":
        _decide_ray(d, size, is_headless)
        return
    mode, reason = _mode(d, is_headless)
    d.decide("data_parallel_mode", mode, reason)
    ranks = _ranks(d, mode, is_headless)
    if ranks[-1:] >= (size,):
        raise InvalidParameter(
            "data_parallel_start_rank", ranks[0],
            f"with {len(ranks)} of them here the ranks reach beyond data_parallel_size={size}",
        )  # fmt: skip
    where = "of this headless machine" if is_headless else "of this machine"
    d.decide("data_parallel_ranks", ranks, f"those {where}")
    others = mode == INTERNAL and (is_headless or len(ranks) < size)
    given = args.data_parallel_address
    if others or given is not None:
        address = given or "127.0.0.1"
        why = "the default" if given is None else "data_parallel_address was given"
        d.decide("data_parallel_address", address, why)
    else:
        d.decide("data_parallel_address", None, "no core runs elsewhere")
    d.decide("data_parallel_size_local", None, "the ranks say which cores are here")
    d.requested("data_parallel_rpc_port")


def num_cores_here(d: Decisions) -> int:
    """The cores that share a machine."""
    launched = d.value("launched")
    if launched is not None:
        return max(1, int(launched.local_world_size) // num_workers(d))
    each: int | None = d.value("data_parallel_size_local")
    return max(1, len(d.value("data_parallel_ranks")) if each is None else each)


def _decide_ray(d: Decisions, size: int, is_headless: bool) -> None:
    """Fix the same where Ray starts all cores."""
    args = d.args
    refused = "Ray starts all copies from one command"
    for name, is_given in (
        ("headless", is_headless),
        ("data_parallel_rank", args.data_parallel_rank is not None),
        ("data_parallel_start_rank", bool(args.data_parallel_start_rank)),
        ("data_parallel_external_lb", args.data_parallel_external_lb),
        ("data_parallel_hybrid_lb", args.data_parallel_hybrid_lb),
        ("enable_expert_parallel", args.enable_expert_parallel),
    ):
        if is_given:
            value = getattr(args, name, True)
            hint = "Leave it out, or data_parallel_backend='ray'."
            raise InvalidParameter(name, value, refused, hint)
    if d.machine.device != "cpu":
        raise NotBuiltYet(
            "data_parallel_backend", "ray", "Ray places engines on CPUs; start one for each GPU."
        )
    each = args.data_parallel_size_local
    if each is not None and not 0 < each <= size:
        allowed = f"a machine has 1 to {size} of {size} copies"
        raise InvalidParameter("data_parallel_size_local", each, allowed)
    reason = "data_parallel_backend=ray"
    d.decide("data_parallel_mode", INTERNAL, reason)
    d.decide("data_parallel_ranks", tuple(range(size)), "those that Ray starts")
    d.decide("data_parallel_size_local", each, reason if each else "as many as have room")
    given = args.data_parallel_address
    why = "data_parallel_address was given" if given else "this machine's in the cluster"
    d.decide("data_parallel_address", given, why)
    d.requested("data_parallel_rpc_port")


def decide_expert_parallel(d: Decisions) -> None:
    """Fix whether the experts are shared by the cores, which must then all be on this machine."""
    size = d.value("data_parallel_size")
    if not d.args.enable_expert_parallel:
        each = "each core has all experts" if d.model.num_experts else "the model has no experts"
        d.decide("enable_expert_parallel", False, each)
        return
    if not d.model.num_experts:
        _refuse_spreading("the model has no experts to spread", "Leave it out.")
    if size > d.model.num_experts:
        _refuse_spreading(
            f"the model has {d.model.num_experts} experts for {size} cores",
            "Use a smaller data_parallel_size.",
        )
    if len(d.value("data_parallel_ranks")) < size:
        _refuse_spreading(
            "cores that share experts must be on one machine in this release",
            "Leave it out: then each core holds all experts and steps for itself.",
        )
    reason = f"experts are spread over {size} cores" if size > 1 else "one core has all experts"
    d.decide("enable_expert_parallel", size > 1, reason)


def _refuse_spreading(why: str, hint: str) -> NoReturn:
    raise InvalidParameter("enable_expert_parallel", True, why, hint)


def _mode(d: Decisions, is_headless: bool) -> tuple[str, str]:
    args = d.args
    size, local = args.data_parallel_size, args.data_parallel_size_local
    if args.data_parallel_hybrid_lb and args.data_parallel_external_lb:
        raise InvalidParameter(
            "data_parallel_hybrid_lb", True, "data_parallel_external_lb is True too: choose one"
        )
    if args.data_parallel_external_lb or args.data_parallel_rank is not None:
        _check_external(d)
        return EXTERNAL, "data_parallel_external_lb or data_parallel_rank was given"
    starts = local is not None and args.data_parallel_start_rank is not None
    if args.data_parallel_hybrid_lb or (starts and not is_headless):
        if local is None:
            raise InvalidParameter(
                "data_parallel_hybrid_lb", True, "it needs data_parallel_size_local"
            )
        if local != size:
            return HYBRID, "data_parallel_hybrid_lb, or a start rank with a local size"
    return INTERNAL, "one front end for all"


def _check_external(d: Decisions) -> None:
    args = d.args
    if args.data_parallel_size_local not in (None, 1):
        raise InvalidParameter(
            "data_parallel_size_local", args.data_parallel_size_local,
            "an engine that is balanced from outside has 1 core",
        )  # fmt: skip
    if args.data_parallel_rank is None:
        raise InvalidParameter("data_parallel_rank", None, "data_parallel_external_lb needs it")
    if not d.model.num_experts:
        allowed = "copies of a dense model know nothing of each other"
        hint = "Start independent engines, each with its own address, and balance between them."
        raise InvalidParameter("data_parallel_rank", args.data_parallel_rank, allowed, hint)


def _ranks(d: Decisions, mode: str, is_headless: bool) -> tuple[int, ...]:
    args = d.args
    if mode == EXTERNAL:
        assert args.data_parallel_rank is not None, "checked with the mode"
        return (args.data_parallel_rank,)
    local = args.data_parallel_size_local
    count = args.data_parallel_size if local is None else local
    start = args.data_parallel_start_rank or 0
    if start and mode == INTERNAL and not is_headless:
        allowed = "the front end has the first copies: 0"
        hint = "Give data_parallel_size_local too, or start these copies headless."
        raise InvalidParameter("data_parallel_start_rank", start, allowed, hint)
    if is_headless and not count:
        raise InvalidParameter("data_parallel_size_local", count, "a headless machine has some")
    return tuple(range(start, start + count))
