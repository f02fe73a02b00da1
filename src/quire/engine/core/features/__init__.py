"""The seam for what some requests need besides tokens, rows and blocks: adapters, grammars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.engine.wire.messages import EngineCoreRequest, SchedulerStats
from quire.executor.abstract import LaunchedStep
from quire.scheduling.request import Request
from quire.step.columns import AnyPart
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan

Masked = GrammarMask | None
Masks = Callable[[StepPlan, LaunchedStep], Masked]
"""Makes a launched plan's masks while the device runs (None: no mask); may raise RowFailures."""


class CoreFeature:
    """Is called by the core at these moments, in its thread; a feature overrides those that it is
    about, and only these are called. None of them waits, but for `wait`.
    """

    fields: tuple[str, ...] = ()
    """It concerns requests in which one of these fields, or of their parameters, is not None."""
    follows_ids = False
    """Whether what the feature does for the next step of a request that concerns it follows from
    the ids so far, so that no step is planned ahead of them.
    """

    @property
    def masks(self) -> Masks | None:
        """The masks of constrained rows; at most one feature of a core has them."""
        return None

    def prepare(self, request: Request, message: EngineCoreRequest) -> None:
        """Give a new request that concerns the feature what it needs, or prerequisites that wait
        for it, before the scheduler has it. Raises RequestError if it cannot have it.
        """

    def dismiss(self, request: Request) -> None:
        """A request that `prepare` was called for is not queued after all."""

    def hand_over(self, request: Request) -> dict[str, Any] | None:
        """Another engine goes on with a request, which may be dropped here: what that needs to load
        its K/V. No step is in flight.
        """
        return None

    def poll(self) -> Sequence[tuple[int, str]]:
        """Take in what became ready, before steps are planned. Returns the requests that end by it,
        by their handles, with the reason.
        """
        return ()

    def planned(self, plan: StepPlan | None) -> None:
        """A step was planned, or could not be (None); what was planned is launched next."""

    def completed(self) -> None:
        """The oldest step in flight has computed; the scheduler does not know its results yet."""

    def updated(self) -> None:
        """The changes of a step are known, and its outputs are about to be returned."""

    def take_parts(self) -> list[AnyPart]:
        """Parts of the outputs of requests that have just ended."""
        return []

    def is_busy(self) -> bool:
        """Whether `poll` or `updated` has, or will have, to report more than requests that wait."""
        return False

    def delays_end(self) -> bool:
        """Whether a core that is told to end goes on for what `is_busy` is about."""
        return self.is_busy()

    def wait(self, timeout_s: float) -> None:
        """Block until something became ready, at most for `timeout_s`; at once if nothing will."""

    def report(self, stats: SchedulerStats) -> None:
        """Add what the feature counts."""

    def settle(self) -> None:
        """End what uses blocks of the pool: they are about to be forgotten. May wait for copies."""

    def forget_contents(self) -> None:
        """Forget what is cached outside of the pool."""

    def forget_weights(self) -> None:
        """The memory of the model's weights is released; no request has a row."""

    def weights_may_differ(self) -> None:
        """The weights have changed, or a function that the core does not know may have done so."""

    def close(self) -> None:
        """The core ends."""


def overridden(features: Sequence[CoreFeature], name: str) -> list[Callable[..., Any]]:
    """The methods of this name of the features that have one of their own."""
    base = getattr(CoreFeature, name)
    return [getattr(each, name) for each in features if getattr(type(each), name) is not base]
