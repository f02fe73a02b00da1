"""Asking the driver's libraries for the GPU, with libraries that answer what a test says."""

import ctypes

import pytest

from quire.hardware.nvidia import find_gpu, torch_cuda_version, torch_for_other_gpus

UUID = bytes(range(16))
SHOWN = b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


def target(pointer):
    return pointer._obj


class Cuda:
    """libcuda with one H200, or as `changes` say."""

    def __init__(self, **changes):
        self.status = {"cuInit": 0, "count": 1} | changes

    def cuInit(self, flags):  # noqa: N802
        return self.status["cuInit"]

    def cuDeviceGetCount(self, count):  # noqa: N802
        target(count).value = self.status["count"]
        return 0

    def cuDeviceGet(self, device, index):  # noqa: N802
        target(device).value = 5
        return 0

    def cuDeviceGetName(self, name, size, device):  # noqa: N802
        assert device.value == 5 and size == len(name)
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceTotalMem_v2(self, total, device):  # noqa: N802
        target(total).value = 150 << 30
        return 0

    def cuDeviceGetUuid(self, uuid, device):  # noqa: N802
        target(uuid).bytes[:] = UUID
        return 0

    def cuDeviceGetAttribute(self, value, which, device):  # noqa: N802
        target(value).value = {16: 132, 75: 9, 76: 0}[which]
        return self.status.get("attribute", 0)


class Nvml:
    def __init__(self, knows=SHOWN):
        self.is_open = False
        self.knows = knows

    def nvmlInit_v2(self):  # noqa: N802
        self.is_open = True
        return 0

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):  # noqa: N802
        target(handle).value = 77
        return 0 if uuid == self.knows else 6

    def nvmlDeviceGetMemoryInfo(self, handle, memory):  # noqa: N802
        assert handle.value == 77
        found = target(memory)
        assert [name for name, _ in found._fields_] == ["total", "free", "used"]
        found.total, found.free, found.used = 150 << 30, 149 << 30, 1 << 30
        return 0


def loader(cuda, nvml):
    libraries = {"libcuda.so.1": cuda, "libnvidia-ml.so.1": nvml}

    def load(name):
        if libraries[name] is None:
            raise OSError(f"{name}: cannot open shared object file")
        return libraries[name]

    return load


def test_the_first_gpu_in_numbers():
    nvml = Nvml()
    gpu, missing = find_gpu(loader(Cuda(), nvml))
    assert missing == "" and gpu.name == "NVIDIA H200" and gpu.capability == (9, 0)
    assert (gpu.num_multiprocessors, gpu.total_memory_bytes >> 30) == (132, 150)
    assert gpu.free_memory_bytes == 149 << 30 and not nvml.is_open


@pytest.mark.parametrize("nvml", [None, Nvml(knows=b"MIG")])
def test_without_nvml_all_memory_counts_as_free(nvml):
    gpu, missing = find_gpu(loader(Cuda(), nvml))
    assert missing == "" and gpu.free_memory_bytes == gpu.total_memory_bytes == 150 << 30


@pytest.mark.parametrize(
    ("cuda", "nvml", "why"),
    [
        (None, None, "no NVIDIA driver is installed"),
        (Cuda(cuInit=100), Nvml(), "cuInit with error 100"),
        (Cuda(count=0), Nvml(), "CUDA_VISIBLE_DEVICES"),
        (Cuda(attribute=1), Nvml(), "cuDeviceGetAttribute with error 1"),
    ],
)
def test_without_one_there_is_a_reason(cuda, nvml, why):
    gpu, missing = find_gpu(loader(cuda, nvml))
    assert gpu is None and why in missing


def test_the_real_libraries_do_not_raise():
    gpu, missing = find_gpu()
    assert (gpu is None) == bool(missing)


def test_nvml_s_struct_is_three_longs():
    from quire.hardware import nvidia

    assert ctypes.sizeof(nvidia._Memory) == 24


def test_torch_s_build_is_read_from_its_file():
    import torch

    assert torch_cuda_version() == torch.version.cuda
    lines = "__version__ = '2.13'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    assert torch_cuda_version(lines) == "13.0"
    assert torch_cuda_version("cuda: Optional[str] = None\n") is None


def test_a_torch_for_gpus_of_others_is_named():
    assert torch_for_other_gpus() == ""
    lines = "cuda: Optional[str] = None\nhip: Optional[str] = {}\nxpu: Optional[str] = {}\n"
    assert torch_for_other_gpus(lines.format("'6.4.2'", "None")) == "AMD GPUs (ROCm 6.4.2)"
    assert torch_for_other_gpus(lines.format("None", "'20250101'")) == "Intel GPUs (XPU 20250101)"
    assert torch_for_other_gpus(lines.format("None", "None")) == ""
