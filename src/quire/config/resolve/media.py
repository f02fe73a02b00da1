"""Decides which media prompts may have, where they come from, and how much of them is kept."""

from __future__ import annotations

from quire.config.args.engine_options import EngineOptions
from quire.config.plan_parts import MediaPlan
from quire.config.resolve.decisions import Decisions
from quire.errors import InvalidParameter
from quire.models.reading.text_part import has_vision

_OF_PICTURES = ("mm_processor_kwargs", "media_io_kwargs")
"""Options about pictures alone; all others are bounds, which an engine of text has, too."""


def decide_media(d: Decisions) -> None:
    """Fix `media`. Raises InvalidParameter for values that make no sense, or need pictures."""
    args = d.args
    if not has_vision(d.model.hf_config):
        if takes_pictures(args):
            _check_unused(args)
        d.decide("media", None, "prompts are text")
        return
    from quire.media.io_options import background_of  # few models take pictures
    from quire.media.item_limits import read_limits

    limits = read_limits(args.limit_mm_per_prompt)
    hosts = args.allowed_media_domains or ()
    plan = MediaPlan(
        limits=limits,
        allowed_domains=(hosts,) if isinstance(hosts, str) else tuple(hosts),
        local_folder=str(args.allowed_local_media_path),
        processor_kwargs=args.mm_processor_kwargs or {},
        background=background_of(args.media_io_kwargs),
        cache_bytes=int(args.mm_processor_cache_gb * 2**30),
        journal_bytes=args.journal_media_bytes,
        interleaves=args.interleave_mm_strings,
    )
    where = "any public host" if not hosts else f"{len(plan.allowed_domains)} hosts"
    reason = f"at most {limits['image']} pictures in a prompt, from {where}"
    if plan.local_folder:
        reason += f" and {plan.local_folder}"
    d.decide("media", plan, reason)


def takes_pictures(args: EngineOptions) -> bool:
    """Whether options let prompts have pictures. Raises InvalidParameter for bad limits."""
    if not args.limit_mm_per_prompt:
        return not args.language_model_only
    from quire.media.item_limits import read_limits

    limits = read_limits(args.limit_mm_per_prompt, is_text_only=args.language_model_only)
    return limits["image"] > 0


def _check_unused(args: EngineOptions) -> None:
    for name in _OF_PICTURES:
        if given := getattr(args, name):
            hint = "Leave it out, or look in the log for why the model's pictures are not served."
            raise InvalidParameter(name, given, "this engine takes text alone", hint)
