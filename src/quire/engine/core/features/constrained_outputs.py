"""Outputs that follow a grammar, as a feature of the core."""

from __future__ import annotations

from quire.engine.core.features import CoreFeature, Masks
from quire.engine.wire.messages import EngineCoreRequest
from quire.grammar.compiler import GrammarCompiler
from quire.params import SamplingParams
from quire.scheduling.request import Request
from quire.scheduling.scheduler import Scheduler


class ConstrainedOutputs(CoreFeature):
    """Requests wait for their grammars; rows draw what these allow."""

    fields = ("structured_outputs", "thinking")
    follows_ids = True

    def __init__(self, grammars: GrammarCompiler, scheduler: Scheduler) -> None:
        self._grammars = grammars
        self._masks = grammars.masks_of(scheduler.rows.constrained)

    @property
    def masks(self) -> Masks:
        return self._masks

    def prepare(self, request: Request, message: EngineCoreRequest) -> None:
        """Give a generation its constraint: a form, or a bound on its reasoning."""
        if isinstance(message.params, SamplingParams):
            constraint = self._grammars.constraint(message.params, message.thinking)
            if constraint is not None:
                request.constrain(constraint)

    def close(self) -> None:
        self._grammars.close()
