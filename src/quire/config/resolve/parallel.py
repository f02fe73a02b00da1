"""Decides which copies of an engine run here, and how load is balanced over them (rule 12.7)."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from quire.config.resolve.decisions import Decisions
from quire.config.resolve.ranks import num_workers
from quire.errors import InvalidParameter, NotBuiltYet

INTERNAL, HYBRID, EXTERNAL = "internal", "hybrid", "external"


def decide_data_parallel(d: Decisions, is_headless: bool) -> None:
    """Fix the fields data_parallel_*. Raises InvalidParameter where arguments contradict."""
    args, size = d.args, d.requested("data_parallel_size")
    if args.node_rank >= args.nnodes:
        allowed = f"the machines of nnodes={args.nnodes} begin with 0"
        raise InvalidParameter("node_rank", args.node_rank, allowed)
    if d.requested("data_parallel_backend") == "ray":
        _decide_ray(d, size, is_headless)
        return
    share = _share(d, is_headless)
    if share.local is not None and share.local > size:
        allowed = f"a machine has 0 to {size} of {size} copies"
        raise InvalidParameter("data_parallel_size_local", share.local, allowed)
    if share.rank is not None and share.rank >= size:
        allowed = f"the copies of data_parallel_size={size} begin with 0"
        raise InvalidParameter("data_parallel_rank", share.rank, allowed)
    mode, reason = _mode(d, share, is_headless)
    d.decide("data_parallel_mode", mode, reason)
    ranks = _ranks(d, mode, share, is_headless)
    # of a front end without cores `ranks` is empty, and () is less than any
    if ranks[-1:] >= (size,):
        raise InvalidParameter(
            "data_parallel_start_rank", ranks[0],
            f"with {len(ranks)} of them here the ranks reach beyond data_parallel_size={size}",
        )  # fmt: skip
    where = "of this headless machine" if is_headless else "of this machine"
    d.decide("data_parallel_ranks", ranks, f"those {where}")
    # only then does anything connect to the address
    others = mode == INTERNAL and (is_headless or len(ranks) < size)
    if others or args.data_parallel_address is not None:
        d.decide("data_parallel_address", share.address, share.address_reason)
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
        ("data_parallel_multi_port_external_lb", args.data_parallel_multi_port_external_lb),
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
    """Fix whether the experts are shared by the cores, which must then have one front end."""
    size, tp = d.value("data_parallel_size"), d.args.tensor_parallel_size
    d.decide("experts_at", None, "cores that share experts are told when they start")
    if not d.args.enable_expert_parallel:
        each = "each core has all experts" if d.model.num_experts else "the model has no experts"
        d.decide("enable_expert_parallel", False, each)
        return
    if not d.model.num_experts:
        _refuse_spreading("the model has no experts to spread", "Leave it out.")
    if size > 1 and size * tp > d.model.num_experts:
        each = f"{size} cores" if tp == 1 else f"{size} cores of {tp} workers for each layer"
        sizes = "data_parallel_size" if tp == 1 else "data_parallel_size or tensor_parallel_size"
        _refuse_spreading(
            f"the model has {d.model.num_experts} experts for {each}", f"Use a smaller {sizes}."
        )
    if d.value("data_parallel_mode") != INTERNAL and size > 1:
        _refuse_spreading(
            "cores that share experts have one front end",
            "Leave it out, or balance between the cores inside: one front end, and --headless.",
        )
    if not d.value("data_parallel_ranks"):
        _refuse_spreading(
            "cores that share experts meet at the first of them, on the front end's machine",
            "Give data_parallel_size_local 1 or more.",
        )
    reason = f"experts are spread over {size} cores" if size > 1 else "one core has all experts"
    if size > 1 and tp > 1:
        reason += f", and over {tp} workers in each"
    if size == 1 and tp > 1:
        reason = "the ranks of one core have a part of each expert"
    d.decide("enable_expert_parallel", size > 1, reason)


def _refuse_spreading(why: str, hint: str) -> NoReturn:
    raise InvalidParameter("enable_expert_parallel", True, why, hint)


class _Share(NamedTuple):
    """The part of the copies that this machine has, as far as it was said: how many, the first of
    them, the one that is balanced from outside, and the front end's address.
    """

    local: int | None
    start: int | None
    rank: int | None
    address: str
    address_reason: str


def _share(d: Decisions, is_headless: bool) -> _Share:
    """This machine's part: by the options, or by its number where `nnodes` share equally."""
    args = d.args
    local, start, rank = (
        args.data_parallel_size_local,
        args.data_parallel_start_rank,
        args.data_parallel_rank,
    )
    address, reason = args.data_parallel_address, "data_parallel_address was given"
    size, nodes, node = args.data_parallel_size, args.nnodes, args.node_rank
    if nodes == 1 or size == 1:
        return _Share(
            local, start, rank, address or "127.0.0.1", reason if address else "the default"
        )
    if size % nodes:
        hint = "Give a multiple of nnodes as data_parallel_size."
        raise NotBuiltYet("nnodes", f"{nodes} for {size} copies of the engine", hint)
    each = size // nodes
    for name, given, own in (
        ("data_parallel_size_local", local, each),
        ("data_parallel_start_rank", start, node * each),
    ):
        if given not in (None, own):
            allowed = f"machine {node} of {nodes} with equal parts of {size} copies has {own}"
            raise InvalidParameter(name, given, allowed, "Leave it out.")
    has_front_end = (
        args.data_parallel_hybrid_lb
        or args.data_parallel_external_lb
        or args.data_parallel_multi_port_external_lb
        or rank is not None
    )
    if not has_front_end and is_headless != (node > 0):
        allowed = "the first machine has the front end, the others serve it"
        hint = "Give --headless on machines after the first, and there alone."
        raise InvalidParameter("node_rank", node, allowed, hint)
    if args.data_parallel_external_lb and each == 1:
        local, start, rank = None, None, node if rank is None else rank
    else:
        local, start = each, node * each
    found = address or args.master_addr
    return _Share(local, start, rank, found, reason if address else "master_addr, with nnodes")


def _mode(d: Decisions, share: _Share, is_headless: bool) -> tuple[str, str]:
    args = d.args
    size, local = args.data_parallel_size, share.local
    if args.data_parallel_hybrid_lb and args.data_parallel_external_lb:
        raise InvalidParameter(
            "data_parallel_hybrid_lb", True, "data_parallel_external_lb is True too: choose one"
        )
    if args.data_parallel_multi_port_external_lb:
        _check_multi_port(d, share, is_headless)
        return EXTERNAL, "data_parallel_multi_port_external_lb: each copy has a server of its own"
    if args.data_parallel_external_lb or share.rank is not None:
        _check_external(d, share)
        return EXTERNAL, "data_parallel_external_lb or data_parallel_rank was given"
    # with nnodes, a start rank only repeats what follows from node_rank
    starts = local is not None and args.data_parallel_start_rank is not None and args.nnodes == 1
    if args.data_parallel_hybrid_lb or (starts and not is_headless):
        if local is None:
            raise InvalidParameter(
                "data_parallel_hybrid_lb", True, "it needs data_parallel_size_local"
            )
        # a machine that has all copies shares no load with others
        if local != size:
            return HYBRID, "data_parallel_hybrid_lb, or a start rank with a local size"
    return INTERNAL, "one front end for all"


def _check_external(d: Decisions, share: _Share) -> None:
    if share.local not in (None, 1):
        raise InvalidParameter(
            "data_parallel_size_local", share.local,
            "an engine that is balanced from outside has 1 core",
        )  # fmt: skip
    if share.rank is None:
        raise InvalidParameter("data_parallel_rank", None, "data_parallel_external_lb needs it")
    if not d.model.num_experts:
        allowed = "copies of a dense model know nothing of each other"
        hint = "Start independent engines, each with its own address, and balance between them."
        raise InvalidParameter("data_parallel_rank", share.rank, allowed, hint)


def _check_multi_port(d: Decisions, share: _Share, is_headless: bool) -> None:
    args = d.args
    name, size = "data_parallel_multi_port_external_lb", args.data_parallel_size
    for other, is_given in (
        ("headless", is_headless),
        ("data_parallel_rank", args.data_parallel_rank is not None),
        ("data_parallel_external_lb", args.data_parallel_external_lb),
        ("data_parallel_hybrid_lb", args.data_parallel_hybrid_lb),
    ):
        if is_given:
            raise InvalidParameter(name, True, f"{other} was given too: choose one")
    here = size if share.local is None else share.local
    if here < 2 or size % here:
        allowed = f"{here} servers here do not form one of the equal parts of {size} copies"
        hint = "Give a data_parallel_size of 2 or more, and a data_parallel_size_local of 2 or "
        hint += "more that divides it."
        raise InvalidParameter(name, True, allowed, hint)
    start = share.start or 0
    if start % here:
        allowed = f"with {here} servers on each machine it is a multiple of {here}"
        raise InvalidParameter("data_parallel_start_rank", start, allowed)


def _ranks(d: Decisions, mode: str, share: _Share, is_headless: bool) -> tuple[int, ...]:
    args = d.args
    if mode == EXTERNAL and not args.data_parallel_multi_port_external_lb:
        assert share.rank is not None, "checked with the mode"
        return (share.rank,)
    local = share.local
    count = args.data_parallel_size if local is None else local
    start = share.start or 0
    if start and mode == INTERNAL and not is_headless:
        allowed = "the front end has the first copies: 0"
        hint = "Give data_parallel_size_local too, or start these copies headless."
        raise InvalidParameter("data_parallel_start_rank", start, allowed, hint)
    if is_headless and not count:
        raise InvalidParameter("data_parallel_size_local", count, "a headless machine has some")
    return tuple(range(start, start + count))
