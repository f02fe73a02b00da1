"""A plan's settings for structured outputs, as the front end and the core need them."""

from __future__ import annotations

from quire.config.plan import EnginePlan
from quire.grammar.trial import GrammarTrials
from quire.grammar.vocabulary import VocabularySource


def vocabulary_source(plan: EnginePlan) -> VocabularySource | None:
    """The source of the vocabulary for grammars; None without a tokenizer."""
    if plan.tokenizer_folder is None:
        return None
    return VocabularySource(
        plan.tokenizer_folder, plan.tokenizer_mode, plan.vocab_size, plan.generation_eos_token_ids
    )


def grammar_trials(plan: EnginePlan) -> GrammarTrials | None:
    """The validator of requests' grammars; None without a tokenizer."""
    source = vocabulary_source(plan)
    return None if source is None else GrammarTrials(source, plan.structured_outputs)
