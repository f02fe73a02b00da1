"""The features of a core that is built without a plan: no tokenizer, no adapters."""

from __future__ import annotations

from quire.engine.core.features import CoreFeature
from quire.engine.core.features.adapters import AdaptersOff
from quire.engine.core.features.constrained_outputs import ConstrainedOutputs
from quire.engine.core.features.prompt_media import MediaOfPrompts
from quire.executor.worker_config import MediaFacts
from quire.grammar.compiler import GrammarCompiler
from quire.scheduling.scheduler import Scheduler


def plain_features(
    scheduler: Scheduler, media: MediaFacts | None = None
) -> tuple[CoreFeature, ...]:
    """Features that refuse what needs more than tokens. media: None where none are taken."""
    grammars = ConstrainedOutputs(GrammarCompiler(None), scheduler)
    return grammars, AdaptersOff(), MediaOfPrompts(media or MediaFacts())
