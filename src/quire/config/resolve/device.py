"""Chooses the device that an engine runs on, and the machine's resources that it then has."""

from __future__ import annotations

import msgspec

from quire.config.args.engine_options import EngineOptions
from quire.config.kv_pool_size import gib
from quire.errors import InvalidParameter, NotBuiltYet
from quire.hardware.facts import GpuFacts, MachineFacts

_LEAST_CAPABILITY = (8, 0)
"""Ampere: older GPUs do not multiply bfloat16, which the kernels are written for."""


def choose_device(args: EngineOptions, machine: MachineFacts) -> tuple[MachineFacts, str]:
    """Choose a GPU if one can be used, unless the arguments say otherwise. Returns the machine with
    the device's memory, which is what is planned, and the reason.

    Raises InvalidParameter for "cuda" without a GPU, NotBuiltYet for data parallelism over GPUs.
    """
    trouble = _trouble(machine)
    if args.device == "cpu":
        return machine, f"{machine.cpu_name}; device was given"
    # asked for by name it must not fall back: a CPU would be slow without a word
    if args.device == "cuda" and trouble:
        raise InvalidParameter(
            "device", "cuda", trouble, "Leave it out, or pass device='cpu', to run on the CPU."
        )
    if trouble or machine.gpu is None:
        return machine, f"{machine.cpu_name}; no GPU: {trouble}"
    if args.is_copied:
        hint = "Start one engine for each GPU, with CUDA_VISIBLE_DEVICES set to it."
        raise NotBuiltYet("data_parallel_size", "several on GPUs", hint)
    given = "device was given" if args.device == "cuda" else "a GPU that can be used"
    return _on(machine.gpu, machine), f"{_described(machine.gpu)}; {given}"


def _trouble(machine: MachineFacts) -> str:
    """The reason why no GPU can be used; empty if one can."""
    gpu = machine.gpu
    if machine.torch_other:
        return (
            f"the installed torch is built for {machine.torch_other}, on which these kernels have "
            "not run yet; NVIDIA GPUs are supported"
        )
    if gpu is None:
        return machine.gpu_missing
    if gpu.capability < _LEAST_CAPABILITY:
        has = ".".join(map(str, gpu.capability))
        return f"{gpu.name} has compute capability {has}, and 8.0 is the least that is supported"
    if machine.torch_cuda is None:
        return "the installed torch is built without CUDA"
    return ""


def _on(gpu: GpuFacts, machine: MachineFacts) -> MachineFacts:
    return msgspec.structs.replace(
        machine,
        device="cuda",
        # the host's, before the same field becomes the device's
        host_free_bytes=machine.free_memory_bytes,
        total_memory_bytes=gpu.total_memory_bytes,
        free_memory_bytes=gpu.free_memory_bytes,
        memory_limit_source=gpu.name,
    )


def _described(gpu: GpuFacts) -> str:
    return f"{gpu.name} with {gib(gpu.total_memory_bytes)}, {gpu.num_multiprocessors} SMs"
