"""New weights for a worker's model, from a trainer or from a method of the operator's own.

A session is one update (models/updates/update.py) between `start` and `finish`. The core sees to it
that no step runs meanwhile, and what becomes of an engine whose update has failed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from quire.errors import EngineError, LoadError, WeightUpdateError
from quire.models.decoder import DecoderModel
from quire.models.loading.model_parts import tensors_within
from quire.ops.formats.row_stack import RowStack
from quire.params.weight_transfer import mixture_text
from quire.runner.residence import OpenFiles

if TYPE_CHECKING:
    from quire.distributed.named_tensors import TensorPatch
    from quire.executor.weight_transfer.engines import WeightTransferEngine
    from quire.executor.weight_transfer.snapshots import Snapshots
    from quire.models.updates.patched import PatchedWeights
    from quire.models.updates.update import UpdateReport, WeightUpdate

logger = logging.getLogger(__name__)

NOT_CONFIGURED = (
    "Weight transfer not configured: start the engine with weight_transfer_config, such as "
    '{"backend": "nccl"}.'
)
_NO_SESSION = "No update is under way: call start_weight_update first."


class OpenUpdate(Protocol):
    """Begins an update of the worker's model."""

    def __call__(self, *, is_repair: bool) -> WeightUpdate: ...


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The network that drafts, and what begins an update of it; `model` None: another worker of the
    same core has it, and takes what comes.
    """

    model: Any
    open_update: OpenUpdate


def ignored_update(*, is_repair: bool) -> WeightUpdate:
    """Begin an update of a network that another worker has."""
    update: Any = _IgnoredUpdate()
    return update  # type: ignore[no-any-return]


class _IgnoredUpdate:
    """See `WeightUpdate`."""

    is_torn = False
    is_complete = True

    def has(self, name: str) -> bool:
        return False

    def add(self, name: str, tensor: Tensor | RowStack) -> bool:
        return False

    def keep(self) -> None:
        pass

    def finish(self) -> UpdateReport:
        from quire.models.updates.update import UpdateReport  # few engines have new weights

        return UpdateReport(0, [])


class WorkerWeights:
    """The weights of a worker's model as they are changed from outside.

    Invariant: at most one update is under way; while `mixture` is set, the model must not run.
    """

    def __init__(
        self,
        model: Any,
        open_update: OpenUpdate | None,
        make_engine: Callable[[], WeightTransferEngine] | None,
        before_change: Callable[[], None] = lambda: None,
        drafts: DraftWeights | None = None,
        snapshots: Snapshots | None = None,
        files: OpenFiles | None = None,
    ) -> None:
        """`open_update` None: the model's weights cannot be changed in place. `make_engine` None:
        no trainer is expected. `before_change` is called before an update begins. `drafts` None:
        the engine has no network that drafts. `snapshots` None: no updated weights are kept.
        `files`: see `are_of`.
        """
        self._model = model
        self._drafts = drafts
        self._snapshots = snapshots
        self._open_update = open_update
        self._make_engine = make_engine
        self._before_change = before_change
        self.files, self._loaded_at = files, 0.0
        self._patched: PatchedWeights | None = None
        """The weights that patches change; None: none have come since they were loaded."""
        self._num_patched = 0
        """Number of tensors with patches in this session."""
        self._engine: WeightTransferEngine | None = None
        self._update: WeightUpdate | None = None
        self._is_session = False
        self._is_draft = False
        """Whether the last session was one of the network that drafts."""
        self._is_prepared = False
        """Whether a session has ended here that has not on all workers of all cores."""
        self.mixture: str | None = None
        """Reason why the weights are a mixture; None: they are not."""
        self.num_changes = 0
        """Number of changes of weights outside of a session."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when weights have changed outside of a session."""
        self.on_pending: Callable[[], None] = lambda: None
        """Called when the next step has to `settle` first."""
        model.weight_sink, model.settle_weights = self.load, self.settle
        model.patched_tensors = self.patched_tensors

    # sessions

    def connect(self, init_info: dict[str, Any]) -> None:
        """Meet the trainer. Raises WeightUpdateError in a session, and without a backend."""
        if self._make_engine is None:
            raise WeightUpdateError(NOT_CONFIGURED)
        if self._is_session:
            raise WeightUpdateError(
                "A trainer is updating the weights: wait until it has finished."
            )
        self.disconnect()
        engine = self._make_engine()
        engine.init_transfer_engine(engine.parse_init_info(init_info))
        self._engine = engine

    def disconnect(self) -> None:
        """Drop the connection with the trainer. Raises WeightUpdateError in a session."""
        if self._is_session:
            raise WeightUpdateError("A session is open: finish it first.")
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def start(self, is_draft: bool = False) -> None:
        """Begin a session. Raises WeightUpdateError where there is one already."""
        if self._make_engine is None:
            raise WeightUpdateError(NOT_CONFIGURED)
        if self._is_session:
            raise WeightUpdateError("An update is under way already: finish it first.")
        if is_draft and self._drafts is None:
            raise WeightUpdateError(
                "This engine has no network that drafts: start_draft_weight_update is not possible."
            )
        if is_draft and not (self._engine is None or self._engine.supports_draft_weight_update):
            raise WeightUpdateError(
                f"{type(self._engine).__name__} has no updates of networks that draft "
                "(supports_draft_weight_update)."
            )
        # a session begins with whole weights
        self._end_loading()
        self._update = self._begin(is_draft)
        self._is_session, self._num_patched = True, 0
        if self._engine is not None:
            self._engine.start_weight_update()

    def receive(self, update_info: dict[str, Any]) -> None:
        """Receive tensors from the trainer. Raises WeightUpdateError without a session or a
        connection, LoadError for tensors that do not fit; then the session is over.
        """
        if not self._is_session:
            raise WeightUpdateError(_NO_SESSION)
        if self._engine is None:
            raise WeightUpdateError("No trainer is connected: call init_weight_transfer_engine.")
        self._engine.update_weights(update_info)

    def finish(self) -> int:
        """End the session: every tensor has come. Returns how many; raises WeightUpdateError
        without a session, WeightMismatch where parts of a weight are missing. The weights are used
        once `commit` says that every other worker has come here, too.
        """
        if not self._is_session or self._update is None:
            raise WeightUpdateError(_NO_SESSION)
        if self._engine is not None:
            self._engine.finish_weight_update()
        report = self._update.finish()
        self._is_session, self._update, self.mixture = False, None, None
        self._is_prepared = report.num_tensors > 0
        if report.num_tensors > self._num_patched and not self._is_draft:
            self.are_of(None)  # some have come whole
        return report.num_tensors

    def commit(self, token: str = "") -> None:
        """The session has ended on all workers; `token` names the update."""
        self._is_prepared = False
        # only now: before, another worker might lack the update
        if self._patched is not None:
            self._patched.commit()
        if self._snapshots is not None and token:
            self._snapshots.keep(token, self._tensors())

    def restore(self, token: str) -> str:
        """Take the weights of an update that a worker before this one has kept; returns why not, or
        an empty text.
        """
        if self._snapshots is None:
            return "no snapshots of updates are kept (weight_transfer_config)"
        self.are_of(None)
        return self._snapshots.restore(token, self._tensors()) if token else "it has no snapshot"

    def settle_snapshot(self) -> None:
        """Wait until the snapshot of the last update is written."""
        if self._snapshots is not None:
            self._snapshots.settle()

    def released(self) -> None:
        """The memory of the weights is about to be given up."""
        if self._snapshots is not None:
            self._snapshots.stop()

    def are_of(self, files: OpenFiles | None, loaded_at: float = 0.0) -> None:
        """Note the files that the weights were loaded from, and when; None: no files have them."""
        self.files, self._loaded_at, self._patched = files, loaded_at, None

    def close(self) -> None:
        """The worker ends: nobody needs its snapshot."""
        if self._snapshots is not None:
            self._snapshots.drop()

    def _tensors(self) -> list[Tensor]:
        """The memory of all weights, in one order."""
        parts = self._named_parts()
        return [tensor for _, p in parts for tensor in tensors_within(p, with_addresses=False)]

    def _named_parts(self) -> Iterator[tuple[str, object]]:
        """All weights, those of the network that drafts after the others."""
        yield from _parts_of(self._model)
        if self._drafts is not None and self._drafts.model is not None:
            for name, part in _parts_of(self._drafts.model):
                yield f"draft.{name}", part

    def abandon(self, reason: str) -> bool:
        """Give the session up; returns whether the weights are a mixture now: they are where it has
        ended here and not on another worker.
        """
        update, self._update = self._update, None
        if self._is_prepared or (update is not None and update.is_torn):
            self.mixture = reason
        self._is_session = self._is_prepared = False
        return self.mixture is not None

    def spoil(self, reason: str, is_draft: bool | None = None) -> None:
        """Another worker's weights are a mixture: all of this one's have to come again, too.
        `is_draft` None: those that the last session was of.
        """
        self.mixture = reason
        if is_draft is not None:
            self._is_draft = is_draft

    def replaced(self) -> None:
        """All weights were loaded anew: what was under way is over."""
        self._update, self.mixture = None, None
        self._is_session = self._is_prepared = False
        if self._snapshots is not None:
            self._snapshots.drop()

    # without sessions

    def load(self, weights: Iterable[tuple[str, Tensor | RowStack]]) -> set[str]:
        """Take tensors of the checkpoint, or their rows, of a session or without one; returns the
        names that are the model's. What was given is copied when this returns. Without a session
        the model has the new values as soon as all tensors of a layer have come, or before the next
        step.
        """
        pairs = weights.items() if isinstance(weights, Mapping) else weights
        if self._is_session:
            assert self._update is not None
            found = {name for name, tensor in pairs if self._update.add(name, tensor)}
            self._update.keep()
            return found
        return self._load_without_session(pairs)

    def patched_tensors(self, patches: Iterable[TensorPatch]) -> Iterator[dict[str, Tensor]]:
        """See `GivenWeights`; in a session."""
        from quire.models.updates.patched import PatchedWeights  # few engines are sent patches

        assert self._update is not None, "a session has begun"
        if self._patched is None:
            self._patched = PatchedWeights(self._update.plan, self.files, self._loaded_at)
        for tensors in self._patched.tensors(patches):
            self._num_patched += len(tensors)
            yield tensors

    def settle(self) -> None:
        """End what `load` has begun without a session, before the weights are used. Raises
        EngineError as long as they are a mixture.
        """
        self._end_loading()
        if self.mixture is not None:
            raise EngineError(mixture_text(self.mixture))

    def _end_loading(self) -> None:
        """End an update without a session; what fails in it leaves a mixture."""
        if self._update is None or self._is_session:
            return
        update, self._update = self._update, None
        try:
            update.finish()
        except LoadError as error:
            self.mixture = str(error) if update.is_torn else None
            if not update.is_torn:
                logger.error("Weights that were loaded did not fit, and changed nothing: %s", error)
        else:
            self.mixture = None

    def checksums(self) -> dict[str, str]:
        """The SHA-256 of each weight as it is kept, by its name."""
        return {name: _digest(part) for name, part in self._named_parts()}

    def _begin(self, is_draft: bool = False) -> WeightUpdate:
        open_update = self._open_update
        if is_draft and self._drafts is not None:
            open_update = self._drafts.open_update
        if open_update is None:
            raise WeightUpdateError(
                "The weights of a model that runs through transformers cannot be changed in place: "
                "start a new engine."
            )
        if self.mixture is not None and is_draft != self._is_draft:
            whose = "network that drafts" if self._is_draft else "model"
            raise WeightUpdateError(f"The weights of the {whose} are a mixture: send them first.")
        self._is_draft = is_draft
        self._before_change()
        # a snapshot has the weights that are about to change
        if self._snapshots is not None:
            self._snapshots.drop()
        return open_update(is_repair=self.mixture is not None)

    def _load_without_session(self, pairs: Iterable[tuple[str, Tensor | RowStack]]) -> set[str]:
        found = set()
        for name, tensor in pairs:
            if self._update is not None and self._update.has(name):
                self._end_loading()  # the next round of a trainer that sends all of them each time
            if self._update is None:
                self._update = self._begin()
                self.are_of(None)
                self.on_pending()
                self.num_changes += 1
                self.on_change()
            update = self._update
            try:
                if update.add(name, tensor):
                    found.add(name)
            except Exception as error:
                self._update = None
                if update.is_torn:
                    self.mixture = str(error)
                raise
        if self._update is not None:
            if self._update.is_complete:
                self._end_loading()
            else:
                self._update.keep()
        return found


def _parts_of(model: Any) -> Iterable[tuple[str, object]]:
    if isinstance(model, DecoderModel):
        return model.named_parts()
    return [(str(i), tensor) for i, tensor in enumerate(model.weight_tensors())]


def _digest(part: object) -> str:
    digest = hashlib.sha256()
    for tensor in tensors_within(part, with_addresses=False):
        data = tensor.detach().contiguous().cpu().reshape(-1)
        if data.numel():
            digest.update(data.view(torch.uint8).numpy().data)
    return digest.hexdigest()
