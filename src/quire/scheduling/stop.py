"""Stop conditions on token ids. Stop strings, which need text, are checked by the front end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from quire.scheduling.request import Reason, Request, Stop


def check_stop(request: Request) -> Stop | None:
    """Return why the last output token ends the request, or None. Checked in the documented order:
    EOS, stop ids, the end of its grammar, length, repetition.
    """
    params, output = request.sampling, request.output_token_ids
    token = output[-1]
    if token == params.eos_token_id and not params.ignore_eos:
        return Stop(Reason.STOP)
    if params.stop_token_ids and token in params.stop_token_ids:
        return Stop(Reason.STOP, token)
    if request.grammar is not None and request.grammar.has_ended(output):
        return Stop(Reason.STOP, is_in_text=True)
    if request.num_tokens >= request.max_total_tokens:
        return Stop(Reason.LENGTH)
    if params.repetition_detection is not None and len(output) >= params.min_tokens:
        rule = params.repetition_detection
        if _repeats(output, rule.min_pattern_size, rule.max_pattern_size, rule.min_count):
            return Stop(Reason.REPETITION, "repetition_detected")
    return None


def find_stop(request: Request, num_new: int) -> tuple[Stop | None, int]:
    """Find the first of the `num_new` newest tokens that ends the request. Returns the stop, and
    how many tokens after it were dropped from its output.
    """
    if num_new == 1:
        return check_stop(request), 0
    output = request.output_token_ids
    later = output[len(output) - num_new + 1 :]
    del output[len(output) - num_new + 1 :]
    for dropped in range(num_new - 1, 0, -1):
        stop = check_stop(request)
        if stop is not None:
            return stop, dropped
        output.append(later[-dropped])
    return check_stop(request), 0


def ends_with_prompt(request: Request) -> bool:
    """Whether the request samples no tokens and its prompt is computed."""
    return not request.generates and request.num_confirmed_tokens == request.num_tokens


def stop_ids(request: Request) -> list[int]:
    """Return the ids that can end this request."""
    if not request.generates:
        return []
    params = request.sampling
    ids = list(params.stop_token_ids or ())
    if params.eos_token_id is not None and not params.ignore_eos:
        ids.append(params.eos_token_id)
    return ids


class StopWatch:
    """The ids that can end some running request, so that a step's ids are checked all at once."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._counts)

    def add(self, request: Request) -> None:
        """Watch the stop ids of a request that got a row."""
        self._counts.update(request.stop_ids)

    def remove(self, request: Request) -> None:
        """Stop watching the ids of a request that left its row."""
        for token in request.stop_ids:
            self._counts[token] -= 1
            if self._counts[token] == 0:
                del self._counts[token]

    def may_stop(self, token_ids: Iterable[int]) -> bool:
        """Whether one of these ids is watched."""
        return not self._counts.keys().isdisjoint(token_ids)


def _repeats(output: list[int], smallest: int, largest: int, count: int) -> bool:
    """Whether the output ends with `count` equal blocks of some pattern size."""
    for size in range(max(1, smallest), largest + 1):
        length = size * count
        if length > len(output):
            return False
        tail = output[-length:]
        if tail[size:] == tail[:-size]:
            return True
    return False
