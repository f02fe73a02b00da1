"""The time of a weight update beside that of a copy: python update_speed.py [SHAPE [BACKEND ...]].

An engine of SHAPE (0.6b) in a process of its own gets all its weights five times, in bfloat16 and
rounded to int8, by shared memory and by a process group; this process is the trainer. Of shared
memory "in place" is that of a trainer whose own tensors lie there; "nccl, gloo" is the group as if
the trainer were on another host. A line is the best of five: seconds of start, update and finish,
of copying the same bytes once within this process (by torch, in two threads), their ratio, the
seconds from the end of the update to the next token, by how much the private memory of the engine's
core was higher during updates than before, the bytes of two layers, and the processors' seconds of
an update, of the trainer and of the core. "pack_s" are the seconds in which two threads pack the
same matrices, as at a start, from memory into memory that is there. Lines of a group also have the
seconds in which it brings the same tensors to another process that does nothing with them. The last
line is JSON.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from quire import LLM, SamplingParams
from quire.distributed import host_broadcasts
from quire.distributed.named_tensors import TensorMeta, bytes_of
from quire.distributed.shared_buffer import SharedBuffer, aligned
from quire.distributed.trainer_group import PyNcclCommunicator, StatelessProcessGroup
from quire.kernels.cpu.linear_ops import LinearOps
from quire.kernels.cpu.runtime import CpuRuntime
from quire.kernels.cpu.weight_writer import CpuWeightWriter
from quire.quantization import RECIPES
from quire.testing import make_checkpoint
from quire.trainers.clients import LocalWeightSyncClient
from quire.trainers.senders import (
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    WeightTransferTrainerFactory,
)

TIMES = 5
BUFFER_BYTES = 16 << 20
BACKENDS = ("ipc, in place", "ipc", "nccl", "nccl, gloo")


class FileSource:
    """The tensors of a checkpoint, in the order of a module's layers."""

    def __init__(self, folder: Path) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                names = opened.keys()
                self._tensors |= {name: opened.get_tensor(name) for name in names}

    def metadata(self) -> list[TensorMeta]:
        """The descriptions."""
        return [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self]

    def __iter__(self) -> Any:
        def place(name: str) -> tuple[int, str]:
            parts = name.split(".")
            return (
                int(parts[2]) if parts[1] == "layers" else (-1 if "embed" in name else 10**6)
            ), name

        return ((name, self._tensors[name]) for name in sorted(self._tensors, key=place))

    def share(self) -> SharedBuffer:
        """Move them into memory that engines read."""
        buffer = SharedBuffer(sum(aligned(t.nbytes) for t in self._tensors.values()), lasts=True)
        at = 0
        for name, tensor in self._tensors.items():
            self._tensors[name] = buffer.view(at, tensor).copy_(tensor)
            at += aligned(tensor.nbytes)
        return buffer

    @property
    def nbytes(self) -> int:
        """All of them."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


class PeakMemory:
    """The largest private memory of a process, in bytes, which is looked at often."""

    def __init__(self, pid: int) -> None:
        self._path = Path(f"/proc/{pid}/status")
        self.start = self.peak = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        lines = self._path.read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

    def _watch(self) -> None:
        while not self._is_over.wait(0.005):
            self.peak = max(self.peak, self._now())

    def close(self) -> int:
        """By how much it was higher than at the start."""
        self._is_over.set()
        self._thread.join()
        return self.peak - self.start


def processor_s(pid: int) -> float:
    """Seconds that processors have worked for a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def copy_s(source: FileSource) -> float:
    """Seconds of copying the bytes once, into memory that is there."""
    pairs = [(tensor, torch.empty_like(tensor).zero_()) for _, tensor in source]
    best = float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        for tensor, target in pairs:
            target.copy_(tensor)
        best = min(best, time.perf_counter() - began)
    return best


def pack_s(source: FileSource, quantization: str | None) -> float:
    """Seconds of packing all matrices once, with a look for NaN, into memory that is there."""
    runtime = CpuRuntime(num_threads=2)
    stored_as = RECIPES[quantization].format_of("projection", None) if quantization else None
    matrices = [tensor for _, tensor in source if tensor.dim() == 2]
    ops = LinearOps(runtime, matrices[0].dtype)
    rows = [(CpuWeightWriter(runtime).open_rows(ops.pack_linear(t, None, stored_as)), t)
            for t in matrices]  # fmt: skip
    best = float("inf")
    for _ in range(TIMES):
        began = time.perf_counter()
        for writer, tensor in rows:
            writer.write(0, tensor, is_slice=False)
        best = min(best, time.perf_counter() - began)
    return best


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


RECEIVER = """
import sys
import torch
from quire.distributed import host_broadcasts
from quire.distributed.trainer_group import PyNcclCommunicator, StatelessProcessGroup
if len(sys.argv) > 5:
    host_broadcasts.host_id = lambda: b"another"
torch.set_num_threads(1)
group = StatelessProcessGroup.create("127.0.0.1", int(sys.argv[1]), 1, 2)
communicator = PyNcclCommunicator(group, "cpu")
room = torch.ones(int(sys.argv[2]), dtype=torch.uint8)
sizes = [int(size) for size in sys.argv[3].split(",")]
for _ in range(int(sys.argv[4])):
    group.barrier()
    for work in [communicator.start_broadcast(room[:size], 0) for size in sizes]:
        work.wait()
    group.barrier()
"""


def group_s(source: FileSource, is_far: bool) -> float:
    """Seconds in which a group brings the tensors to another process, into memory that is there."""
    port, sizes = free_port(), [tensor.nbytes for _, tensor in source]
    given = [str(port), str(max(sizes)), ",".join(map(str, sizes)), str(TIMES), *["far"] * is_far]
    other = subprocess.Popen([sys.executable, "-c", RECEIVER, *given])
    group = StatelessProcessGroup.create("127.0.0.1", port, 0, 2)
    communicator = PyNcclCommunicator(group, "cpu")
    best = float("inf")
    for _ in range(TIMES):
        group.barrier()
        began = time.perf_counter()
        for work in [communicator.start_broadcast(bytes_of(t), 0) for _, t in source]:
            work.wait()
        group.barrier()
        best = min(best, time.perf_counter() - began)
    other.wait()
    return best


def measure(folder: Path, backend: str, quantization: str | None) -> dict[str, Any]:
    """One line."""
    source = FileSource(folder)
    llm = LLM(
        str(folder), skip_tokenizer_init=True, max_model_len=256, kv_cache_memory_bytes=1 << 26,
        quantization=quantization, weight_transfer_config={"backend": backend.split(",")[0]},
        packed_weights_gib=0, enable_multiprocessing=True,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
    info: Any = IPCTrainerInitInfo(packed_buffer_size_bytes=BUFFER_BYTES)
    buffer = None
    if backend.endswith("in place"):
        info, buffer = IPCTrainerInitInfo(packed=False), source.share()
    is_group, is_far = backend.startswith("nccl"), backend.endswith("gloo")
    if is_far:
        host_broadcasts.host_id = lambda: b"here"
    if is_group:
        info = NCCLTrainerInitInfo("127.0.0.1", free_port(), 2)
    sender = WeightTransferTrainerFactory.trainer_init(
        info, client=LocalWeightSyncClient(llm), source=source
    )
    sender.send_weights("first")  # pages of the buffers, and of weights that were shared
    [pid] = {status.pid for status in [llm.llm_engine.front_end.client.core_status(0)]}
    memory = PeakMemory(pid)
    update_s = first_token_s = float("inf")
    busy = [0.0, 0.0]
    for turn in range(TIMES):
        busy_before = [processor_s(each) for each in (os.getpid(), pid)]
        began = time.perf_counter()
        sender.send_weights(f"turn {turn}")
        ended = time.perf_counter()
        for i, before in enumerate(busy_before):
            busy[i] += (processor_s((os.getpid(), pid)[i]) - before) / TIMES
        llm.generate({"prompt_token_ids": [turn + 5, 2, 3]}, params, use_tqdm=False)
        update_s = min(update_s, ended - began)
        first_token_s = min(first_token_s, time.perf_counter() - ended)
    extra = memory.close()
    sender.shutdown()
    if buffer is not None:
        buffer.close()
    layer = sum(t.nbytes for n, t in source if ".layers.0." in n)
    copied_s = copy_s(source)
    line = {
        "backend": backend, "quantization": quantization or "bfloat16",
        "MB": source.nbytes // 10**6, "update_s": round(update_s, 3), "copy_s": round(copied_s, 3),
        "copy/update": round(copied_s / update_s, 2), "first_token_s": round(first_token_s, 3),
        "pack_s": round(pack_s(source, quantization), 3),
        "extra_MB": round(extra / 1e6), "two_layers_MB": round(2 * layer / 1e6),
        "trainer_cpu_s": round(busy[0], 2), "core_cpu_s": round(busy[1], 2),
    }  # fmt: skip
    if is_group:
        alone_s = group_s(source, is_far)
        line |= {"group_s": round(alone_s, 3), "group/update": round(alone_s / update_s, 2)}
    return line


def main() -> int:
    """Print the lines."""
    os.environ.setdefault("QUIRE_CACHE_DIR", tempfile.mkdtemp())
    shape = sys.argv[1] if len(sys.argv) > 1 else "0.6b"
    lines = []
    with tempfile.TemporaryDirectory() as base:
        folder = make_checkpoint(Path(base) / "model", shape)
        for backend in BACKENDS if len(sys.argv) < 3 else sys.argv[2:]:
            for quantization in (None, "int8"):
                lines.append(measure(folder, backend, quantization))
                print(lines[-1], flush=True)
    print(json.dumps(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
