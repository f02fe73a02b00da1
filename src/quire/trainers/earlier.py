"""The functions of the first releases of vLLM's weight transfer, which trainers still call: they
send, and leave the calls of the engine to the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from quire.distributed.named_tensors import BUFFER_BYTES, TensorMeta
from quire.distributed.shared_buffer import SharedBuffer
from quire.distributed.trainer_group import PyNcclCommunicator
from quire.errors import InvalidParameter
from quire.trainers.clients import HTTPWeightSyncClient
from quire.trainers.senders import NCCLTrainerInitInfo, broadcast_all, open_group
from quire.trainers.sources import described


@dataclass
class NCCLTrainerSendWeightsArgs:
    """Arguments of sending tensors. `post_iter_func` makes the tensor of each pair; `src` is 0."""

    group: Any
    src: int = 0
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor] | None = None
    packed: bool = False
    stream: Any = None
    packed_buffer_size_bytes: int = BUFFER_BYTES
    packed_num_buffers: int = 2


def trainer_init(init_info: Any) -> PyNcclCommunicator:
    """Join the group as rank 0, while the workers join it."""
    if not isinstance(init_info, dict):
        init_info = vars(init_info)
    names = ("master_address", "master_port", "world_size")
    return open_group(NCCLTrainerInitInfo(*(init_info[name] for name in names)))


class NCCLWeightTransferEngine:
    """The trainer's side of a process group."""

    trainer_init = staticmethod(trainer_init)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
        """Broadcast tensors, while the workers receive them."""
        args = trainer_args
        if isinstance(args, dict):
            args = NCCLTrainerSendWeightsArgs(**args)
        make = args.post_iter_func or (lambda pair: pair[1])
        pairs = [(pair[0], make(pair)) for pair in iterator]
        limit = args.packed_buffer_size_bytes if args.packed else None
        broadcast_all(args.group, pairs, metas_of_pairs(pairs), limit)


def packed_nccl_broadcast_producer(
    iterator: Iterator[tuple[str, Tensor]],
    group: PyNcclCommunicator,
    src: int,
    post_iter_func: Callable[[tuple[str, Tensor]], Tensor],
    buffer_size_bytes: int = BUFFER_BYTES,
    num_buffers: int = 2,
) -> None:
    """Broadcast tensors in buffers."""
    pairs = [(pair[0], post_iter_func(pair)) for pair in iterator]
    broadcast_all(group, pairs, metas_of_pairs(pairs), buffer_size_bytes)


@dataclass
class IPCTrainerSendWeightsArgs:
    """Destination of tensors: mode "http" to a server at `url`, "ray" to the actor
    `llm_handle`, "local" to an `LLM` in this process, which is the `llm_handle`.
    """

    mode: str = "http"
    llm_handle: Any = None
    url: str | None = None
    api_key: str | None = None


class IPCWeightTransferEngine:
    """The trainer's side of shared memory."""

    @staticmethod
    def trainer_send_weights(iterator: Iterator[tuple[str, Tensor]], trainer_args: Any) -> None:
        """Share tensors with the workers, which read them in one `update_weights`."""
        args = trainer_args
        if isinstance(args, dict):
            args = IPCTrainerSendWeightsArgs(**args)
        pairs = list(iterator)
        buffer = SharedBuffer(sum(tensor.nbytes for _, tensor in pairs))
        at, handles = 0, []
        for _, tensor in pairs:
            handles.append(buffer.write(at, tensor))
            at += tensor.nbytes
        body = described(metas_of_pairs(pairs)) | {"ipc_handles": handles}
        try:
            _update(args, body)
        finally:
            buffer.close()


def metas_of_pairs(pairs: Iterable[tuple[str, Tensor]]) -> list[TensorMeta]:
    """The descriptions of tensors."""
    return [TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pairs]


def _update(args: IPCTrainerSendWeightsArgs, body: dict[str, Any]) -> None:
    if args.mode == "http":
        if args.url is None:
            raise InvalidParameter("url", None, "the server's, in the mode http")
        HTTPWeightSyncClient(args.url, api_key=args.api_key).update_weights(body)
    elif args.mode == "ray":
        ray = import_module("ray")  # the trainer's

        ray.get(args.llm_handle.update_weights.remote({"update_info": body}))
    elif args.mode == "local":
        args.llm_handle.update_weights({"update_info": body})
    else:
        raise InvalidParameter("mode", args.mode, "http, ray or local")
