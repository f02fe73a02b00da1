"""The kinds of output parts that the completions of an engine keep."""

from __future__ import annotations

from quire.config.plan_parts import SamplingPlan
from quire.config.speculation import SpeculationPlan
from quire.engine.outputs.drafts import drafts_kind
from quire.engine.outputs.experts import EXPERTS
from quire.engine.outputs.kept_part import PartKind
from quire.engine.outputs.prompt_logprobs import PROMPT_LOGPROBS, PROMPT_SCORES
from quire.engine.outputs.transfer_params import TRANSFER_PARAMS

PLAIN_KINDS = (PROMPT_LOGPROBS, PROMPT_SCORES)
"""Kinds of parts that an engine without a plan keeps."""


def kinds_of(
    sampling: SamplingPlan, speculation: SpeculationPlan | None, *, has_connector: bool = False
) -> tuple[PartKind, ...]:
    """Return the kinds that an engine with these parts of a plan keeps."""
    kinds = [*PLAIN_KINDS]
    if sampling.enable_return_routed_experts:
        kinds.append(EXPERTS)
    if speculation is not None and sampling.draft_reports != "none":
        is_detailed = sampling.draft_reports == "detailed"
        kinds.append(drafts_kind(speculation.num_tokens, is_detailed))
    if has_connector:
        kinds.append(TRANSFER_PARAMS)
    return tuple(kinds)
