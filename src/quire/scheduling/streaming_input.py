"""The turns of a resumable request: it stops, rests with its row and blocks, and goes on behind its
next input.
"""

from __future__ import annotations

from quire.scheduling.request import NextInput, Reason, Request, State, Stop
from quire.scheduling.scheduler_output import FinishedRequest
from quire.scheduling.stop import stop_ids


def pause(request: Request, stop: Stop) -> None:
    """The request stopped; it waits for input. Its newest token has no K/V."""
    request.num_computed_tokens = request.num_confirmed_tokens = request.num_tokens - 1
    request.is_decoding = False
    request.state = State.IDLE
    request.last_stop = stop


def finished(request: Request, stop: Stop) -> FinishedRequest:
    """The final state of a request that stopped."""
    return FinishedRequest(
        request.handle,
        stop.reason,
        stop.what,
        num_preemptions=request.num_preemptions,
        is_in_text=stop.is_in_text,
    )


def end_of_input(request: Request, given: NextInput, max_model_len: int) -> FinishedRequest | None:
    """How a resting request ends instead of taking this input; None when it takes it."""
    assert request.last_stop is not None, "only a request that rests takes input"
    if not given.token_ids and not given.resumable:
        return finished(request, request.last_stop)
    if request.num_tokens + len(given.token_ids) > max_model_len:
        text = "the input grew beyond max_model_len"
        return FinishedRequest(request.handle, Reason.ERROR, None, text)
    return None


def resume(request: Request, given: NextInput, max_model_len: int) -> None:
    """Make the input the end of the prompt, and what comes with it the request's own. The caller
    watches for its stop ids anew.
    """
    request.resumable = given.resumable
    request.absorb(given.token_ids)
    if given.params is not None:
        request.params, request.needs_host_ids = given.params, given.needs_host_ids
        request.stop_ids = stop_ids(request)
    limit_length(request, max_model_len)


def limit_length(request: Request, max_model_len: int) -> None:
    """Set how long the request may become: by its max_tokens and by the model."""
    max_tokens = request.params.max_tokens
    assert max_tokens is not None, "the input processor resolves max_tokens"
    request.max_total_tokens = min(max_model_len, request.num_prompt_tokens + max_tokens)
