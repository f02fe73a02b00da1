"""Senders of a module's weights to engines: one object for each backend of the engines."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from quire.distributed.named_tensors import (
    BUFFER_BYTES,
    TensorMeta,
    bytes_of,
    chunks_of,
    layer_runs,
)
from quire.distributed.shared_buffer import SharedBuffer, aligned, handle_of
from quire.distributed.trainer_group import (
    BroadcastWork,
    PyNcclCommunicator,
    StatelessProcessGroup,
)
from quire.errors import InvalidParameter
from quire.trainers.clients import WeightSyncClient
from quire.trainers.sources import WeightSource, described

logger = logging.getLogger(__name__)

ROOT = 0
_SHARED_BYTES = 16 << 20
_MOST_ON_THE_WAY = 4
"""Broadcasts that may be under way at once: where one ends, the next one goes on."""
_PATIENCE_S = 5.0
"""Seconds after which one side is asked no more: an engine that refuses a tensor still receives
what was announced with it.
"""


class MeetingPlace(Protocol):
    """The meeting place of a group, as every class of information about one has it."""

    master_address: str
    master_port: int
    world_size: int
    device: str | None


@dataclass
class NCCLTrainerInitInfo:
    """A process group of the trainer's first rank and all workers. `world_size` counts both. With
    `packed`, tensors are put together into buffers, on a GPU; gloo sends each from where it lies.
    """

    master_address: str
    master_port: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = 2
    rank: int = ROOT
    device: str | None = None


@dataclass
class IPCTrainerInitInfo:
    """Memory of the host. With `packed`, tensors are copied into one buffer, which is sent when it
    has `packed_buffer_size_bytes`, few enough for a processor's cache. Otherwise all are sent at
    once, and those that `share_parameters` has moved are read where they are.
    """

    packed: bool = True
    packed_buffer_size_bytes: int = _SHARED_BYTES
    rank: int = ROOT


class WeightSender:
    """Sends the weights of a source in updates. Ranks of a trainer other than the first take part
    in gathering tensors, and send nothing.
    """

    sends_source = True
    """Whether it sends all of a source."""

    def __init__(self, init_info: Any, client: WeightSyncClient, source: WeightSource) -> None:
        self._info = init_info
        self._client = client
        self._source = source
        self._is_root = init_info.rank == ROOT

    def send_weights(self, version: str | None = None) -> None:
        """Send all weights as one update, under the name `version`. Raises what the engine says, or
        WeightUpdateError when it is gone.
        """
        if not self._is_root:
            # tensors that are distributed are gathered by all ranks together
            for _ in self._source:
                pass
            return
        self._check()
        self._client.start_weight_update()
        self._send()
        self._client.finish_weight_update(version)

    def shutdown(self) -> None:
        """Leave the engines."""

    def _check(self) -> None:
        """Raise WeightUpdateError where nothing can be sent any more."""

    def _send(self) -> None:
        raise NotImplementedError


class GroupSender(WeightSender):
    """The backend "nccl"."""

    def __init__(
        self, init_info: NCCLTrainerInitInfo, client: WeightSyncClient, source: WeightSource
    ) -> None:
        super().__init__(init_info, client, source)
        self._is_packed = init_info.packed and _device_of(init_info).type == "cuda"
        if not self._is_root:
            return
        body = {
            "packed": self._is_packed,
            "packed_buffer_size_bytes": init_info.packed_buffer_size_bytes,
            "packed_num_buffers": init_info.packed_num_buffers,
        }
        self._communicator = meet_engines(init_info, client, body)

    def _check(self) -> None:
        self._communicator.check()

    def _send(self) -> None:
        tensors, most = iter(self._source), self._info.packed_buffer_size_bytes
        # whole layers, which the engine loads from where they were received, keeping no part for
        # later
        for group in layer_runs(self._source.metadata(), most):
            while_engine(
                partial(self._client.update_weights, described(group)),
                partial(
                    broadcast_all,
                    *(self._communicator, islice(tensors, len(group)), group),
                    most if self._is_packed else None,
                ),
                self._communicator.give_up,
                _PATIENCE_S,
            )

    def shutdown(self) -> None:
        if self._is_root:
            self._communicator.destroy()


class MemorySender(WeightSender):
    """The backend "ipc"."""

    def __init__(
        self, init_info: IPCTrainerInitInfo, client: WeightSyncClient, source: WeightSource
    ) -> None:
        super().__init__(init_info, client, source)
        self._buffer: SharedBuffer | None = None
        if self._is_root:
            client.init_weight_transfer_engine({"packed": init_info.packed})

    def _send(self) -> None:
        if not self._info.packed:
            self._client.update_weights(self._in_place())
            return
        tensors = iter(self._source)
        for chunk in layer_runs(self._source.metadata(), self._info.packed_buffer_size_bytes):
            buffer = self._room(sum(meta.nbytes for meta in chunk))
            at, sizes = 0, []
            for meta in chunk:
                name, tensor = next(tensors)
                assert name == meta.name, "a source has one order"
                buffer.write(at, tensor)
                at += meta.nbytes
                sizes.append(meta.nbytes)
            handles = buffer.handle(0, at)
            body = described(chunk) | {"ipc_handles": handles, "tensor_sizes": sizes}
            self._client.update_weights(body)

    def _in_place(self) -> dict[str, Any]:
        """The information about tensors that are shared already, and about copies of others."""
        metas, handles = [], []
        others: list[tuple[int, int, Tensor]] = []
        at = 0
        for place, (name, tensor) in enumerate(self._source):
            metas.append(TensorMeta(name, tensor.dtype, tuple(tensor.shape)))
            handles.append(handle_of(tensor))
            if handles[-1] is None:
                others.append((place, at, tensor))
                at += aligned(tensor.nbytes)
        if others:
            buffer = self._room(at)
            for place, start, tensor in others:
                handles[place] = buffer.write(start, tensor)
        return described(metas) | {"ipc_handles": handles}

    def _room(self, nbytes: int) -> SharedBuffer:
        """The buffer, a larger one where it is too small: fresh memory is slow."""
        if self._buffer is None or self._buffer.nbytes < nbytes:
            self._close()
            self._buffer = SharedBuffer(nbytes, lasts=True)
        return self._buffer

    def shutdown(self) -> None:
        if self._is_root:
            self._close()
            leave = getattr(self._client, "shutdown_weight_transfer_engine", lambda: None)
            try:
                leave()
            except Exception as error:  # it may be gone, which each client tells in its own way
                logger.info("The engine was not told that its trainer has left: %s", error)

    def _close(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()


class WeightTransferTrainerFactory:
    """Makes senders by the class of their information."""

    _senders: ClassVar[dict[type, type[WeightSender]]] = {
        NCCLTrainerInitInfo: GroupSender,
        IPCTrainerInitInfo: MemorySender,
    }

    @classmethod
    def register(cls, info: type, sender: type[WeightSender]) -> None:
        """Add a sender of one's own."""
        cls._senders[info] = sender

    @classmethod
    def trainer_init(
        cls, init_info: Any, *, client: WeightSyncClient, source: WeightSource | None = None
    ) -> WeightSender:
        """Meet the engines; every rank of the trainer calls this. Raises InvalidParameter for
        information of another class, for a source where patches are sent, and what the engines say.
        """
        kind = cls._senders.get(type(init_info))
        if kind is None:
            known = ", ".join(each.__name__ for each in cls._senders)
            raise InvalidParameter("init_info", type(init_info).__name__, f"one of {known}")
        if source is None and kind.sends_source:
            raise InvalidParameter("source", None, "what the weights come from, as ModuleSource")
        make: Any = kind
        sender: WeightSender = make(init_info, client, source)
        return sender


def meet_engines(
    info: MeetingPlace, client: WeightSyncClient, body: dict[str, Any]
) -> PyNcclCommunicator:
    """The trainer's side of the group, while the engines join it; `body`: what else they are told.
    Raises what they say.
    """
    group = create_group(info)
    body = body | {
        "master_address": info.master_address,
        "master_port": info.master_port,
        "rank_offset": 1,
        "world_size": info.world_size,
    }
    try:
        found: PyNcclCommunicator = while_engine(
            lambda: client.init_weight_transfer_engine(body),
            lambda: PyNcclCommunicator(group, _device_of(info)),
            group.give_up,
        )
    except BaseException:
        group.leave()
        raise
    return found


def open_group(info: NCCLTrainerInitInfo) -> PyNcclCommunicator:
    """The trainer's side of the group."""
    return PyNcclCommunicator(create_group(info), _device_of(info))


def create_group(info: MeetingPlace) -> StatelessProcessGroup:
    """The group, as the trainer opens it; nobody has come yet."""
    return StatelessProcessGroup.create(
        info.master_address, info.master_port, ROOT, info.world_size
    )


def _device_of(info: MeetingPlace) -> torch.device:
    return torch.device(info.device or ("cuda" if torch.cuda.is_available() else "cpu"))


def broadcast_all(
    communicator: PyNcclCommunicator,
    tensors: Iterable[tuple[str, Tensor]],
    metas: Iterable[TensorMeta],
    limit: int | None,
) -> None:
    """Broadcast tensors in their order: in buffers of more than `limit` bytes, or one by one."""
    values: Iterator[tuple[str, Tensor]] = iter(tensors)
    if communicator.shares_memory:
        limit = None  # each tensor is copied once anyway: putting them together would be one more
    on_the_way: deque[tuple[BroadcastWork, Tensor]] = deque()
    for chunk in chunks_of(metas, limit) if limit is not None else ([meta] for meta in metas):
        parts = [next(values)[1].detach().contiguous().to(communicator.device) for _ in chunk]
        data = parts[0] if len(parts) == 1 else torch.cat([bytes_of(part) for part in parts])
        # with its data, which must live until the broadcast has ended
        on_the_way.append((communicator.start_broadcast(data, ROOT), data))
        if len(on_the_way) > _MOST_ON_THE_WAY:
            on_the_way.popleft()[0].wait()
    for work, _ in on_the_way:
        work.wait()


def while_engine(
    call: Callable[[], None],
    act: Callable[[], Any],
    give_up: Callable[[], None] = lambda: None,
    patience_s: float = 0.0,
) -> Any:
    """Do `act` while `call` has the engines do their part. Raises what either raises, the engines'
    error first: it says why the other one failed. `act` is given up when `call` has failed and
    `act` has not ended `patience_s` later: its thread may wait until its time is over.
    """
    asked, acted = _begun(call), _begun(act)
    wait((asked, acted), return_when=FIRST_EXCEPTION)
    if not acted.done():
        wait((acted,), patience_s)
        if not acted.done():
            give_up()
    elif not asked.done():
        # the engines may say a little later why `act` has failed
        wait((asked,), _PATIENCE_S)
    for future in (asked, acted):
        if future.done():
            future.result()
    return acted.result()


def _begun(call: Callable[[], Any]) -> Future[Any]:
    """The result of a call in a thread of its own, which does not keep the program from ending."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return result
