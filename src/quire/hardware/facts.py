"""Facts of a machine: numbers from host.py and nvidia.py, or written by hand in tests."""

from __future__ import annotations

import math

import msgspec


class GpuFacts(msgspec.Struct, frozen=True):
    """An NVIDIA GPU; `free_memory_bytes` as it is now."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    total_memory_bytes: int
    free_memory_bytes: int

    @property
    def has_fp8(self) -> bool:
        """Whether it widens and multiplies 8-bit floats (e4m3): Ada, Hopper and later."""
        return self.capability >= (8, 9)


class LogicalCpu(msgspec.Struct, frozen=True, kw_only=True):
    """A CPU as the system counts them: one hardware thread of a core.

    `core`: the first logical CPU of the same core. `cache`: the first that shares the last level of
    caches. `node`: the NUMA node, of several on one socket the first. `is_efficient`: the core is
    slower than others of the machine.
    """

    index: int
    core: int
    cache: int
    node: int = 0
    is_efficient: bool = False


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as this process may use it.

    `num_cores`: physical cores that the process may run on (affinity and container quota counted).
    `cpus`: the logical CPUs that it may run on; empty where the system does not describe them.
    `cpu_quota`: CPUs' worth of time that the container may use. `node_free_bytes`: free memory of
    the NUMA nodes of `cpus`.
    `free_memory_bytes`: what can be taken now without swapping, inside the container's limit.
    `thread_limit`, `threads_bind`: set by the environment. `features`: names of CPU features that
    change a decision, such as avx512_bf16. `gpu_missing`: why there is no `gpu`. `torch_cuda`: the
    CUDA release that torch is built for; `torch_other`: GPUs of other makers that it is built for.
    `device`: where an engine runs, whose memory is then the one meant here
    (config/resolve/device.py), and `host_free_bytes` that of the host. `weights_folder`: where
    weights could be kept in files, and `free_disk_bytes` the room for them, 0 where files are in
    memory.
    """

    cpu_name: str
    num_cpus: int
    num_cores: int
    features: tuple[str, ...]
    total_memory_bytes: int
    free_memory_bytes: int
    memory_limit_source: str = "the machine"
    cpus: tuple[LogicalCpu, ...] = ()
    cpu_quota: float = math.inf
    node_free_bytes: dict[int, int] = {}
    thread_limit: int | None = None
    threads_bind: str = "auto"
    device: str = "cpu"
    host_free_bytes: int = 0
    gpu: GpuFacts | None = None
    gpu_missing: str = "none was looked for"
    torch_cuda: str | None = None
    torch_other: str = ""
    weights_folder: str = ""
    free_disk_bytes: int = 0

    @property
    def has_fast_bfloat16(self) -> bool:
        """Whether the device multiplies bfloat16 in hardware."""
        if self.device == "cuda":
            return True
        return not {"avx512_bf16", "amx_bf16", "bf16", "sve_bf16"}.isdisjoint(self.features)

    @property
    def has_fast_float16(self) -> bool:
        """Whether the device multiplies float16 in hardware."""
        if self.device == "cuda":
            return True
        return not {"avx512_fp16", "amx_fp16", "asimdhp"}.isdisjoint(self.features)
