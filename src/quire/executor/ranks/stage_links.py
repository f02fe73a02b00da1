"""The links of a rank to the stages before and after its own, which hidden states pass through."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor

from quire.distributed.worker_group import ExchangeAborted
from quire.executor.ranks.link import RankLink
from quire.processes.codec import Frame

_FAILED, _NOTHING, _STATES = b"failed", b"nothing", b"states"


class StageLinks:
    """The links of a rank to the stages before and after its own; None: there is none."""

    def __init__(self, before: RankLink | None, after: RankLink | None, dtype: torch.dtype) -> None:
        self._before, self._after, self._dtype = before, after, dtype

    def receive(self, width: int) -> Tensor | None:
        """The hidden states [T, width] of the stage before; None: of a step without tokens, or
        there is no such stage. Raises ExchangeAborted when that stage has failed.
        """
        if self._before is None:
            return None
        try:
            kind, data = self._before.receive()
        except EOFError as error:
            raise ExchangeAborted("an earlier stage is gone") from error
        if kind == _FAILED:
            raise ExchangeAborted("an earlier stage has failed")
        if kind == _NOTHING:
            return None
        # copied into memory that may be written, which torch asks for
        return torch.frombuffer(bytearray(data), dtype=self._dtype).view(-1, width)

    def send(self, states: Tensor | None) -> None:
        """Send hidden states on. Raises ExchangeAborted when the next stage is gone."""
        if states is None:
            self._send(_NOTHING, b"")
            return
        data = states.contiguous().view(torch.uint8).numpy()
        self._send(_STATES, data.reshape(-1).data)

    def send_failure(self) -> None:
        """Have the next stage fail, too."""
        with suppress(ExchangeAborted):
            self._send(_FAILED, b"")

    def _send(self, kind: bytes, data: Frame) -> None:
        if self._after is None:
            return
        try:
            self._after.send([kind, data])
        except (OSError, EOFError) as error:
            raise ExchangeAborted("the next stage is gone") from error

    def close(self) -> None:
        """Close the links."""
        for link in (self._before, self._after):
            if link is not None:
                link.close()
