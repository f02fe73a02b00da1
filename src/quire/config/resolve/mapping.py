"""Decides what weights are read from, and whether they are in memory or in mapped files."""

from __future__ import annotations

from quire.config.kv_pool_size import gib
from quire.config.resolve.decisions import Decisions
from quire.config.resolve.dtype import weight_bytes
from quire.config.resolve.parallel import num_cores_here
from quire.config.resolve.ranks import num_workers_here
from quire.errors import InvalidParameter, LoadError, NotBuiltYet
from quire.models.loading.folder_files import AUTOMATIC_FORMATS
from quire.plugins.tables import LOAD_FORMATS

_DISK_SHARE = 1.1
"""Room on the disk, as a share of the weights' bytes: a tensor is there twice while it is packed.
"""


def decide_load_format(d: Decisions) -> None:
    """Fix load_format. Raises NotBuiltYet for files that models/foreign/load.py does not read."""
    given = d.args.load_format
    if given in AUTOMATIC_FORMATS:
        d.decide("load_format", d.model.weights_format, "the format of the weights in the folder")
    else:
        d.requested("load_format")
    if not d.model.is_foreign:
        return
    hint = "Use 'auto': its weights are in memory."
    if given != "mmap":
        given, hint = d.value("load_format"), "Use 'auto' with the model's safetensors files."
    if given not in ("safetensors", "dummy"):
        raise NotBuiltYet("load_format", f"{given} with model_impl=transformers", hint)


def refuse_files_of_plugin(d: Decisions, name: str, value: object, advice: str) -> None:
    """Raise NotBuiltYet for an option that keeps K/V by names which say whose weights made it."""
    if d.args.load_format in LOAD_FORMATS:
        hint = f"Weights of the load format {d.args.load_format!r} may come from anywhere, so that "
        raise NotBuiltYet(name, value, f"{hint}no name for their K/V can be made. {advice}")


def decide_weights_folder(d: Decisions, workspace: int) -> None:
    """Fix weights_folder: None, unless load_format is mmap or memory is too short for the weights
    and a `workspace` of so many bytes. Weights of a model of transformers are never mapped.

    Raises InvalidParameter for mmap on a GPU, LoadError where the files cannot be.
    """
    is_wanted = d.args.load_format == "mmap"
    if d.machine.device != "cpu":
        if is_wanted:
            allowed = "mapped weights are for CPUs: a GPU reads its own memory"
            raise InvalidParameter("load_format", "mmap", allowed, "Use 'auto'.")
        d.decide("weights_folder", None, "weights are in the GPU's memory")
        return
    if d.value("model_impl") == "transformers":
        d.decide("weights_folder", None, "those of a model of transformers are not mapped")
        return
    share = d.args.gpu_memory_utilization
    free = int(free_bytes(d) * (1 if share is None else share))
    weights = weight_bytes(d)
    fits = free > weights + workspace
    if fits and not is_wanted:
        d.decide("weights_folder", None, "the weights fit in memory")
    elif obstacle := _obstacle(d, weights):
        if is_wanted:
            raise LoadError(f"load_format='mmap' is not possible: {obstacle}.")
        d.decide("weights_folder", None, f"they cannot be mapped, because {obstacle}")
    else:
        why = "load_format=mmap" if is_wanted else f"{gib(free)} of memory are too few"
        d.decide("weights_folder", d.machine.weights_folder, f"weights of {gib(weights)}: {why}")
        d.note(
            f"The weights ({gib(weights)}) are kept in mapped files ({why}): what does not stay in "
            "memory is read from the disk in every step."
        )


def decide_packed_weights(d: Decisions) -> None:
    """Fix weight_bytes, and packed_weights_bytes, the most that files of packed weights take."""
    d.decide("weight_bytes", weight_bytes(d), "what the config says of sizes and formats")
    given = d.args.packed_weights_gib
    if d.machine.device != "cpu":
        d.decide("packed_weights_bytes", 0, "weights are packed by the GPU itself")
    elif d.value("distributed_executor_backend") != "uni":
        d.decide("packed_weights_bytes", 0, "several workers pack their parts at each start")
    elif d.value("weights_folder") is not None:
        d.decide("packed_weights_bytes", 0, "weights are in mapped files of their own")
    else:
        why = f"packed_weights_gib={given:g}: a start maps what an earlier one has packed"
        d.decide("packed_weights_bytes", int(given * 2**30), why if given else "they are not kept")


def free_bytes(d: Decisions) -> int:
    """The memory that is free now, for each core here, or each worker where these share layers."""
    # all of them start now, and each would take what is free
    shares: int = num_cores_here(d) * min(d.value("tensor_parallel_size"), num_workers_here(d))
    return d.machine.free_memory_bytes // shares


def _obstacle(d: Decisions, weights: int) -> str:
    """The reason why the weights cannot be mapped; "" if they can."""
    machine, needed = d.machine, int(weights * _DISK_SHARE) * num_cores_here(d)
    if machine.memory_limit_source == "ulimit -v":
        return "ulimit -v counts mapped files like memory"
    if not machine.free_disk_bytes:
        return f"{machine.weights_folder or 'the cache folder'} is not on a disk"
    if machine.free_disk_bytes < needed:
        return (
            f"the disk of {machine.weights_folder} has {gib(machine.free_disk_bytes)} free, and "
            f"they take {gib(needed)} there (QUIRE_CACHE_DIR names another folder)"
        )
    return ""
