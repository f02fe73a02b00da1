"""When a request ends by its own tokens. Stop strings are the front end's: they need text."""

from __future__ import annotations

from quire.scheduling.request import Reason, Request

Stop = tuple[Reason, int | str | None]
"""(why, which token or pattern)."""


def check_stop(request: Request) -> Stop | None:
    """Does the last output token end the request? In the documented order: EOS, stop ids, length,
    repetition.
    """
    params, output = request.params, request.output_token_ids
    token = output[-1]
    if token == params.eos_token_id and not params.ignore_eos:
        return Reason.STOP, None
    if params.stop_token_ids and token in params.stop_token_ids:
        return Reason.STOP, token
    if request.num_tokens >= request.max_total_tokens:
        return Reason.LENGTH, None
    if params.repetition_detection is not None and len(output) >= params.min_tokens:
        rule = params.repetition_detection
        if _repeats(output, rule.min_pattern_size, rule.max_pattern_size, rule.min_count):
            return Reason.REPETITION, "repetition_detected"
    return None


def stop_ids(request: Request) -> list[int]:
    """The ids that can end this request."""
    params = request.params
    ids = list(params.stop_token_ids or ())
    if params.eos_token_id is not None and not params.ignore_eos:
        ids.append(params.eos_token_id)
    return ids


def _repeats(output: list[int], smallest: int, largest: int, count: int) -> bool:
    """Are the last `count` blocks of some pattern size equal?"""
    for size in range(max(1, smallest), largest + 1):
        length = size * count
        if length > len(output):
            return False
        tail = output[-length:]
        if tail[size:] == tail[:-size]:
            return True
    return False
