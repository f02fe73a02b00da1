"""Random lives of the scheduler against the hash model: `python -m quire.testing.simulate --traces
1000000`.

A trace draws a configuration (tiny pools, one or more KV groups, either policy, depth 1 or 2) and
a crowd of requests built from a few distinct blocks in every order, and lets them arrive, be
aborted, extended, failed and preempted. After each step the invariants are checked; at its end
every request's ids are compared with the oracle's. A failure names the seed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from quire.params import RepetitionDetectionParams, SamplingParams
from quire.scheduling import invariants
from quire.scheduling.request import Reason, Request
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.scheduler_output import SchedulerOutput
from quire.scheduling.settings import Pause, SchedulerConfig
from quire.scheduling.step import StepResult
from quire.testing.hash_model import EOS, HashRunner, oracle
from quire.testing.traces import run_as_command

VOCAB_SIZE = 40


@dataclass(slots=True)
class Expectation:
    """What went into a request, and what came of it."""

    prompt: list[int]
    seed: int
    max_tokens: int
    stops_on_repetition: bool
    turns: list[list[int]] = field(default_factory=list)
    """Further inputs, each taken when the request stops."""
    output: list[int] = field(default_factory=list)
    reason: Reason | None = None
    is_cut: bool = False
    """Aborted or failed: what came must be a prefix of the right answer."""

    def answer(self, config: SchedulerConfig) -> tuple[list[int], Reason]:
        """The right output and ending, from the oracle alone."""
        prompt, output = self.prompt, list[int]()
        for turn in [*self.turns, None]:
            ids, reason = self._one_turn(prompt, config)
            output += ids
            if turn is not None:
                prompt = [*prompt, *ids[:-1], *turn]
                if len(prompt) >= config.max_model_len:
                    return output, Reason.ERROR
        return output, reason

    def _one_turn(self, prompt: list[int], config: SchedulerConfig) -> tuple[list[int], Reason]:
        limit = min(self.max_tokens, config.max_model_len - len(prompt))
        ids = oracle(
            prompt, seed=self.seed, num_tokens=limit, windows=config.windows, vocab_size=VOCAB_SIZE
        )
        for length in range(1, len(ids) + 1):
            if ids[length - 1] == EOS:
                return ids[:length], Reason.STOP
            if length == limit:
                return ids[:length], Reason.LENGTH
            tail = ids[:length]
            if self.stops_on_repetition and (
                tail[-1:] == tail[-2:-1] or (length >= 4 and tail[-2:] == tail[-4:-2])
            ):
                return tail, Reason.REPETITION
        raise AssertionError("the oracle stopped without a reason")


class Trace:
    """One random life, determined by `seed`."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.config = self._draw_config()
        self.depth = self.random.choice((1, 2))
        self.scheduler = Scheduler(self.config)
        self.runner = HashRunner(
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            windows=self.config.windows,
            vocab_size=VOCAB_SIZE,
        )
        self.results: deque[StepResult] = deque()
        self.expected: dict[int, Expectation] = {}
        self.open: set[int] = set()
        self.to_feed: dict[int, int] = {}
        """Resumable requests -> turns that are still to be sent before the end of their input."""
        size = self.config.block_size
        alphabet = [[self.random.randrange(1, 4) for _ in range(size)] for _ in range(3)]
        self.blocks = alphabet
        self.to_add = self.random.randrange(2, 9)
        self.num_added = 0
        self.chaos = self.random.choice((0.0, 0.03, 0.15))
        self.num_steps = 0

    def run(self) -> None:
        """Live to the end; AssertionError if anything is wrong."""
        while self.num_added < self.to_add or self.open:
            self._disturb()
            self._step()
            invariants.check(self.scheduler)
            assert self.num_steps < 5000, "no progress"
        while self.results:
            self._learn()
        invariants.check_idle(self.scheduler)
        for handle, expectation in self.expected.items():
            self._compare(handle, expectation)

    def _draw_config(self) -> SchedulerConfig:
        pick = self.random
        size = pick.choice((1, 2, 3, 4))
        windows = pick.choice(
            ((None,), (None,), (None, None), (None, 5), (None, 2), (3,), (None, 4, 7))
        )
        max_model_len = pick.randrange(12, 40)
        least = len(windows) * -(-max_model_len // size) + 1
        max_num_seqs = pick.choice((1, 2, 3, 8))
        chunked = pick.random() < 0.85
        tokens = max(max_num_seqs, pick.choice((1, 2, 3, 7, 16, 1000)))
        return SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens if chunked else max(tokens, max_model_len),
            max_model_len=max_model_len,
            block_size=size,
            num_blocks=least + 1 + pick.choice((0, 0, 1, 3, 10, 60)),
            windows=windows,
            policy=pick.choice(("fcfs", "priority")),
            enable_prefix_caching=pick.random() < 0.8,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=pick.choice((0, 0, 0, 2)),
        )

    # what happens

    def _disturb(self) -> None:
        pick = self.random
        while self.num_added < self.to_add and pick.random() < 0.4:
            self._add()
        if pick.random() < self.chaos and self.open:
            self._abort(pick.choice(sorted(self.open)))
        for handle in sorted(self.to_feed.keys() & self.open):
            if pick.random() < 0.2:
                self._feed(handle)
        if pick.random() < self.chaos:
            self.scheduler.reset_prefix_cache(reset_running_requests=pick.random() < 0.5)
        if pick.random() < self.chaos:
            self.scheduler.pause = pick.choice((Pause.NEW, Pause.ALL))
        elif self.scheduler.pause is not Pause.NONE and pick.random() < 0.5:
            self.scheduler.pause = Pause.NONE

    def _add(self) -> None:
        pick, handle = self.random, self.num_added
        self.num_added += 1
        prompt = [t for _ in range(pick.randrange(0, 6)) for t in pick.choice(self.blocks)]
        prompt += [pick.randrange(1, 4) for _ in range(pick.randrange(0, 3))] or [1]
        prompt = prompt[: self.config.max_model_len - 1]
        if self.expected and pick.random() < 0.3:
            prompt = list(self.expected[pick.randrange(handle)].prompt)  # n > 1, or a repeated call
        max_tokens = pick.choice((1, 2, 5, 30))
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        params.update_from_generation_config({}, EOS)
        if pick.random() < 0.1:
            params.repetition_detection = RepetitionDetectionParams(
                max_pattern_size=2, min_pattern_size=1, min_count=2
            )
        expectation = Expectation(
            prompt, pick.randrange(3), max_tokens, params.repetition_detection is not None
        )
        self.expected[handle] = expectation
        self.open.add(handle)
        request = Request(
            handle=handle,
            prompt_token_ids=list(prompt),
            params=params,
            seed=expectation.seed,
            priority=pick.randrange(3),
            arrival_time=float(self.num_steps),
            needs_host_ids=pick.random() < 0.15,
            resumable=pick.random() < 0.15,
        )
        self.scheduler.add(request)
        if request.resumable:
            self.to_feed[handle] = self.random.randrange(0, 3)

    def _feed(self, handle: int) -> None:
        """Send the next turn, or the end of the input."""
        if self.to_feed[handle] == 0:
            del self.to_feed[handle]
            ending = self.scheduler.extend(handle, [], resumable=False)
        else:
            self.to_feed[handle] -= 1
            turn = self.random.choice(self.blocks)[:2]
            self.expected[handle].turns.append(turn)
            ending = self.scheduler.extend(handle, turn, resumable=True)
        if ending is not None:
            self._collect(SchedulerOutput(finished=[ending]))

    def _abort(self, handle: int) -> None:
        assert self.scheduler.abort(handle)
        assert not self.scheduler.abort(handle), "a request ended twice"
        self.open.remove(handle)
        self.expected[handle].is_cut = True

    # one step

    def _step(self) -> None:
        self.num_steps += 1
        launched = False
        if len(self.results) < self.depth:
            plan = self.scheduler.schedule(float(self.num_steps))
            if plan is not None:
                invariants.check_plan(self.scheduler, plan)
                result = self.runner.execute(plan)
                if self.random.random() < self.chaos / 2:
                    row = self.random.choice([*plan.decode_rows, *(c.row for c in plan.chunks)])
                    result.errors = {row: "injected"}
                self.results.append(result)
                launched = True
        if self.results and (len(self.results) >= self.depth or not launched):
            self._learn()

    def _learn(self) -> None:
        out = self.scheduler.update(self.results.popleft(), float(self.num_steps))
        self._collect(out)

    def _collect(self, out: SchedulerOutput) -> None:
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            assert handle in self.open, "an id for a request that has ended"
            self.expected[handle].output.append(token)
        for ending in out.finished:
            self.open.remove(ending.handle)
            self.expected[ending.handle].reason = ending.reason
            self.expected[ending.handle].is_cut = ending.message == "injected"

    def _compare(self, handle: int, expectation: Expectation) -> None:
        right, reason = expectation.answer(self.config)
        got = expectation.output
        if expectation.is_cut:
            assert got == right[: len(got)], f"request {handle}: {got} is no prefix of {right}"
            return
        assert got == right, f"request {handle}: {got} instead of {right}"
        assert expectation.reason is reason, f"request {handle}: ended by {expectation.reason}"


def run_traces(first: int, count: int) -> None:
    """Run the traces with seeds first .. first+count-1. Raises AssertionError that names the first
    bad seed.
    """
    for seed in range(first, first + count):
        try:
            Trace(seed).run()
        except Exception as error:
            raise AssertionError(f"trace {seed} failed: {error}") from error


if __name__ == "__main__":
    run_as_command(run_traces, "simulate the scheduler against the hash model")
