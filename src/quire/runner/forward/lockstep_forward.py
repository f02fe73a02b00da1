"""Steps of cores that share experts: each forward pass is one round of all cores."""

from __future__ import annotations

from torch import Tensor

from quire.distributed.expert_exchange import ExpertExchange
from quire.models.decoder import HiddenStates
from quire.ops import Batch
from quire.runner.forward.forward import Forward


class LockStepForward:
    """Runs `inner` inside rounds. A pass that fails ends the wait of the core's other workers for
    this one, and then finishes its round, so that it can be run again in another one.
    """

    def __init__(self, inner: Forward, exchange: ExpertExchange) -> None:
        self._inner = inner
        self._exchange = exchange

    def release(self) -> None:
        self._inner.release()

    def record(self) -> None:
        self._inner.record()

    def __call__(self, batch: Batch, *, samples_all: bool) -> HiddenStates:
        self._exchange.begin(True)
        try:
            return self._inner(batch, samples_all=samples_all)
        except BaseException as error:
            self._exchange.give_up(f"a pass failed: {error}")
            raise
        finally:
            self._exchange.finish()

    def logits(self, hidden: Tensor, last: Tensor | None) -> Tensor:
        return self._inner.logits(hidden, last)
