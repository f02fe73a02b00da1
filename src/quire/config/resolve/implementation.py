"""Decides whose code runs the model, and refuses what transformers' code does not have."""

from __future__ import annotations

import logging

from quire.config.resolve.decisions import Decisions
from quire.errors import NotBuiltYet

logger = logging.getLogger(__name__)

_COST = (
    "{architecture} runs as a model of transformers with Quire's attention, KV cache and sampling: "
    "every step calls its Python code, so that short steps take longer than with a family of "
    "Quire's own, transformers is imported at start (400 MB in two processes), and rounding of "
    "weights (quantization) and deterministic=True are not possible."
)
_WITHOUT = {
    **dict.fromkeys(
        ("quantization", "quantization_config"),
        "Use a model that has a family of Quire's: see docs/models.md.",
    ),
    "deterministic": "Leave it out: docs/models.md says what a request's bits depend on.",
    "enable_expert_parallel": "Leave it out: each copy has all experts.",
    "enable_return_routed_experts": "Leave it out.",
}
"""Features of Quire's own decoder alone -> advice."""


def decide_implementation(d: Decisions) -> None:
    """Fix `model_impl`. Raises NotBuiltYet for an option that transformers' models do not have."""
    d.decide("model_impl", d.model.model_impl, d.model.model_impl_reason)
    if not d.model.is_foreign:
        return
    for name, hint in _WITHOUT.items():
        value = getattr(d.args, name)
        # naming how the checkpoint is stored already asks for nothing
        confirms = name == "quantization" and d.model.stored_as is not None
        if value and not confirms:
            raise NotBuiltYet(name, f"{value} with model_impl=transformers", hint)
    cost = _COST.format(architecture=d.model.architecture)
    d.note(cost)
    # a caller who has asked for transformers by name knows
    if d.args.model_impl == "auto":
        logger.warning("%s", cost)
