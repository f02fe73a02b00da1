"""The processes of a launcher whose engines plan the same steps: what they tell each other apart
from a model's tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.distributed.meeting import OpenedGroup
from quire.distributed.worker_group import ExchangeAborted
from quire.encodable import to_msgpack
from quire.errors import EngineDeadError, InvalidParameter
from quire.executor.ranks.link import framed, frames_in
from quire.executor.ranks.messages import FailedTask
from quire.processes.codec import Frame, MessageDecoder, MessageEncoder
from quire.step.plan import StepPlan


class Peers:
    """A group whose first process is the one that samples. Every call is made by all of them, in
    the same order, and raises EngineDeadError when one is gone.
    """

    def __init__(self, opened: OpenedGroup) -> None:
        self._opened = opened
        self._encoder = MessageEncoder()
        self._failures = MessageDecoder(dict[str, FailedTask])  # type: ignore[type-abstract]

    def numbers(self, *values: int) -> list[list[int]]:
        """The numbers of each process, which all have equally many; first those of the one that
        samples.
        """
        mine = torch.tensor([values], dtype=torch.int64)
        try:
            found: list[list[int]] = self._opened.group.gather(mine)[0].tolist()
        except ExchangeAborted as error:
            raise EngineDeadError(_LOST.format(error)) from error
        return found

    def require_same(self, plan: StepPlan) -> None:
        """Raise EngineDeadError where the processes are about to run different steps."""
        # seven bytes, which fit the int64 that processes exchange whatever its sign
        digest = hashlib.blake2b(to_msgpack(_shape(plan)), digest_size=7).digest()
        found = self.numbers(int.from_bytes(digest, "little"))
        if any(each != found[0] for each in found):
            raise EngineDeadError(
                "The processes of the launcher have planned different steps: each of them must get "
                "the same requests, in the same order, and the same calls."
            )

    def require_options(self, own: Mapping[str, Any]) -> None:
        """Raise InvalidParameter for an option that another process has otherwise."""
        encoded = [repr(value).encode() for value in own.values()]
        for name, mine in zip(own, encoded, strict=True):
            for each in self.gather(mine):
                if each != mine:
                    other = each.decode()[:80]
                    hint = "Give all processes of a launcher the same options."
                    allowed = f"another process has {other}"
                    raise InvalidParameter(name, mine.decode()[:80], allowed, hint)

    def broadcast(self, frames: Sequence[Frame]) -> list[memoryview]:
        """The frames of the process that samples; those of others are not looked at."""
        is_first = self._opened.group.rank == 0
        data = b"".join(framed(frames)) if is_first else b""
        ((size, *_), *_) = self.numbers(len(data))
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_first else None
        try:
            sent = torch.empty(size, dtype=torch.uint8) if mine is None else mine
            found = self._opened.group.broadcast(sent)
        except ExchangeAborted as error:
            raise EngineDeadError(_LOST.format(error)) from error
        return frames_in(memoryview(bytearray(found.numpy())))

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of each process, first those of the one that samples."""
        sizes = [size for (size,) in self.numbers(len(data))]
        # an exchange has one size for all
        padded = torch.zeros(1, max(sizes) or 1, dtype=torch.uint8)
        if data:
            padded[0, : len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        try:
            found = self._opened.group.gather(padded)[0]
        except ExchangeAborted as error:
            raise EngineDeadError(_LOST.format(error)) from error
        return [bytes(row[:size].numpy()) for row, size in zip(found, sizes, strict=True)]

    def failures(self, own: FailedTask | None) -> dict[int, FailedTask]:
        """Failures of each process, by its number in the group."""
        mine = {} if own is None else {"": own}
        told = self.gather(b"".join(framed(self._encoder.encode(mine))))
        decoded = [self._failures.decode(frames_in(memoryview(each))) for each in told]
        return {rank: each[""] for rank, each in enumerate(decoded) if each}

    def close(self) -> None:
        """Have the others find this process gone."""
        self._opened.close()


_LOST = "Another process of the launcher is gone: {}"


def _shape(plan: StepPlan) -> tuple[Any, ...]:
    """The part of a plan that is equal on all ranks, without values that only one of them reads."""
    return (
        plan.step_id,
        list(plan.removed),
        [(new.row, new.handle, len(new.token_ids), new.num_computed_tokens) for new in plan.added],
        list(plan.decode_rows),
        [(chunk.row, chunk.num_tokens, chunk.samples) for chunk in plan.chunks],
    )
