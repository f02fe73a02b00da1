"""Bounds a step's prompts while streams wait, by a latency goal and the measured times of steps."""

from __future__ import annotations

import logging
import math

from quire.scheduling.scheduler_output import InFlightStep
from quire.step.plan import PromptAllowance

logger = logging.getLogger(__name__)

_RATE = 0.5
"""Share of the error that each step with prompts corrects."""
_USUAL_RATE = 0.25
"""The share of an error of usual size, and in steps that only decode. Such an error is noise rather
than a wrong coefficient, and correcting it adds its noise to that of the next step.
"""
_USUAL = 2.0
"""The largest error, in mean absolute deviations, that is usual."""
_SPAN = 4096.0
"""Positions that make one unit of attention: all coefficients are of one order of magnitude."""
_BASE_SHARE = 0.25
"""Weight of the base in correcting steps with prompts: it is learnt from those without any."""
_FIRST = 128.0
"""The most prompt tokens that a step next to streams gets before any prompt has been timed."""
_LATE = 1.2
"""Multiple of the goal that 99 of 100 steps are to stay below."""
_LATEST = 3.9
"""Distance of the 99th percentile from the middle in mean absolute deviations: ln 50, that of a
Laplace distribution. Tails of measured steps are no lighter; a normal distribution has 2.9.
"""
_AFTER_LATE = 0.95
"""Factor of the aim after a step that was late."""
_AFTER_TIMELY = 1.00025
"""Factor of the aim after a step in time: where 1 of 200 steps is late, the aim stays."""
_LOWEST = 0.6
"""The smallest factor of the aim, however many steps are late."""
_DEVIATION_RATE = 0.05
"""Share of the deviation's error that each step corrects."""
_LEAST_READING = 5.0
"""Shortest step with prompts, in readings of the weights: these take at most a fifth of it."""
_LEAST_PROMPTS = 2.0
"""Shortest step with prompts, in decoding steps, so that prompts get half of its time or more."""
_FORGETTING = 1.002
"""Growth per decoding step of the shortest time of one, so that a slower machine is noticed."""


class StepPace:
    """Learns what a step costs as

        seconds = base + per_token * tokens + per_pair * pairs

    where pairs are those of a prompt's token and a position that it attends to; `base` is what the
    decoding requests cost. The coefficients follow each step's error by normalised least mean
    squares (B. Widrow, S. Stearns: Adaptive Signal Processing, 1985, chapter 6), which corrects
    what the step was made of and needs no history.

    On a machine with other work steps of one size take more or less time. The pace learns by how
    much, and aims below the goal so that few of them are late. As delays are of many kinds, steps
    that are late nevertheless lower the aim, and it rises again slowly.

    Weights of which a reading takes more than a fifth of the time at which a step is late make the
    goal give way: their steps take five readings.
    """

    def __init__(self, goal_s: float) -> None:
        """goal_s: the longest time that a step should take while streams wait for it."""
        self._goal_s = goal_s
        self._read_at = -math.inf
        self._base_s = 0.0
        self._token_s: float | None = None
        """Seconds per token; None before the first prompt."""
        self._span_s = 0.0
        """Seconds per token and `_SPAN` positions."""
        self._shortest_s = 0.0
        """The shortest time of a step that only decodes; 0 before the first."""
        self._shortest_rows = 0
        self._deviation = 0.0
        """Mean absolute deviation of a step's time from the expected one, as a share of it."""
        self._caution = 1.0
        """The present factor of the aim, which late steps lower."""
        self._last_share: float | None = None
        """The last error as a share of the expected time."""
        self._has_told = False

    @property
    def allowance(self) -> PromptAllowance:
        """Bound on the prompts of the next step, if streams wait for it."""
        seconds = max(0.0, max(self._least_s(), self._aim_s()) - self._base_s)
        if self._token_s is None:
            # a prompt's token costs no more than a row that decodes, whose step reads the weights
            rows = seconds / self._shortest_s * self._shortest_rows if self._shortest_s else _FIRST
            return PromptAllowance(min(rows, _FIRST))
        return PromptAllowance(seconds / self._token_s, self._span_s / _SPAN / self._token_s)

    def _aim_s(self) -> float:
        """The time that steps are to take in the middle."""
        below = min(1.0, _LATE / (1.0 + _LATEST * self._deviation))
        return self._goal_s * below * self._caution

    def _least_s(self) -> float:
        """The shortest time of a step with prompts."""
        readings_s = self._readings_s()
        least_s = _LEAST_PROMPTS * self._shortest_s
        return max(least_s, readings_s) if readings_s > _LATE * self._goal_s else least_s

    def _readings_s(self) -> float:
        """The time of a step of which reading the weights takes a fifth."""
        # what a decoding step takes beyond its arithmetic, which prompts do not pay. All of it, if
        # the arithmetic is hidden by the reading or not: a step with prompts hides as much
        arithmetic_s = self._shortest_rows * (self._token_s or 0.0)
        return _LEAST_READING * max(0.0, self._shortest_s - arithmetic_s)

    def note(self, step: InFlightStep, now: float) -> None:
        """Note that the oldest step in flight has been read."""
        # steps overlap: a step's time begins when the one before it was read, if that was later
        # than its own plan
        seconds = now - max(step.planned_at, self._read_at)
        self._read_at = now
        chunks = step.chunks.values()
        tokens = float(sum(chunk.count for chunk in chunks))
        pairs = sum(chunk.count * (chunk.end - chunk.count / 2) for chunk in chunks)
        if not tokens:
            self._note_decoding(seconds, 0 if step.cohort is None else len(step.cohort.rows))
            return
        if step.cohort is not None:
            self._note_lateness(seconds)
        if self._token_s is None:
            # the base may come from a slower moment of the machine: at least half of the time is
            # taken for the tokens'
            self._token_s = max(seconds - self._base_s, seconds / 2) / tokens
        else:
            self._correct(tokens, pairs / _SPAN, seconds)
            self._tell_goal()

    def _note_lateness(self, seconds: float) -> None:
        if seconds > _LATE * max(self._goal_s, self._least_s()):
            self._caution = max(_LOWEST, _AFTER_LATE * self._caution)
        else:
            self._caution = min(1.0, _AFTER_TIMELY * self._caution)

    def _tell_goal(self) -> None:
        """Say once, when there are prompts, that the reading of the weights rules."""
        least = self._least_s()
        if least > self._goal_s and not self._has_told:
            self._has_told = True
            logger.info(
                "Steps that decode take %d ms, most of it for reading the weights or for many "
                "streams: beside streams, steps with prompts take %d ms, more than max_stall_ms=%d",
                *(1000 * self._shortest_s, 1000 * least, 1000 * self._goal_s),
            )

    def _note_decoding(self, seconds: float, num_rows: int) -> None:
        self._shortest_s *= _FORGETTING
        if not self._shortest_s or seconds < self._shortest_s:
            self._shortest_s, self._shortest_rows = seconds, num_rows
        # the machine itself may have paused, which must not stop prompts
        bounded = min(seconds, 2 * self._base_s) if self._base_s else seconds
        self._base_s += (_USUAL_RATE if self._base_s else 1.0) * (bounded - self._base_s)

    def _correct(self, tokens: float, spans: float, seconds: float) -> None:
        assert self._token_s is not None
        expected = self._base_s + self._token_s * tokens + self._span_s * spans
        error = min(seconds, 2 * expected) - expected
        usual = _USUAL * self._deviation * expected
        if expected:
            self._note_share(error / expected)
        base = _BASE_SHARE * tokens
        rate = _RATE if abs(error) > usual else _USUAL_RATE
        share = rate * error / math.fsum((base**2, tokens**2, spans**2))
        # a prompt's token costs something, whatever the noise says
        self._token_s = max(self._token_s + share * tokens, self._token_s / 2)
        self._span_s = max(0.0, self._span_s + share * spans)
        self._base_s = max(0.0, self._base_s + share * base)

    def _note_share(self, share: float) -> None:
        """Learn the deviation of errors between steps; what they share are the coefficients'."""
        if self._last_share is not None:
            apart = abs(share - self._last_share) / math.sqrt(2)
            self._deviation += _DEVIATION_RATE * (apart - self._deviation)
        self._last_share = share
