"""Streaming input: a resumable request stops, pauses with its row and blocks, and is resumed by its
next input.
"""

from __future__ import annotations

from quire.scheduling.request import NextInput, Reason, Request, State, Stop, stop_ids
from quire.scheduling.scheduler_output import FinishedRequest, finished_request


def pause(request: Request, stop: Stop) -> None:
    """Make a request that stopped wait for input. Its newest token has no K/V."""
    if request.row >= 0:
        request.num_computed_tokens = request.num_confirmed_tokens = request.num_tokens - 1
    request.num_drafts = request.num_drafts_in_flight = 0
    request.is_decoding = False
    request.state = State.IDLE
    request.last_stop = stop


def end_of_input(request: Request, given: NextInput, max_model_len: int) -> FinishedRequest | None:
    """Return how a paused request ends instead of taking this input; None if it takes it."""
    assert request.last_stop is not None, "only a request that is paused takes input"
    if not given.token_ids and not given.resumable:
        return finished_request(request, request.last_stop)
    if request.num_tokens + len(given.token_ids) > max_model_len:
        text = "the input grew beyond max_model_len"
        return FinishedRequest(request.handle, Reason.ERROR, None, text)
    return None


def resume(request: Request, given: NextInput, max_model_len: int) -> None:
    """Append the input to the prompt and adopt its parameters. The caller must register the
    request's stop ids again.
    """
    request.resumable = given.resumable
    request.append_input(given.token_ids)
    if given.params is not None:
        request.params, request.needs_host_ids = given.params, given.needs_host_ids
        request.stop_ids = stop_ids(request)
    request.limit_length(max_model_len)
