"""The NVIDIA GPU that this process would use, asked of the driver's own libraries.

Without torch: the front end never imports it, and a process that has made a context on a GPU holds
some hundred MiB there. libcuda says which device is the first one for this process (it knows
CUDA_VISIBLE_DEVICES), and NVML says how much of its memory is free, which libcuda tells only with a
context. Where NVML does not know the device (a part of a GPU, a container without the library) all
of it counts as free: the engine measures again when it has a context.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from quire.hardware.facts import GpuFacts

_MULTIPROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CUdevice_attribute
_NAME_BYTES = 100

Load = Callable[[str], Any]

logger = logging.getLogger(__name__)


class _Missing(Exception):
    """There is no GPU to use; the text says why."""


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint8 * 16),)


class _Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@cache
def _opened(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def open_driver(name: str = "libcuda.so.1") -> ctypes.CDLL:
    """A library of the driver. Raises OSError without it, which is found out once."""
    found = _opened(name)
    if found is None:
        raise OSError(f"{name} does not load")
    return found


def find_gpu(load: Load = open_driver) -> tuple[GpuFacts | None, str]:
    """The first GPU that this process may use; None and the reason without one. Does not raise."""
    try:
        cuda = _library(load, "libcuda.so.1")
        name, capability, multiprocessors, total, uuid = _first_device(cuda)
    except _Missing as missing:
        return None, str(missing)
    try:
        # of NVML, since CUDA tells of free memory within a context alone, which takes some itself
        free = int(_memory_of(_library(load, "libnvidia-ml.so.1"), uuid).free)
    except _Missing as missing:
        logger.info("The GPU's free memory cannot be read yet: %s.", missing)
        free = total
    return GpuFacts(name, capability, multiprocessors, total, free), ""


def gpu_bytes_in_use(load: Load = open_driver) -> int | None:
    """Bytes that processes use of this one's first GPU; None where that cannot be told."""
    try:
        *_, uuid = _first_device(_library(load, "libcuda.so.1"))
        memory = _memory_of(_library(load, "libnvidia-ml.so.1"), uuid)
    except _Missing:
        return None
    return int(memory.used)


def torch_cuda_version(text: str | None = None) -> str | None:
    """The CUDA release that torch was built for, without importing it; None without CUDA."""
    return _torch_built_for("cuda", text)


def torch_for_other_gpus(text: str | None = None) -> str:
    """The kind of GPU, not NVIDIA's, that torch was built for; empty if there is none."""
    for key, kind in (("hip", "AMD GPUs (ROCm {})"), ("xpu", "Intel GPUs (XPU {})")):
        version = _torch_built_for(key, text)
        if version is not None:
            return kind.format(version)
    return ""


def _torch_built_for(key: str, text: str | None) -> str | None:
    """The value of `key` in torch's version.py, whose contents `text` may be."""
    if text is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return None
        file = Path(found.origin).with_name("version.py")
        text = file.read_text(encoding="utf-8") if file.exists() else ""
    version = re.search(rf"^{key}\b.*=\s*'([^']+)'", text, re.MULTILINE)
    return version[1] if version else None


def _library(load: Load, name: str) -> Any:
    try:
        return load(name)
    except OSError:
        raise _Missing(f"{name} is not there: no NVIDIA driver is installed here") from None


def _first_device(cuda: Any) -> tuple[str, tuple[int, int], int, int, str]:
    _check(cuda.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if count.value == 0:
        raise _Missing("the driver shows this process no GPU (see CUDA_VISIBLE_DEVICES)")
    device = ctypes.c_int()
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _check(cuda.cuDeviceGetName(name, _NAME_BYTES, device), "cuDeviceGetName")
    total = ctypes.c_size_t()
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    uuid = _Uuid()
    _check(cuda.cuDeviceGetUuid(ctypes.byref(uuid), device), "cuDeviceGetUuid")
    major, minor, units = (
        _attribute(cuda, which, device) for which in (_MAJOR, _MINOR, _MULTIPROCESSORS)
    )
    return name.value.decode(), (major, minor), units, total.value, _shown(bytes(uuid.bytes))


def _attribute(cuda: Any, which: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device), "cuDeviceGetAttribute")
    return value.value


def _memory_of(nvml: Any, uuid: str) -> _Memory:
    _check(nvml.nvmlInit_v2(), "nvmlInit")
    try:
        handle = ctypes.c_void_p()
        # by its name: NVML counts all GPUs of the machine, CUDA those that this process may use
        found = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle))
        _check(found, "nvmlDeviceGetHandleByUUID")
        memory = _Memory()
        _check(
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo"
        )
        return memory
    finally:
        nvml.nvmlShutdown()


def _shown(uuid: bytes) -> str:
    """As NVML writes it."""
    text = uuid.hex()
    return "GPU-" + "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _check(status: int, what: str) -> None:
    if status != 0:
        raise _Missing(f"the NVIDIA driver answers {what} with error {status}")
