"""Decides how a model pools, and refuses what pooling does not have."""

from __future__ import annotations

from quire.config.pooler_config import pooler_config
from quire.config.resolve.decisions import Decisions
from quire.errors import NotBuiltYet

_WITHOUT_TOKENS = {"logits_processors": "Leave it out: no tokens are drawn."}
_WITHOUT = {
    "enable_return_routed_experts": "Leave it out.",
    "enable_expert_parallel": "Leave it out: each copy has all experts.",
}
"""Features that engines which pool, and those that do nothing else, do not have -> advice."""
_NO_TEMPLATE = (
    "Scores of Qwen3-Reranker mean nothing without the prompt that it was trained with: give "
    "chat_template, to the engine or in each call."
)


def note_pooled_length(d: Decisions) -> None:
    """Tell where longer prompts are pooled than in training; max_model_len is decided."""
    stated = d.model.pooled_length
    if stated is None or stated.default is None or d.value("max_model_len") <= stated.default:
        return
    d.note(
        f"{stated.source} is {stated.default}, and an engine that only pools takes no longer "
        f"prompts; this one generates as well, and takes {d.value('max_model_len')} tokens for "
        f"both. truncate_prompt_tokens={stated.default} cuts a text that is pooled."
    )


def decide_pooling(d: Decisions) -> None:
    """Fix the pooler. Raises NotBuiltYet for an option that engines that pool do not have."""
    args, model = d.args, d.model
    d.decide("generates", model.generates, "whether the model has its language-model head")
    d.decide("pooler", model.pooler, model.pooler_reason)
    given = args.pooler_config
    config = pooler_config(given) if given is not None else None
    d.decide("pooler_config", config, "pooler_config" + (" was given" if given else ": none"))
    size = 0 if model.pooler is None else model.pooler.width(model.hidden_size)
    d.decide("embedding_size", size, "the width of hidden states, or of the last Dense module")
    d.decide("lowers_input", model.lowers_input, "do_lower_case of sentence-transformers")
    d.decide("prompts", model.prompts, "the prompts of sentence-transformers, for clients")
    if model.pooler is None:
        return
    for name, hint in (_WITHOUT if model.generates else _WITHOUT | _WITHOUT_TOKENS).items():
        value = getattr(args, name)
        if value:
            raise NotBuiltYet(name, f"{value} of a model that pools", hint)
    if model.pooler_note:
        d.note(model.pooler_note)
    if model.hf_config.get("is_original_qwen3_reranker") and model.template is None:
        d.note(_NO_TEMPLATE)
