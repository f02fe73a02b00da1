"""The balancer between cores over 64 simulated ones: how much of the prompts it sends to where they
are cached, how evenly it spreads the work, and what a decision costs.

    python -m benchmarks.balancer [--cores 64] [--requests 40000]

Conversations of several turns, on shared beginnings (system prompts), come at random; a core keeps
the blocks of its last tokens and forgets the oldest. Time is simulated: a request takes its core as
long as its tokens that are not cached, and its answer, take beside the others there. The same load
is sent round robin. Exits with 1 if less than 75 % of the prompts' tokens hit, or a core has 10 %
more or less to do than the mean.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
import time
import timeit
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.engine.client.load_balancer import LoadBalancer, load_of
from quire.engine.wire.messages import EngineCoreRequest, SchedulerStats
from quire.params import SamplingParams

BLOCK = 32
"""Tokens that a core caches or forgets at once."""
CACHE_BLOCKS = 60_000
SYSTEM_TOKENS, NUM_SYSTEMS = 512, 12
TURN_TOKENS, ANSWER_TOKENS = (64, 400), (64, 300)
PREFILL_S, TOKEN_S = 1 / 4000, 0.02
"""Seconds of a prompt's token, of a token of an answer."""
THINKING_S = 12.0
"""The mean time between an answer and the next turn."""


@dataclass
class Core:
    """A simulated core: its cached blocks, by the key of all tokens up to their end."""

    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)
    num_requests: int = 0
    work_s: float = 0.0

    def take(self, keys: list[int]) -> int:
        """Cache the blocks of a prompt; the number of those from its beginning that are there."""
        hits = next((i for i, key in enumerate(keys) if key not in self.cached), len(keys))
        for key in keys:
            self.cached[key] = None
            self.cached.move_to_end(key)
        while len(self.cached) > CACHE_BLOCKS:
            self.cached.popitem(last=False)
        return hits


@dataclass
class Outcome:
    """Of a run: the share of prompts' tokens that were cached, the least and the most work of a
    core relative to the mean, and the seconds of a decision.
    """

    hits: float
    least: float
    most: float
    decision_s: float


class Conversation:
    """Turns on a system prompt, each with all that came before."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        system = rng.randrange(NUM_SYSTEMS)
        self.ids = [system * 1000 + i for i in range(SYSTEM_TOKENS)]
        self.turns_left = rng.randint(1, 12)

    def speak(self) -> list[int]:
        """The prompt of the next turn."""
        self.turns_left -= 1
        self._extend(TURN_TOKENS)
        return list(self.ids)

    def hear(self) -> int:
        """Take an answer in; its length."""
        return self._extend(ANSWER_TOKENS)

    def _extend(self, bounds: tuple[int, int]) -> int:
        count = self._rng.randint(*bounds)
        self.ids += [self._rng.randrange(100_000, 200_000) for _ in range(count)]
        return count


def block_keys(ids: list[int]) -> list[int]:
    """A key for each whole block, of all tokens up to its end."""
    key, found = 0, []
    for start in range(0, len(ids) - BLOCK + 1, BLOCK):
        key = hash((key, *ids[start : start + BLOCK]))
        found.append(key)
    return found


def run(num_cores: int, num_requests: int, *, round_robin: bool, seed: int = 0) -> Outcome:
    """Send the load, half of which only fills the caches."""
    rng, balancer = random.Random(seed), LoadBalancer()
    cores = [Core() for _ in range(num_cores)]
    turns: Iterator[int] = itertools.cycle(range(num_cores))
    numbers = itertools.count()
    events: list[tuple[float, int, Conversation, int]] = []
    for _ in range(num_cores * 10):
        heapq.heappush(events, (rng.random() * THINKING_S, next(numbers), Conversation(rng), -1))
    hit = total = sent = 0
    decision_s = 0.0
    while sent < num_requests:
        now, _, conversation, busy = heapq.heappop(events)
        if busy >= 0:  # an answer has ended
            cores[busy].num_requests -= 1
            again = conversation if conversation.turns_left else Conversation(rng)
            due = now + rng.expovariate(1 / THINKING_S)
            heapq.heappush(events, (due, next(numbers), again, -1))
            continue
        ids = conversation.speak()
        if round_robin:
            index = next(turns)
        else:
            request = EngineCoreRequest(sent, ids, SamplingParams())
            began = time.perf_counter()
            loads = {
                each: load_of(core.num_requests, SchedulerStats())
                for each, core in enumerate(cores)
            }
            index = balancer.choose(request, loads)
            decision_s += time.perf_counter() - began
        core, keys = cores[index], block_keys(ids)
        num_cached = core.take(keys) * BLOCK
        num_answered = conversation.hear()
        core.take(block_keys(conversation.ids))
        seconds = (len(ids) - num_cached) * PREFILL_S + num_answered * TOKEN_S
        sent += 1
        if sent > num_requests // 2:
            hit, total = hit + num_cached, total + len(ids)
            core.work_s += seconds
        core.num_requests += 1
        heapq.heappush(events, (now + seconds, next(numbers), conversation, index))
    mean = sum(core.work_s for core in cores) / num_cores
    work = [core.work_s / mean for core in cores]
    return Outcome(hit / total, min(work), max(work), decision_s / num_requests)


def decision_s(num_cores: int, num_tokens: int = 2600) -> float:
    """The seconds of a decision for a prompt that is known, the least of many tries."""
    balancer, stats = LoadBalancer(), SchedulerStats()
    request = EngineCoreRequest(0, list(range(num_tokens)), SamplingParams())

    def choose() -> None:
        balancer.choose(request, {index: load_of(0, stats) for index in range(num_cores)})

    return min(timeit.repeat(choose, number=20, repeat=20)) / 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", type=int, default=64)
    parser.add_argument("--requests", type=int, default=40_000)
    args = parser.parse_args()
    print("| | prompt tokens cached | work of a core, mean 1 | a decision |")
    print("| --- | --- | --- | --- |")
    for name, round_robin in (("round robin", True), ("balancer", False)):
        found = run(args.cores, args.requests, round_robin=round_robin)
        cost = "" if round_robin else f"{found.decision_s * 1e6:.0f} us"
        print(f"| {name} | {found.hits:.1%} | {found.least:.2f} to {found.most:.2f} | {cost} |")
    for num_cores in (1, 8, args.cores):
        cost_s = decision_s(num_cores)
        print(f"A decision between {num_cores} cores: {cost_s * 1e6:.0f} us at best.")
    return 0 if found.hits >= 0.75 and found.least >= 0.9 and found.most <= 1.1 else 1


if __name__ == "__main__":
    sys.exit(main())
