"""A group of a trainer's processes and an engine's workers, which is not torch's one per process:
what vLLM calls `StatelessProcessGroup` and `PyNcclCommunicator`.

The first process serves a store at an address that all know; tensors go by NCCL where they are in
a GPU's memory, else by gloo, and those of the first process through shared memory where all are on
one host. Nothing that comes is unpickled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch import Tensor, distributed

from quire.distributed.group_messages import Messages, SizedMessages
from quire.distributed.host_broadcasts import HostReceiver, HostSender, open_side
from quire.distributed.meeting import Meeting, prefixed
from quire.distributed.peer_sockets import address_towards
from quire.encodable import to_msgpack
from quire.errors import InvalidParameter, PeersLost, WeightUpdateError

TIMEOUT_S = 240.0
"""Seconds that a process waits for the others: fewer than a front end waits for its core's turn."""
_LOOK_S = 0.01


class StatelessProcessGroup:
    """The store of a group, and this process's number in it."""

    def __init__(self, rank: int, world_size: int, store: Any, hostname: str) -> None:
        """`hostname` is the address of this process that the others reach."""
        self.rank = rank
        self.world_size = world_size
        self.store = store
        self.hostname = hostname
        self._count = 0
        self._num_barriers = 0
        self._has_given_up = False
        self.num_communicators = 0

    @classmethod
    def create(
        cls,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        data_expiration_seconds: int = 3600,
        store_timeout: float = TIMEOUT_S,
    ) -> StatelessProcessGroup:
        """Join the group whose first process listens at `host`:`port`; every process calls this.
        What is in the store stays there, whatever `data_expiration_seconds` says.

        Raises InvalidParameter for a rank outside of the group, WeightUpdateError if the first
        process cannot be reached in `store_timeout` seconds.
        """
        if not 0 <= rank < world_size:
            raise InvalidParameter("rank", rank, f"from 0 to world_size - 1 = {world_size - 1}")
        try:
            store = distributed.TCPStore(  # type: ignore[attr-defined]
                host,
                port,
                world_size,
                is_master=rank == 0,
                timeout=timedelta(seconds=store_timeout),
                wait_for_workers=False,
            )
        except (RuntimeError, ValueError) as error:
            raise WeightUpdateError(
                f"The group of trainer and workers at {host}:{port} was not reached: {error}"
            ) from error
        return cls(rank, world_size, store, address_towards(host, port))

    def broadcast_obj(self, obj: Any | None, src: int) -> Any:
        """Give the value of process `src` to all: numbers, texts, bytes, lists and dicts."""
        key = f"broadcast/{self._next()}"
        if self.rank == src:
            self.store.set(key, to_msgpack(obj))
            return obj
        return msgspec.msgpack.decode(self._get(key))

    def all_gather_obj(self, obj: Any) -> list[Any]:
        """The values of all processes, by rank."""
        return [self.broadcast_obj(obj, src) for src in range(self.world_size)]

    def barrier(self) -> None:
        self._num_barriers += 1
        key = f"barrier/{self._num_barriers}"
        if self.store.add(key, 1) == self.world_size:
            self.store.set(key + "/done", b"")
        self._get(key + "/done")
        if self.rank == 0:  # all have left the barrier before this one
            for end in ("", "/done"):
                self.store.delete_key(f"barrier/{self._num_barriers - 1}{end}")

    def meet(self, name: str) -> None:
        """Wait until all processes have come to this place, which they come to once. Raises
        WeightUpdateError if some do not come, and when another thread of this one has given up.
        """
        until = time.monotonic() + TIMEOUT_S
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        try:
            self.store.set(keys[self.rank], b"")
            # a wait of the store's own cannot be ended
            while not self.store.check(keys):
                if self._has_given_up or time.monotonic() > until:
                    raise WeightUpdateError("The other processes of the group did not come.")
                time.sleep(_LOOK_S)
        except RuntimeError as error:
            raise WeightUpdateError(f"Another process of the group is gone: {error}") from error

    def give_up(self) -> None:
        """End the wait of a thread that meets the others."""
        self._has_given_up = True

    def leave(self) -> None:
        """Leave the group, whose port is free when the first process has left."""
        self.store = None

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _get(self, key: str) -> bytes:
        try:
            return bytes(self.store.get(key))
        except RuntimeError as error:
            raise WeightUpdateError(f"Another process of the group is gone: {error}") from error


class PyNcclCommunicator:
    """Sends tensors between the processes of a group, which all make one at the same time."""

    def __init__(
        self,
        group: StatelessProcessGroup,
        device: int | str | torch.device,
        library_path: str | None = None,
    ) -> None:
        """`device` has the tensors. `library_path` is not needed: torch brings the libraries.

        Raises WeightUpdateError if the others do not come.
        """
        self.group = group
        self.rank, self.world_size = group.rank, group.world_size
        found = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        self.device = found if torch.cuda.is_available() else torch.device("cpu")
        self.available, self.disabled = True, self.world_size == 1
        self._is_given_up = False
        if self.disabled:
            return
        group.num_communicators += 1
        name = f"group/{group.num_communicators}"
        group.meet(f"{name}/here")
        store = prefixed(name, group.store)
        self._host: HostSender | HostReceiver | None = None
        try:
            if self.device.type == "cuda":
                group_of_torch = self._nccl(store)
                self._messages: Messages | None = Messages(group_of_torch)
            else:
                group_of_torch = self._gloo(store)
                self._messages = SizedMessages(group_of_torch, self.rank, self.world_size)
                meeting = Meeting(
                    prefixed("host", store), self.rank, self.world_size, timeout_s=TIMEOUT_S
                )
                self._host = open_side(meeting, TIMEOUT_S)
        except (RuntimeError, PeersLost) as error:
            text = f"The other processes of the group did not come: {error}"
            raise WeightUpdateError(text) from error
        BroadcastWork(_with_others(group_of_torch.barrier)).wait()

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Give the tensor of process `src` to all, in place. Raises WeightUpdateError."""
        self.start_broadcast(tensor, src).wait()

    def start_broadcast(self, tensor: Tensor, src: int) -> BroadcastWork:
        """Begin a broadcast; where the group is not on one host, without waiting: those that have
        begun go on one after the other. The tensor stays as it is, and its memory where it is,
        until `wait`.
        """
        if self.disabled or not tensor.numel():
            return BroadcastWork(None)
        self.check()
        data = _flat_bytes(tensor)
        if self._host is not None and src == 0:
            if isinstance(self._host, HostSender):
                self._host.send(data, len(data) // len(tensor) if tensor.dim() > 1 else 1)
            else:
                self._host.receive(data)
                self._host.check_end()
            return BroadcastWork(None)
        return BroadcastWork(_with_others(lambda: self._open.broadcast(data, src)))

    def all_reduce(self, in_tensor: Tensor, op: Any = None, stream: Any = None) -> Tensor:
        """The sum over all processes. Raises InvalidParameter for another `op`."""
        if op not in (None, distributed.ReduceOp.SUM):
            raise InvalidParameter("op", op, "tensors are added up: ReduceOp.SUM", "Leave it out.")
        result = in_tensor.clone()
        self._one(result, lambda data: self._open.all_reduce(data), as_bytes=False)
        return result

    def send(self, tensor: Tensor, dst: int, stream: Any = None) -> None:
        """Send a tensor to one process."""
        self._one(tensor, lambda data: self._open.send(data, dst))

    def recv(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        """Receive one from it, in place."""
        self._one(tensor, lambda data: self._open.recv(data, src))

    @property
    def shares_memory(self) -> bool:
        """Whether what the first process broadcasts comes through memory of the host."""
        return not self.disabled and self._host is not None

    @property
    def lender(self) -> HostReceiver | None:
        """Reads what the first process broadcasts in its place; None: this one sends it, or it does
        not come through memory of the host.
        """
        return self._host if not self.disabled and isinstance(self._host, HostReceiver) else None

    def destroy(self) -> None:
        if not self.disabled and self._host is not None:
            self._host.close()
        self.disabled = True
        if not self._is_given_up:  # else its end would wait for what a thread has begun
            self._messages = None

    def check(self) -> None:
        """Raise WeightUpdateError where the group was given up."""
        if self._is_given_up:
            raise WeightUpdateError("The group was given up when a broadcast failed: make another.")

    def give_up(self) -> None:
        """Others do not take part in what another thread has begun. Nothing is broadcast any more,
        as it would be taken for the rest of that.
        """
        self._is_given_up = True
        if not self.disabled and self._host is not None:
            self._host.close()

    @property
    def _open(self) -> Messages:
        assert self._messages is not None, "nothing is sent after destroy"
        return self._messages

    def _one(self, tensor: Tensor, start: Callable[[Tensor], Any], as_bytes: bool = True) -> None:
        if self.disabled or not tensor.numel():
            return
        data = _flat_bytes(tensor) if as_bytes else tensor
        BroadcastWork(_with_others(lambda: start(data))).wait()

    def _gloo(self, store: Any) -> Any:
        gloo: Any = distributed.ProcessGroupGloo  # its stub knows little of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=self.group.hostname)]
        return gloo(store, self.rank, self.world_size, options)

    def _nccl(self, store: Any) -> Any:
        nccl: Any = distributed.ProcessGroupNCCL  # type: ignore[attr-defined]
        options = nccl.Options()
        options._timeout = timedelta(seconds=TIMEOUT_S)
        return nccl(store, self.rank, self.world_size, options)


class BroadcastWork:
    """Something that processes of a group have begun to do together."""

    def __init__(self, work: Any) -> None:
        """`work` None: it is done."""
        self._work = work

    def wait(self) -> None:
        """Wait for its end. Raises WeightUpdateError."""
        if self._work is not None:
            _with_others(self._work.wait)


def _with_others(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except WeightUpdateError:
        raise
    except RuntimeError as error:
        raise WeightUpdateError(f"Another process of the group is gone: {error}") from error


def _flat_bytes(tensor: Tensor) -> Tensor:
    assert tensor.is_contiguous(), "a tensor is sent as it lies in memory"
    return tensor.view(-1).view(torch.uint8)
