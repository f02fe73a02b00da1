"""The links of a rank to the stages before and after its own, which hidden states pass through."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch
from torch import Tensor

from quire.distributed.worker_group import ExchangeAborted
from quire.encodable import to_msgpack
from quire.executor.ranks.link import RankLink
from quire.models.decoder import HiddenStates
from quire.processes.codec import Frame, MessageDecoder, buffer_of
from quire.runner.forward.stage_output import StageOutput

_FAILED, _NOTHING, _STATES = b"failed", b"nothing", b"states"


class _Header(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Header of a message, whose tensors are the hidden states, `num_aux` auxiliary states, and
    for each layer with experts its `choices` for each token. `waited_s` as of `StageLinks`.
    """

    failed_encodings: list[bytes]
    num_aux: int = 0
    choices: list[int] = []
    waited_s: float = 0.0


class StageLinks:
    """The links of a rank to the stages before and after its own; None: there is none."""

    def __init__(self, before: RankLink | None, after: RankLink | None, dtype: torch.dtype) -> None:
        self._before, self._after, self._dtype = before, after, dtype
        self._decoder = MessageDecoder(_Header)
        self.waited_s = 0.0
        """Seconds that the stages before have waited for other cores in the step that came last."""

    def receive(self, width: int) -> StageOutput | None:
        """Receive the output of the stage before, in states of `width` numbers; None: there is no
        such stage. Raises ExchangeAborted when that stage has failed.
        """
        self.waited_s = 0.0
        if self._before is None:
            return None
        try:
            kind, *frames = self._before.receive()
        except EOFError as error:
            raise ExchangeAborted("an earlier stage is gone") from error
        if kind == _FAILED:
            raise ExchangeAborted("an earlier stage has failed")
        header = self._decoder.decode(frames[:1])
        self.waited_s = header.waited_s
        if kind == _NOTHING:
            return StageOutput(None, header.failed_encodings)
        after_states = 2 + header.num_aux
        last, *aux = (_tensor(data, self._dtype, width) for data in frames[1:after_states])
        experts = (
            _tensor(data, torch.int32, count)
            for data, count in zip(frames[after_states:], header.choices, strict=True)
        )
        states = HiddenStates(last, tuple(aux), tuple(experts))
        return StageOutput(states, header.failed_encodings)

    def send(self, output: StageOutput, waited_s: float = 0.0) -> None:
        """Send this stage's output; it and the stages before have waited so long for other cores.
        Raises ExchangeAborted when the next stage is gone.
        """
        if self._after is None:
            return
        states, failed = output.states, list(output.failed_encodings)
        if states is None:
            self._send([_NOTHING, to_msgpack(_Header(failed, waited_s=waited_s))])
            return
        choices = [chosen.shape[1] for chosen in states.experts]
        header = _Header(failed, len(states.aux), choices, waited_s)
        tensors = (states.last, *states.aux, *states.experts)
        self._send([_STATES, to_msgpack(header), *map(_frame, tensors)])

    def send_failure(self) -> None:
        """Have the next stage fail, too."""
        with suppress(ExchangeAborted):
            self._send([_FAILED])

    def _send(self, frames: Sequence[Frame]) -> None:
        if self._after is None:
            return
        try:
            self._after.send(frames)
        except (OSError, EOFError) as error:
            raise ExchangeAborted("the next stage is gone") from error

    def close(self) -> None:
        for link in (self._before, self._after):
            if link is not None:
                link.close()


def _frame(tensor: Tensor) -> Frame:
    data = tensor.contiguous().view(torch.uint8).numpy()
    return data.reshape(-1).data


def _tensor(data: Frame, dtype: torch.dtype, width: int) -> Tensor:
    # copied into memory that may be written, which torch asks for
    return torch.frombuffer(bytearray(buffer_of(data)), dtype=dtype).view(-1, width)
