"""A plan's settings for structured outputs, as the front end and the core need them."""

from __future__ import annotations

from quire.config.plan_parts import ModelPlan, SamplingPlan
from quire.grammar.trial import GrammarTrials
from quire.grammar.vocabulary import VocabularySource


def vocabulary_source(model: ModelPlan, sampling: SamplingPlan) -> VocabularySource | None:
    """The source of the vocabulary for grammars; None without a tokenizer."""
    if model.tokenizer_files is None:
        return None
    folder, mode = model.tokenizer_files
    return VocabularySource(str(folder), mode, model.vocab_size, sampling.generation_eos_token_ids)


def grammar_trials(model: ModelPlan, sampling: SamplingPlan) -> GrammarTrials | None:
    """The validator of requests' grammars; None without a tokenizer."""
    source = vocabulary_source(model, sampling)
    return None if source is None else GrammarTrials(source, sampling.structured_outputs)
