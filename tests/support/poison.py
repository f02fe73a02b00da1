"""A logits processor by which a request kills or stops the loop that runs it: for tests of
survival.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import torch
from torch import Tensor

from quire.params import SamplingParams
from quire.runner.sampling import AdapterLogitsProcessor, RequestLogitsProcessor


def _hang() -> None:
    threading.Event().wait()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise ArithmeticError("poisonous")


def _fault() -> None:
    """Make a kernel on the GPU stop at an index that does not exist: its context is lost."""
    torch.zeros(4, device="cuda")[torch.full((1,), 1 << 20, device="cuda")]


def _exit() -> None:
    sys.exit("poisonous")


_HARM = {
    "poison_at": _kill,
    "hang_at": _hang,
    "raise_at": _raise,
    "fault_at": _fault,
    "exit_at": _exit,
}


class Poison(AdapterLogitsProcessor):
    """Kills its process as soon as a request has as many output tokens as its
    `extra_args={"poison_at": n}` says, in every life of the engine; with `{"hang_at": n}` it waits
    for ever instead, with `{"raise_at": n}` it raises, with `{"exit_at": n}` it ends the
    interpreter, with `{"fault_at": n}` it breaks the GPU. With `{"poison_intake": True}` it kills
    as soon as a core takes the request in, with `{"exit": True}` it ends the interpreter there.
    """

    def is_argmax_invariant(self) -> bool:
        """It must run for greedy requests too."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """None for a request that is harmless."""
        own = params.extra_args or {}
        if "poison_intake" in own:
            _kill()
        if "exit" in own:
            _exit()
        how = next((how for how in _HARM if how in own), None)
        if how is None:
            return None
        at, harm = own[how], _HARM[how]

        def process(output_ids: list[int], logits: Tensor) -> Tensor:
            if len(output_ids) >= at:
                harm()
            return logits

        return process
