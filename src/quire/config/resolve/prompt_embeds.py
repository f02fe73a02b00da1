"""Whether prompts may be embeddings."""

from __future__ import annotations

from quire.config.resolve.decisions import Decisions
from quire.errors import InvalidParameter


def decide_prompt_embeds(d: Decisions) -> None:
    """Raise InvalidParameter for a model that reads more of a token than its embedding."""
    if d.args.enable_prompt_embeds:
        why = None
        if d.value("model_impl") == "transformers":
            why = "the model runs transformers' code, which reads ids here"
        elif d.model.layers_read_ids:
            why = "layers of this model read ids, which embeddings do not have"
        if why is not None:
            raise InvalidParameter("enable_prompt_embeds", True, why, "Leave it out.")
    d.requested("enable_prompt_embeds", "takes_prompt_embeds")
