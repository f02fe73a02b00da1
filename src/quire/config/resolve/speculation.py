"""Decides whether tokens are drafted, by whom, and at most how many."""

from __future__ import annotations

from typing import cast

from quire.config.draft_facts import DraftFacts
from quire.config.resolve.decisions import Decisions
from quire.config.resolve.dtype import STORED_NAMES, require_fp8
from quire.config.resolve.hidden_states import METHOD
from quire.config.speculation import (
    MAX_ROWS,
    DraftPlan,
    Method,
    NgramRules,
    SpeculationPlan,
    SuffixRules,
)
from quire.config.speculative_config import SpeculativeConfig
from quire.errors import InvalidParameter
from quire.models.formats import read_storage
from quire.models.formats.rounding_rules import BITS_PER_WEIGHT, rounding

_MOST = 128
"""Drafts of a request in a step. Costs grow with them, and far ones are hardly ever right."""
_AUTO = 8
"""Drafts where the method is `auto`."""


def decide_speculation(d: Decisions, length: int | None) -> None:
    """Fix `speculation`: None, or a plan. `length`: the longest context, None where memory decides.
    Raises InvalidParameter for what the model cannot have.
    """
    wish = d.model.drafts
    has_drafts = wish is not None and wish.config.method != METHOD
    _decide_metrics(d, has_drafts=has_drafts)
    if wish is None or not has_drafts:
        why = "none" if wish is None else f"{METHOD} drafts nothing"
        d.decide("speculation", None, f"speculative_config: {why}")
        return
    config, draft = wish.config, wish.draft
    if d.value("pooler") is not None:
        allowed = "nothing is drafted in an engine that pools"
        raise InvalidParameter(_config_name(d), config.method, allowed, "Leave it out.")
    assert config.method is not None, "the draft's files tell it"
    num_tokens, why = _num_tokens(d, config, draft)
    plan = SpeculationPlan(
        method=cast(Method, config.method),
        num_tokens=num_tokens,
        max_drafts=num_tokens * min(d.value("max_num_seqs"), MAX_ROWS),
        by_batch=tuple(config.num_speculative_tokens_per_batch_size or ()),
        is_adaptive=config.num_speculative_tokens_per_batch_size is None,
        ngram=_ngram(config),
        suffix=SuffixRules(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_cached_requests,
            config.suffix_decoding_max_spec_factor,
            min_probability=config.suffix_decoding_min_token_prob,
        ),
        draft=None if draft is None else _draft_plan(d, config, draft, length),
        custom_class=config.model if config.method == "custom_class" else None,
    )
    d.decide("speculation", plan, why)


def _decide_metrics(d: Decisions, *, has_drafts: bool) -> None:
    name = "per_request_spec_decode_metrics"
    level = d.requested(name, "draft_reports")
    if level != "none" and not has_drafts:
        allowed = "nothing is drafted, so that there is nothing to count"
        raise InvalidParameter(name, level, allowed, "Give speculative_config, or leave it out.")


def _config_name(d: Decisions) -> str:
    return "speculative_config" if d.args.spec_method is None else "spec_method"


def _num_tokens(
    d: Decisions, config: SpeculativeConfig, draft: DraftFacts | None
) -> tuple[int, str]:
    """The most drafts of a request in a step, and where the number comes from."""
    name, given = "speculative_config['num_speculative_tokens']", config.num_speculative_tokens
    trained = None if draft is None else draft.num_predicted
    if given is None and trained is not None and config.method != "draft_model":
        return min(trained, _MOST), "as many tokens as the draft was trained for"
    if given is None and config.method == "suffix":
        depth = min(config.suffix_decoding_max_tree_depth, _MOST)
        d.note(f"num_speculative_tokens was not given: up to {depth}, the depth of the tries.")
        return depth, "suffix_decoding_max_tree_depth"
    if given is None and config.method == "auto":
        return _AUTO, "the default of method auto"
    if given is None:
        raise InvalidParameter(name, None, f"a number, for method {config.method}", "Try 3.")
    if given > _MOST:
        raise InvalidParameter(name, given, f"at most {_MOST}", "Far drafts are hardly ever right.")
    # the layers that draft are run several times, each time all of them
    if config.method == "mtp" and trained is not None and given > trained and given % trained:
        allowed = f"a multiple of {trained}, the tokens that the draft was trained for"
        raise InvalidParameter(name, given, allowed)
    return given, "num_speculative_tokens was given"


def _ngram(config: SpeculativeConfig) -> NgramRules:
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is None and high is None:
        # Alone, short patterns are too often wrong; beside a suffix trie costs decide.
        return NgramRules()
    return NgramRules(low or high or 1, high or low or 1)


def _rounding(d: Decisions, config: SpeculativeConfig, draft: DraftFacts) -> str | None:
    """Rounding of the draft's weights while they are loaded; None: they are as stored."""
    given, storage = config.quantization, read_storage(draft.hf_config)
    name = "speculative_config['quantization']"
    if storage is not None:
        if given is not None and STORED_NAMES.get(given) != storage.method:
            allowed = f"None or {storage.method}, as the draft is stored"
            raise InvalidParameter(name, given, allowed, "Leave it out.")
        return None
    chosen = rounding(given)
    if chosen is not None and chosen not in BITS_PER_WEIGHT:
        allowed = f"None, or one of {', '.join(BITS_PER_WEIGHT)}"
        raise InvalidParameter(name, given, allowed)
    if given is not None and chosen == "fp8":
        require_fp8(d, name, given)
    return chosen


def _draft_plan(
    d: Decisions, config: SpeculativeConfig, draft: DraftFacts, length: int | None
) -> DraftPlan:
    stated = draft.hf_config.get("max_position_embeddings")
    own = stated if draft.method == "draft_model" and isinstance(stated, int) else None
    for limit, whose in ((length, "the target's"), (own, "the draft's")):
        given = config.max_model_len
        if given is not None and limit is not None and given > limit:
            name = "speculative_config['max_model_len']"
            raise InvalidParameter(name, given, f"at most {whose}, {limit}")
    return DraftPlan(
        model=draft.name,
        folder=draft.folder,
        weights_format=draft.weights_format,
        hf_config=draft.hf_config,
        is_target=draft.is_target,
        quantization=d.value("quantization") if draft.is_target else _rounding(d, config, draft),
        max_model_len=config.max_model_len or own,
        is_greedy=config.draft_sample_method == "greedy",
        use_graphs=d.value("use_graphs") and not config.enforce_eager,
    )
