"""Counts of the drafts of a completion, proposed and accepted, over its steps."""

from __future__ import annotations

from quire.engine.outputs.kept_part import KeptPart, PartKind
from quire.engine.stats.request_drafts import RequestSpecDecodeMetrics
from quire.outputs import CompletionOutput
from quire.step.part import VerifiedDrafts


class OutputDrafts(KeptPart):
    """A completion's counts; a step has at most `num_spec_tokens`. `is_detailed`: by step."""

    __slots__ = ("_is_detailed", "_metrics")

    def __init__(self, num_spec_tokens: int, is_detailed: bool) -> None:
        self._metrics = RequestSpecDecodeMetrics.new(num_spec_tokens)
        self._is_detailed = is_detailed

    def add(self, part: VerifiedDrafts) -> None:
        self._metrics.observe(part.num_drafts, part.num_accepted, self._is_detailed)

    def end(self, completion: CompletionOutput, num_tokens: int) -> None:
        completion.spec_decode_metrics = self._metrics


def drafts_kind(num_spec_tokens: int, is_detailed: bool) -> PartKind:
    """The kind of an engine that reports its drafts."""
    return PartKind(VerifiedDrafts, lambda *_: OutputDrafts(num_spec_tokens, is_detailed))
