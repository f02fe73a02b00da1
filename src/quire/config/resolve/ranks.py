"""Decides how a core's model is shared by several workers, and who runs them."""

from __future__ import annotations

from quire.config.resolve.classes import importable_name
from quire.config.resolve.decisions import Decisions
from quire.errors import InvalidParameter, NotBuiltYet

_SIZES = "tensor_parallel_size", "pipeline_parallel_size"


def decide_ranks(d: Decisions, is_headless: bool) -> None:
    """Fix the sizes, the layers of stages, the executor, the machines, and whether answers have the
    bits of one worker. Raises NotBuiltYet for what is not there with several workers.
    """
    tp, pp = (d.requested(name) for name in _SIZES)
    rank = d.model.rank
    if tp * pp == 1:
        d.decide("stage_layers", (d.model.num_layers,), "one stage has all layers")
        d.decide("same_bits_as_one_rank", True, "there is one")
    else:
        assert rank is not None, "facts are gathered for the sizes that are wanted"
        _check(d, *((n, v) for n, v in zip(_SIZES, (tp, pp), strict=True) if v > 1))
        why = "equal shares (or QUIRE_PP_LAYER_PARTITION); the last stage gets none of the rest"
        d.decide("stage_layers", rank.stage_layers, why if pp > 1 else "one stage has all layers")
        _decide_bits(d, tp, same_bits=rank.same_bits)
    launched = d.value("launched")
    d.decide("rank", 0 if launched is None else launched.rank % (tp * pp), "where it was made")
    _decide_executor(d, tp * pp)
    if d.value("enable_expert_parallel"):
        _check_spreading(d, tp * pp)
    _decide_nodes(d, tp * pp, is_headless)


def num_workers_here(d: Decisions) -> int:
    """The workers of a core that share a machine."""
    return num_workers(d) // int(d.value("nnodes"))


def _decide_nodes(d: Decisions, size: int, is_headless: bool) -> None:
    nodes, node = d.args.nnodes, d.args.node_rank
    address = d.requested("master_addr")
    d.requested("master_port")
    if nodes > 1 and d.value("data_parallel_backend") != "mp":
        hint = "Leave it out: Ray knows its machines."
        raise InvalidParameter("nnodes", nodes, "Ray starts all copies from one command", hint)
    # machines have cores then, and no core has workers on several
    if nodes > 1 and d.args.data_parallel_size > 1:
        why = f"each copy is on one machine, {d.args.data_parallel_size // nodes} on each"
        d.decide("nnodes", 1, why)
        d.decide("node_rank", 0, why)
        return
    d.requested("nnodes")
    d.requested("node_rank")
    if nodes == 1:
        return
    if not address:
        raise InvalidParameter("master_addr", address, "an address or a name of the first machine")
    backend = d.value("distributed_executor_backend")
    if size % nodes or backend != "mp":
        raise InvalidParameter(
            "nnodes", nodes, f"{size} workers of '{backend}' do not form equal parts for them",
            "Use 'mp', and a multiple as the product of tensor_parallel_size and "
            "pipeline_parallel_size.",
        )  # fmt: skip
    if is_headless != (node > 0):
        allowed = "the first machine has the front end, the others serve it"
        hint = "Give --headless on machines after the first, and there alone."
        raise InvalidParameter("node_rank", node, allowed, hint)


def num_workers(d: Decisions) -> int:
    """The workers of a core."""
    size: int = d.value("tensor_parallel_size") * d.value("pipeline_parallel_size")
    return size


def _decide_bits(d: Decisions, tp: int, *, same_bits: bool) -> None:
    if tp == 1:
        why = "stages compute what one worker would"
    elif same_bits:
        why = f"the native kernels add up the parts of {tp} workers in the order of one"
    else:
        why = f"heads or widths do not form segments that {tp} workers have whole"
        d.note(
            f"{tp} workers add up this model's products in an order of their own: same bits as "
            "one rank: no."
        )
    d.decide("same_bits_as_one_rank", same_bits, why)


def _decide_executor(d: Decisions, size: int) -> None:
    given = d.args.distributed_executor_backend
    name = "distributed_executor_backend"
    # no built-in name has a dot or a colon
    if isinstance(given, type) or (given is not None and set(given) & {".", ":"}):
        d.decide(name, importable_name(name, given), f"{name} was given")
        return
    if given == "external_launcher":
        _check_launched(d, size)
    if given == "ray":
        _check(d, (name, given))
        d.decide(name, given, f"a Ray actor for each of {size} workers")
        return
    if size == 1:
        why = f"one worker, in its core's process ({name}={given})" if given else ""
        d.decide(name, "uni", why or "one worker, in its core's process")
        return
    if given == "uni":
        raise InvalidParameter(name, given, f"it runs one worker, not {size}", "Use 'mp'.")
    if given == "external_launcher":
        d.decide(name, given, f"each of {size} processes of a launcher has an engine and a worker")
        return
    d.decide(name, "mp", f"a process for each of {size} workers")


def _check_launched(d: Decisions, size: int) -> None:
    """Raise InvalidParameter for processes that do not form groups of `size`, and for what differs
    between engines that must plan the same steps.
    """
    launched, backend = d.value("launched"), d.args.distributed_executor_backend
    if d.args.data_parallel_size > 1:
        allowed = f"the processes of a launcher are copies, where they are more than {size}"
        hint = "Leave it out and start more processes."
        raise InvalidParameter("data_parallel_size", d.args.data_parallel_size, allowed, hint)
    assert launched is not None, "the environment was read for this backend"
    if launched.world_size % size:
        raise InvalidParameter(
            "distributed_executor_backend", backend,
            f"the launcher has started {launched.world_size} processes (WORLD_SIZE), which do not "
            f"form groups of {size}, one for each worker",
            "Start as many as the product of tensor_parallel_size and pipeline_parallel_size, or a "
            "multiple of that.",
        )  # fmt: skip
    if size > 1 and d.args.max_stall_ms:
        allowed = "engines that plan the same steps, each for itself, cannot look at the clock"
        raise InvalidParameter("max_stall_ms", d.args.max_stall_ms, allowed, "Leave it out.")


def _check_spreading(d: Decisions, size: int) -> None:
    """Raise NotBuiltYet for workers, `size` of a core, that cannot share experts with others."""
    name = "distributed_executor_backend"
    backend = d.value(name)
    if backend == "ray" or (size > 1 and backend != "mp"):
        hint = "Leave it out: the workers of cores that share experts are processes of 'mp'."
        raise NotBuiltYet(name, backend, hint)


def _check(d: Decisions, *sizes: tuple[str, int | str]) -> None:
    """Raise NotBuiltYet for parts of an engine that need one worker, or all layers in one place."""
    name, value = sizes[0]
    if d.machine.device != "cpu":
        hint = "The model of an engine runs on one GPU; data_parallel_size starts copies of it."
        raise NotBuiltYet(name, value, hint)
    if d.value("model_impl") == "transformers":
        raise NotBuiltYet(name, value, "Use a model that Quire runs itself.")
