"""NVIDIA GPUs as a `Driver`: pinned memory, copies and events of torch's current stream.

One stream: a step's copies, kernels and results are queued in order, and the host is never in it.
Weights that are offloaded come through a second one, which waits for the first and is waited for.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import EngineDeadError
from quire.models.decoder import HiddenStates
from quire.runner.devices.arena import Event
from quire.runner.devices.copy_queue import Arrival, CopyQueue
from quire.runner.forward.decode_graphs import Captured

logger = logging.getLogger(__name__)


class CudaDriver:
    """One GPU. A failed kernel leaves it unusable for the process, hence EngineDeadError."""

    def __init__(self, index: int = 0) -> None:
        self.torch = torch.device("cuda", index)
        torch.cuda.set_device(index)

    def pinned(self, num_bytes: int) -> Tensor:
        """Allocate from torch's cache of pinned memory, which reuses it after the copies."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        """Register the memory; where the driver refuses it, copies are slower."""
        runtime = torch.cuda.cudart()
        failure = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        if failure != runtime.cudaError.success:
            logger.warning("Host memory of %d bytes is not pinned: %s", memory.nbytes, failure)

    def copy(self, target: Tensor, source: Tensor) -> None:
        with device_failures():
            target.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        event = torch.cuda.Event(blocking=True)  # waiting sleeps, and leaves the core to others
        with device_failures():
            event.record()
        return _CudaEvent(event)

    def copy_queue(self) -> CopyQueue:
        return CudaCopyQueue(self.torch)

    def return_free_memory(self) -> None:
        gc.collect()
        with device_failures():
            torch.cuda.synchronize(self.torch)
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        """Free device memory in bytes; memory cached by torch counts as used."""
        with device_failures():
            torch.cuda.synchronize(self.torch)
            return int(torch.cuda.mem_get_info(self.torch)[0])


class CudaCopyQueue:
    """A stream for copies. Events order it with the current stream, which is that of the capture
    while a graph is captured: the copies are then nodes of the graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def start(self, copies: Sequence[tuple[Tensor, Tensor]]) -> Arrival:
        with device_failures():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for target, source in copies:
                    target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return _CudaArrival(event)


class CudaGraphs:
    """Captures in one memory pool, so that the graphs use the same memory one after the other."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], HiddenStates]) -> Captured:
        work()  # kernels are compiled and libraries take their memory outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        return _CudaGraph(graph, result)


@dataclass(frozen=True, slots=True)
class _CudaGraph:
    graph: torch.cuda.CUDAGraph
    result: HiddenStates

    def replay(self) -> None:
        with device_failures():
            self.graph.replay()


class _CudaArrival:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def join(self) -> None:
        with device_failures():
            torch.cuda.current_stream().wait_event(self._event)


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        with device_failures():
            self._event.synchronize()


@contextlib.contextmanager
def device_failures() -> Iterator[None]:
    """Turn CUDA errors, which come from work queued before, into EngineDeadError."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise EngineDeadError(f"The GPU failed: {str(error).splitlines()[0]}") from error
