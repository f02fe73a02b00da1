"""The update of the weights that the cores of an engine are in, as their supervisor knows it.

A core that dies during an update comes back without it: the update ends on all of them. Where one
has some of the new weights by then, or may have, none answers until all weights have come again.
"""

from __future__ import annotations

from typing import Any

from quire.engine.wire.control_calls import Utility
from quire.errors import RequestError, WeightUpdateError

ABANDON, SPOIL = "abandon_weight_update", "spoil_weights"
_PHASES = {
    "start_weight_update": "start",
    "start_draft_weight_update": "start",
    "is_updating_weights": "ask",
    "update_weights": "receive",
    "prepare_weight_update": "receive",
    "commit_weight_update": "finish",
    "finish_weight_update": "finish",
    ABANDON: "abandon",
    "reload_weights": "reload",
}
"""Calls of cores, also of workers by name, -> their part in an update."""


class UpdateWatch:
    """Follows the calls of an update. Calls that it returns are to be sent to all cores.

    Invariant: while `_failure` has a text, no update is open, and its trainer does not know.
    """

    def __init__(self) -> None:
        self._opener: Utility[Any] | None = None
        """The call that began it; None: no update is open."""
        self._is_finishing = False
        """Whether cores may compute with the new weights already."""
        self._failure = ""

    def begin(self, call: Utility[Any]) -> None:
        """Note a call that is about to be sent. Raises WeightUpdateError for one of an update that
        a core's death has ended.
        """
        phase = _phase_of(call)
        if phase == "start":
            self._failure = ""
            self._opener = self._opener or call
        elif phase in ("ask", "receive", "finish"):
            if (failure := self.failure_of(call)) is not None:
                raise failure
            self._is_finishing = phase == "finish" and self._opener is not None

    def failure_of(self, call: Utility[Any]) -> WeightUpdateError | None:
        """The error of a call whose update a core's death has ended, once."""
        # once: a trainer that knows may send an update by a single call
        if not self._failure or _phase_of(call) in (None, "abandon", "reload"):
            return None
        text, self._failure = self._failure, ""
        return WeightUpdateError(text)

    def succeeded(self, call: Utility[Any], answer: object, num_cores: int) -> list[Utility[Any]]:
        """All cores have answered."""
        phase = _phase_of(call)
        if phase not in ("finish", "abandon", "reload"):
            return []
        spoils = phase == "abandon" and answer is True and num_cores > 1
        calls = [self._spoil(str(call.args[0]), call)] if spoils else []
        self._close()
        if phase == "reload":
            self._failure = ""
        return calls

    def failed(
        self, call: Utility[Any], error: BaseException, num_cores: int
    ) -> list[Utility[Any]]:
        """A core has answered with an error."""
        if call is self._opener:
            self._close()
        if _phase_of(call) != "finish" or not self._is_finishing:
            return []
        self._is_finishing = False
        if isinstance(error, RequestError):  # the call itself was wrong
            return []
        # others may have come to the end
        spoil = self._spoil(str(error), call)
        self._close()
        return [spoil] if num_cores > 1 else []

    def core_died(self, engine_index: int) -> list[Utility[Any]]:
        """A core is dead, whose calls have failed, and not restarted yet."""
        if self._opener is None:
            return []
        who = f"engine core {engine_index} died"
        if self._is_finishing:
            reason = f"{who} while the update ended"
            self._failure = (
                f"{reason[0].upper()}{reason[1:]}, so that the cores may have weights of two "
                "versions: they answer no request until all weights have come in one update."
            )
            calls = [self._spoil(reason, self._opener)]
        else:
            reason = f"{who} during the update"
            self._failure = (
                f"{reason[0].upper()}{reason[1:]}, which is over on all cores: call "
                "init_weight_transfer_engine, and begin another."
            )
            calls = [Utility(ABANDON, (reason,))]
        self._close()
        return calls

    def _spoil(self, reason: str, call: Utility[Any]) -> Utility[Any]:
        return Utility(SPOIL, (reason, _is_draft(self._opener or call)))

    def _close(self) -> None:
        self._opener, self._is_finishing = None, False


def _phase_of(call: Utility[Any]) -> str | None:
    name = call.args[0] if call.method == "collective_rpc" else call.method
    return _PHASES.get(name) if isinstance(name, str) else None


def _is_draft(call: Utility[Any]) -> bool:
    """Whether the update that a call begins is one of the network that drafts."""
    if call.method == "collective_rpc":
        return bool(call.args[0] == "start_draft_weight_update")
    return call.method == "start_weight_update" and call.args[:1] == (True,)
