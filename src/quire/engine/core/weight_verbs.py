"""The control methods of a core that concern new weights.

From `start_weight_update` to `commit_weight_update` nothing is scheduled, so that no step computes
with a part of the new weights. An update that fails before it has changed anything leaves the
weights of before; after that the core answers no request until all weights have come again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from quire.engine.core.features import CoreFeature
from quire.engine.wire.messages import FIRST_VERSION
from quire.errors import InvalidParameter, WeightUpdateError
from quire.executor.abstract import Executor
from quire.params.weight_transfer import mixture_text, versions_text
from quire.scheduling.scheduler import Scheduler


class CoreWeights(ABC):
    """Base of `EngineCore`. Invariant: while an update is open nothing is scheduled; a core with
    a `refusal` has no requests.
    """

    scheduler: Scheduler
    executor: Executor
    features: Sequence[CoreFeature]
    weight_version = FIRST_VERSION
    refusal: str | None = None
    """Reason to refuse every request; None: none is refused."""
    _update: str = ""
    """The state of an update: it is "open", or has all weights ("prepared"); empty: there is none.
    """
    _is_lost = False
    """Whether the `refusal` is that of a core which has lost the weights of a whole update."""
    _num_weight_changes = 0
    _has_changed = False
    """Whether the weights may be others than those of the files."""

    @abstractmethod
    def _stop(self, mode: str, then: Callable[[], None]) -> Future[None]: ...

    @abstractmethod
    def _go_on(self) -> None: ...

    @abstractmethod
    def _fail_all(self, text: str) -> None:
        """End every request with an error."""

    @property
    @abstractmethod
    def has_weights(self) -> bool:
        """Whether the weights are in memory."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers meet a trainer."""
        self._on_workers("connect_trainer", init_info)

    def shutdown_weight_transfer_engine(self) -> None:
        """Have them leave it."""
        self._on_workers("disconnect_trainer")

    def start_weight_update(self, is_draft: bool = False) -> Future[None]:
        """Begin an update once the device is idle."""
        if self._update:
            raise WeightUpdateError(
                "An update of the weights is open already: finish it first, or end it by "
                "collective_rpc('reload_weights'), as for a trainer that is gone."
            )
        self._check_awake()
        # at once: another update must not begin while this one waits for the device
        self._update = "open"
        return self._stop("keep", lambda: self._begin(is_draft))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Receive some weights; a list has the information of each worker of all cores. What fails
        ends the update.
        """
        self._require("open")
        try:
            self._on_workers("receive_weights", update_info)
        except Exception as error:
            self.abandon_weight_update(str(error))
            raise

    def prepare_weight_update(self) -> int:
        """Check that all weights have come, and return the number of tensors."""
        self._require("open")
        try:
            counts = self._on_workers("finish_receiving")
        except Exception as error:
            self.abandon_weight_update(str(error))
            raise
        self._update = "prepared"
        return int(counts[0])

    def commit_weight_update(
        self, weight_version: str | None = None, is_lost: bool = False, token: str = ""
    ) -> None:
        """Compute with the new weights from now on. `token` names the update. is_lost: this core
        has started with those of the checkpoint, in place of one that had the weights of this
        version: it takes them from a snapshot, or refuses all requests.
        """
        if is_lost:
            self._restore(weight_version, token)
            return
        self._require("prepared")
        try:
            self._on_workers("commit_update", token)
        except Exception as error:
            self.abandon_weight_update(str(error))
            raise
        self._update, self.refusal, self._is_lost = "", None, False
        if weight_version is not None:
            self.weight_version = weight_version
        # before anything runs: blocks of the old weights must not be found by requests of the new
        # ones
        self._weights_changed()
        self._go_on()

    def _restore(self, weight_version: str | None, token: str) -> None:
        reasons = ["the weights are asleep"]
        if self.has_weights:
            reasons = self._on_workers("restore_update", token)
        why = next(filter(None, reasons), None)
        if why is None:
            if weight_version is not None:
                self.weight_version = weight_version
            self._weights_changed()
            return
        text = (
            f"The engine's core was restarted after its weights were updated to the version "
            f"{weight_version or FIRST_VERSION!r}, and has those of the checkpoint, since {why}. "
            "Send all weights again, or reload them."
        )
        self._is_lost = True
        self._on_workers("spoil_weights", text)
        self._refuse_all(text)

    def abandon_weight_update(self, reason: str) -> bool:
        """End an update that failed, here or in another core; returns whether this core has lost
        the weights of before by an update.
        """
        if self._update:
            self._update = ""
            are_mixed = self._on_workers("abandon_update", reason)
            # some weights are already the new ones, and no request may compute with both
            if any(are_mixed):
                self._on_workers("spoil_weights", reason)
                self._refuse_all(mixture_text(reason))
            self._go_on()
        # not of a core that was restarted: the weights of the others are right
        return self.refusal is not None and not self._is_lost

    def spoil_weights(self, reason: str, is_draft: bool = False) -> None:
        """Answer no request until all weights have come, or those of the network that drafts: other
        cores have, or may have, the weights of an update that did not succeed.
        """
        if self.refusal is None:
            self._on_workers("spoil_weights", reason, is_draft)
            self._refuse_all(versions_text(reason))

    def is_updating_weights(self) -> bool:
        """Whether an update is open."""
        return self._update == "open"

    def get_weight_version(self) -> str:
        """The version of the weights."""
        return self.weight_version

    def set_weight_version(self, weight_version: str) -> None:
        """Name the weights."""
        self.weight_version = weight_version

    def compute_weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every weight of every worker, as it is kept."""
        found: dict[str, str] = {}
        for sums in self._on_workers("compute_weight_checksums"):
            found.update(sums)
        return found

    def _begin(self, is_draft: bool) -> None:
        try:
            if not self._update:
                raise WeightUpdateError("The update was given up before it began.")
            self._check_awake()  # a sleep may have been waiting, too
            self._on_workers("begin_update", is_draft)
        except Exception:
            self._update = ""
            self._on_workers("abandon_update", "it did not begin")
            self._go_on()
            raise

    def _check_awake(self) -> None:
        if not self.has_weights:
            raise WeightUpdateError("The weights are asleep: call wake_up(['weights']) first.")

    def _require(self, state: str) -> None:
        if self._update != state:
            raise WeightUpdateError("No update is under way: call start_weight_update first.")

    def _reloaded(self) -> None:
        """All weights were read anew from files."""
        self._update, self.refusal, self._is_lost = "", None, False
        self.scheduler.change_weights()
        self._go_on()

    def _weights_changed(self) -> None:
        self.scheduler.change_weights()
        self._weights_may_differ()

    def _weights_may_differ(self) -> None:
        self._has_changed = True
        for feature in self.features:
            feature.weights_may_differ()

    def note_changed_weights(self) -> None:
        """A method of the operator's own has given the model other weights."""
        self._weights_changed()

    def _note_worker_changes(self) -> None:
        """Note weights that such a method has changed in a worker of another process, which tells
        when it is asked.
        """
        count = sum(self._on_workers("count_weight_changes"))
        if count != self._num_weight_changes:
            self._num_weight_changes = count
            self._weights_changed()

    def _refuse_all(self, text: str) -> None:
        self.refusal = text
        self._fail_all(text)

    def _on_workers(self, method: str, *args: Any) -> list[Any]:
        return self.executor.collective_rpc(method, args, {})

    def _held(self) -> bool:
        """Whether an update keeps steps from being scheduled."""
        return bool(self._update)


def call_by_name(core: CoreWeights, method: str, args: Sequence[Any], kwargs: Any) -> Any:
    """Call one of `BY_NAME`. Raises InvalidParameter for other arguments than it has."""
    names = ARGUMENTS.get(method, ())
    given = dict(zip(names, args, strict=False)) | dict(kwargs or {})
    required = names if method != "finish_weight_update" else ()
    if len(args) > len(names) or any(n not in names for n in given) or set(required) - set(given):
        raise InvalidParameter(
            "kwargs", kwargs, f"{method} has {', '.join(names) or 'no'} arguments"
        )
    return BY_NAME[method](core, given)


BY_NAME: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "init_weight_transfer_engine": lambda core, given: core.init_weight_transfer_engine(
        given["init_info"]
    ),
    "start_weight_update": lambda core, given: core.start_weight_update(),
    "start_draft_weight_update": lambda core, given: core.start_weight_update(True),
    "update_weights": lambda core, given: core.update_weights(given["update_info"]),
    "finish_weight_update": lambda core, given: (
        given.get("is_lost") or core.prepare_weight_update(),
        core.commit_weight_update(given.get("weight_version"), bool(given.get("is_lost"))),
    ),
    "shutdown_weight_transfer_engine": lambda core, given: core.shutdown_weight_transfer_engine(),
}
"""Methods that programs call on workers by `collective_rpc`, and that the core itself has here."""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "init_weight_transfer_engine": ("init_info",),
    "update_weights": ("update_info",),
    "finish_weight_update": ("weight_version", "is_lost"),
}
"""Arguments of the methods in `BY_NAME`; `is_lost` comes with replayed calls alone."""
