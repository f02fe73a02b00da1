"""Decides whether prompts may be embeddings, pictures too, and where encoders' outputs are kept."""

from __future__ import annotations

from quire.config.ec_transfer_config import NAME, ec_transfer_config
from quire.config.resolve.decisions import Decisions
from quire.errors import InvalidParameter
from quire.models.reading.text_part import has_vision


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
    d.requested("enable_mm_embeds", "takes_media_embeds")
    transfer = ec_transfer_config(d.args.ec_transfer_config)
    if transfer is not None and not has_vision(d.model.hf_config):
        why = "the engine takes no pictures, whose encoder's outputs would be kept"
        raise InvalidParameter(NAME, d.args.ec_transfer_config, why, "Leave it out.")
    d.decide("encoder_transfer", transfer, NAME + (" was given" if transfer else ": none"))
    if d.args.enable_mm_embeds and not has_vision(d.model.hf_config):
        why = "the engine takes no pictures, whose embeddings these are"
        raise InvalidParameter("enable_mm_embeds", True, why, "Leave it out.")
