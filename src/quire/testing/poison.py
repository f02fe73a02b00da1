"""A logits processor by which a request kills or stops the loop that runs it: for tests of
survival.
"""

from __future__ import annotations

import os
import signal
import threading

from torch import Tensor

from quire.params import SamplingParams
from quire.runner.sampling import AdapterLogitsProcessor, RequestLogitsProcessor


class Poison(AdapterLogitsProcessor):
    """Kills its process as soon as a request has as many output tokens as its
    `extra_args={"poison_at": n}` says, in every life of the engine; with `{"hang_at": n}` it waits
    for ever instead.
    """

    def is_argmax_invariant(self) -> bool:
        """It must run for greedy requests too."""
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """None for a request that is harmless."""
        own = params.extra_args or {}
        at, does_hang = own.get("poison_at", own.get("hang_at")), "hang_at" in own
        if at is None:
            return None

        def process(output_ids: list[int], logits: Tensor) -> Tensor:
            if len(output_ids) >= at and does_hang:
                threading.Event().wait()
            elif len(output_ids) >= at:
                os.kill(os.getpid(), signal.SIGKILL)
            return logits

        return process
