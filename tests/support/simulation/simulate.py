"""Random lives of the scheduler against the hash model: `python -m
tests.support.simulation.simulate --traces 1000000`.

A trace draws a configuration (tiny pools, KV groups of every kind, either policy, drafts or none,
depth 1, 2 or 4) and a crowd of requests built from a few distinct blocks in every order, and lets
them arrive, wait for something outside, be aborted, extended, failed and preempted. After each step
the invariants are checked; at its end every request's ids are compared with the oracle's. A failure
names the seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from quire.params import PoolingParams, RepetitionDetectionParams, SamplingParams
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.scheduling.adapter_slots import SlotAllocator
from quire.scheduling.block_groups import block_group
from quire.scheduling.request import Reason, Request, State
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.scheduler_output import SchedulerOutput
from quire.scheduling.settings import KVGroupSpec, Pause, SchedulerConfig
from quire.step.media import MediaItem
from quire.step.plan import PromptAllowance, StepPlan
from quire.step.result import StepResult
from tests.support.simulation import invariants
from tests.support.simulation.hash_model import EOS, WRONG, HashRow, HashRunner, oracle
from tests.support.simulation.hash_tier import HashTier
from tests.support.simulation.late_encoder import FailingEncoder, LateEncoder
from tests.support.simulation.scheduler_settings import scheduler_config
from tests.support.simulation.traces import run_as_command

VOCAB_SIZE = 40
FULL, STATE, NOTHING = KVGroupSpec(), KVGroupSpec("state"), KVGroupSpec("none")
SOURCE = KVGroupSpec("source")
MOST_SOURCE_ROWS = 5
GRAMMAR_END = 9
"""Output tokens that are a multiple of it complete the grammar of a simulated request."""


def _sliding(window: int) -> KVGroupSpec:
    return KVGroupSpec("sliding", window)


GROUPS: list[tuple[KVGroupSpec, ...]] = [
    (FULL,),
    (FULL,),
    (FULL, FULL),
    (FULL, _sliding(5)),
    (FULL, _sliding(2)),
    (_sliding(3),),
    (FULL, _sliding(4), _sliding(7)),
    (STATE,),
    (STATE,),
    (FULL, STATE),
    (FULL, STATE),
    (STATE, FULL, _sliding(4)),
    (NOTHING,),
]


class HostMemory:
    """Adapters whose weights are in host memory: the one that came first goes first, except those
    that the scheduler needs. Reading one takes a few steps of the trace.
    """

    def __init__(self, slots: SlotAllocator, capacity: int, pick: random.Random) -> None:
        self._slots = slots
        self._capacity = capacity
        self._random = pick
        self._reading: dict[int, int] = {}
        """Adapter -> steps until it is read."""
        self._read: set[int] = set()
        self.num_read_again = 0

    def step(self) -> None:
        """A step was planned: begin to read what it lacked, and finish what was read."""
        for number in self._slots.wanted:
            if number not in self._slots.kept:
                self._reading.setdefault(number, self._random.randrange(4))
        for number in list(self._reading):
            self._reading[number] -= 1
            if self._reading[number] < 0:
                del self._reading[number]
                self._keep(number)

    def _keep(self, number: int) -> None:
        self.num_read_again += number in self._read
        self._read.add(number)
        kept = self._slots.kept
        kept.add(number)
        spare = sorted(kept - self._slots.needed)
        while len(kept) > self._capacity and spare:
            kept.remove(spare.pop(self._random.randrange(len(spare))))
        assert len(kept) <= self._capacity, "more is needed than fits"


class Outside:
    """Something that is ready from a step of the trace on."""

    def __init__(self, step: int, clock: Callable[[], int]) -> None:
        self._step = step
        self._clock = clock

    @property
    def is_ready(self) -> bool:
        return self._clock() >= self._step

    def wait(self, timeout_s: float) -> None:
        raise AssertionError("the scheduler never blocks")


class EndingGrammar(Outside):
    """A grammar that a multiple of `GRAMMAR_END` completes, and that forbids nothing."""

    def has_ended(self, output_token_ids: Sequence[int]) -> bool:
        return output_token_ids[-1] % GRAMMAR_END == 0


@dataclass(slots=True)
class Expectation:
    """What went into a request, and what came of it."""

    prompt: list[int]
    seed: int
    max_tokens: int
    adapter: int
    stops_on_repetition: bool
    has_grammar: bool
    pools: bool = False
    """It draws no token, and ends with its prompt."""
    media: list[MediaItem] = field(default_factory=list)
    weights: int = 0
    """The number of the weights that it is computed with."""
    turns: list[list[int]] = field(default_factory=list)
    """Further inputs, each taken when the request stops."""
    output: list[int] = field(default_factory=list)
    reason: Reason | None = None
    is_cut: bool = False
    """Aborted or failed: what came must be a prefix of the right answer."""

    def answer(self, config: SchedulerConfig) -> tuple[list[int], Reason]:
        """The right output and ending, from the oracle alone."""
        prompt, output = self.prompt, list[int]()
        if self.pools:
            return output, Reason.STOP
        for turn in [*self.turns, None]:
            ids, reason = self._one_turn(prompt, config)
            output += ids
            if turn is not None:
                prompt = [*prompt, *ids[:-1], *turn]
                if len(prompt) >= config.max_len:
                    return output, Reason.ERROR
        return output, reason

    def _one_turn(self, prompt: list[int], config: SchedulerConfig) -> tuple[list[int], Reason]:
        limit = min(self.max_tokens, config.max_len - len(prompt))
        ids = oracle(
            prompt,
            seed=self.seed,
            num_tokens=limit,
            groups=config.groups,
            adapter=self.adapter,
            vocab_size=VOCAB_SIZE,
            weights=self.weights,
            media=self.media,
        )
        for length in range(1, len(ids) + 1):
            tail = ids[:length]
            if tail[-1] == EOS or (self.has_grammar and tail[-1] % GRAMMAR_END == 0):
                return tail, Reason.STOP
            if length == limit:
                return tail, Reason.LENGTH
            if self.stops_on_repetition and (
                tail[-1:] == tail[-2:-1] or (length >= 4 and tail[-2:] == tail[-4:-2])
            ):
                return tail, Reason.REPETITION
        raise AssertionError("the oracle stopped without a reason")


class Trace:
    """One random life, determined by `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        own = random.Random(f"{seed} source")
        self.has_source = own.random() < 0.2
        """Whether its model reads a second content of each request."""
        self.config = self._draw_config()
        self.depth = self.random.choice((1, 2)) if seed % 5 else 4
        steps = msgspec.structs.replace(self.config.steps, max_steps_in_flight=self.depth)
        self.config = msgspec.structs.replace(
            self.config, num_adapter_slots=self.random.choice((1, 2)), steps=steps
        )
        media = random.Random(f"{seed} media")
        self.config = self._with_encoders(self.config, media)
        encoder = LateEncoder if self.config.defers_encodings else FailingEncoder
        self.encoder = encoder(self.config.encoder_rows, media, self.depth)
        self.has_media = media.random() < 0.4
        self.runner = HashRunner(
            num_blocks=self.config.num_blocks,
            block_size=self.config.key_size,
            groups=self.config.groups,
            vocab_size=VOCAB_SIZE,
            drafter=self._draft if self.config.num_drafts else None,
            encoder=self.encoder,
        )
        own = random.Random(f"{seed} tier")
        self.tier = HashTier(self.runner, own) if own.random() < 0.6 else None
        self.scheduler = Scheduler(self.config, tier=self.tier)
        assert self.scheduler.adapters is not None
        self.slots = self.scheduler.adapters
        self.host = HostMemory(
            self.slots, self.slots.num_slots + seed % 2, random.Random(f"{seed} host")
        )
        self.undrafted: set[int] = set()
        """Seeds of requests for which nothing is ever drafted."""
        self.right_drafts = self.random.choice((0.0, 0.5, 0.9, 1.0))
        """How likely a draft is right."""
        self.results: deque[StepResult] = deque()
        self.slots_in_flight: deque[set[int]] = deque()
        """Of each step in flight, the slots of adapters that it uses."""
        self.expected: dict[int, Expectation] = {}
        self.open: set[int] = set()
        self.to_feed: dict[int, int] = {}
        """Resumable requests -> turns that are still to be sent before the end of their input."""
        size = self.config.key_size
        self.blocks = [[self.random.randrange(1, 4) for _ in range(size)] for _ in range(3)]
        self.to_add = self.random.randrange(2, 9)
        self.crowding = self.random.choice((0.4, 0.9))
        """How likely another request arrives before the next step."""
        if self.tier is not None:  # who comes later finds what earlier ones have stored
            self.to_add += own.randrange(8)
            self.crowding = own.choice((0.1, 0.4, 0.9))
        self.num_added = 0
        self.indivisible = self.random.choice((0.0, 0.1, 0.9))
        """How likely a prompt that fits into a step is indivisible."""
        self.chaos = self.random.choice((0.0, 0.03, 0.15))
        self.num_steps = 0
        self.num_accepted = 0
        self.num_snapshot_hits = 0
        self.num_snapshots_taken = 0
        self.num_waits = 0
        self.num_media = self.num_bidirectional = self.num_split_media = 0
        self.num_sources_written = self.num_sources_read = 0
        self.num_changes = 0
        """How often the weights changed."""
        self._own = random.Random(f"{seed} own")
        self.num_indivisible = 0
        self.num_whole_pools = 0

    def run(self) -> None:
        """Live to the end; AssertionError if anything is wrong."""
        while self.num_added < self.to_add or self.open:
            self._disturb()
            self._step()
            self.host.step()
            self._step_tier()
            self._step_encoder()
            invariants.check(self.scheduler)
            assert self.num_steps < 5000, "no progress"
        while self.results:
            self._update()
        while self.tier is not None and (self.tier.is_busy or self._begin_stores()):
            self._step_tier()
        while self.encoder.is_busy:
            self._step_encoder()
        invariants.check_idle(self.scheduler)
        self.slots.forget(self.slots.in_slots)
        assert not self.slots.in_slots, "adapter slots leaked"
        for handle, expectation in self.expected.items():
            self._compare(handle, expectation)

    def _draw_config(self) -> SchedulerConfig:
        pick = self.random
        size = pick.choice((1, 2, 3, 4))
        groups = pick.choice(GROUPS)
        if groups == (FULL, FULL) and pick.random() < 0.5:
            groups = (FULL, KVGroupSpec(block_size=2 * size))
        if groups == (FULL, STATE) and pick.random() < 0.5:
            groups = (KVGroupSpec(block_size=2 * size), STATE, STATE)
        self.has_source &= NOTHING not in groups
        if self.has_source:
            groups = (*groups, SOURCE) if self.seed % 2 else (SOURCE, *groups)
        max_len = pick.randrange(12, 40)
        num_drafts = pick.choice((0, 0, 1, 3))
        most = (block_group(spec, size, num_drafts) for spec in groups)
        least = sum(group.num_needed(max_len, max_len) for group in most) + 1
        least += -(-MOST_SOURCE_ROWS // size) if self.has_source else 0
        max_num_seqs = pick.choice((1, 2, 3, 8))
        ring = groups.count(STATE) * (num_drafts + 2)
        spare = (0, 1, ring, ring, ring, 10, 60) if ring else (0, 0, 1, 3, 10, 60)
        chunked = pick.random() < 0.85 and NOTHING not in groups
        tokens = max(max_num_seqs, pick.choice((1, 2, 3, 7, 16, 1000)))
        return scheduler_config(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=tokens if chunked else max(tokens, max_len),
            max_len=max_len,
            key_size=size,
            num_blocks=max(2, least + pick.choice(spare)),
            groups=groups,
            policy=pick.choice(("fcfs", "priority")),
            shares_blocks=pick.random() < 0.8,
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=pick.choice((0, 0, 0, 2)),
            num_drafts=num_drafts,
            snapshot_interval=pick.choice((1, 2 * size, 3 * size, 1000)),
            num_snapshot_blocks=pick.choice((None, None, None, 0, 1, 4)),
            max_adapter_passes=(0, 1, 3, 100)[self.seed % 4],
            max_drafts=pick.choice((None, None, 1, 4)),
        )

    def _with_encoders(self, config: SchedulerConfig, pick: random.Random) -> SchedulerConfig:
        """Encoders with room for a few items; for all where prompts are not cut."""
        is_cut = config.steps.enable_chunked_prefill and NOTHING not in config.groups
        source = MOST_SOURCE_ROWS if self.has_source else 0
        return msgspec.structs.replace(
            config,
            encoder_rows=source + pick.choice((5, 6, 9, 20)) if is_cut else 60,
            defers_encodings=pick.random() < 0.4,
        )

    def _draft(self, row: HashRow) -> list[int]:
        """Guesses of the row's next tokens: right ones up to a wrong one."""
        count = self.random.randint(0, self.config.num_drafts)
        right = oracle(
            row.tokens,
            seed=row.seed,
            num_tokens=count,
            groups=self.config.groups,
            adapter=row.adapter,
            vocab_size=VOCAB_SIZE,
            source=self.runner.source_of(row),
        )
        drafts = [token if self.random.random() < self.right_drafts else WRONG for token in right]
        return [] if row.seed in self.undrafted else drafts

    # what happens

    def _disturb(self) -> None:
        pick = self.random
        while self.num_added < self.to_add and pick.random() < self.crowding:
            self._add()
        if pick.random() < self.chaos and self.open:
            self._abort(pick.choice(sorted(self.open)))
        for handle in sorted(self.to_feed.keys() & self.open):
            if pick.random() < 0.2:
                self._feed(handle)
        if pick.random() < self.chaos:
            self.scheduler.reset_prefix_cache(reset_running_requests=pick.random() < 0.5)
        if self._own.random() < 0.1:
            self._change_weights()
        if self._own.random() < self.chaos:
            self.scheduler.reset_encoder_cache()
        if pick.random() < self.chaos:
            self.scheduler.pause = pick.choice((Pause.NEW, Pause.ALL))
        elif self.scheduler.pause is not Pause.NONE and pick.random() < 0.5:
            self.scheduler.pause = Pause.NONE

    def _add(self) -> None:
        pick, handle = self.random, self.num_added
        self.num_added += 1
        expectation = self._draw_expectation(handle)
        self.expected[handle] = expectation
        self.open.add(handle)
        request = self._request(handle, expectation)
        self.scheduler.add(request)
        if request.resumable:
            self.to_feed[handle] = pick.randrange(0, 3)

    def _draw_expectation(self, handle: int) -> Expectation:
        pick = self.random
        prompt = [t for _ in range(pick.randrange(0, 6)) for t in pick.choice(self.blocks)]
        prompt += [pick.randrange(1, 4) for _ in range(pick.randrange(0, 3))] or [1]
        prompt = prompt[: self.config.max_len - 1]
        has_state = STATE in self.config.groups
        if self.expected and pick.random() < (0.7 if has_state else 0.3):
            prompt = list(self.expected[pick.randrange(handle)].prompt)  # n > 1, or a repeated call
        return Expectation(
            prompt,
            seed=pick.randrange(3),
            max_tokens=1 if NOTHING in self.config.groups else pick.choice((1, 2, 5, 30)),
            adapter=pick.choice((0, 0, 0, 0, 0, 1) if has_state else (0, 0, 1, 2 + handle % 2)),
            stops_on_repetition=pick.random() < 0.1,
            has_grammar=pick.random() < 0.1,
            pools=self._pools(handle),
            media=self._media(handle, len(prompt)),
            weights=self.runner.weights,
        )

    def _media(self, handle: int, length: int) -> list[MediaItem]:
        """Items of a prompt, drawn by themselves as what pools; few contents and places, so that
        prompts share some of them.
        """
        pick = random.Random(f"{self.seed} {handle % 3} media")
        items: list[MediaItem] = []
        start = pick.randrange(3)
        while self.has_media and pick.random() < 0.75 and start < length:
            content, num_rows = pick.randrange(2), pick.randrange(1, 6)
            gap = pick.choice((0, 0, 1, 2)) if num_rows > 1 else 0
            end = start + num_rows + gap
            if end <= length:
                is_bidirectional = (
                    not gap
                    and num_rows <= self.config.steps.max_num_batched_tokens
                    and pick.random() < 0.4
                )
                places = [(start, end)]
                if gap:
                    border = start + num_rows // 2
                    places = [(start, border), (border + gap, end)]
                digest = bytes([content, num_rows])
                inputs = {"content": content * 10 + num_rows}
                items.append(MediaItem(digest, "image", num_rows, places, inputs, is_bidirectional))
            start = end + pick.randrange(3)
        if self.has_source:
            items.append(self._source(handle))
        self.num_media += len(items)
        self.num_bidirectional += sum(item.is_bidirectional for item in items)
        return items

    def _source(self, handle: int) -> MediaItem:
        """The second content of a request: one of a few."""
        pick = random.Random(f"{self.seed} {handle} source")
        content, num_rows = pick.randrange(3), pick.randrange(1, MOST_SOURCE_ROWS + 1)
        inputs = {"content": 1000 + content * 10 + num_rows}
        return MediaItem(b"source" + bytes([content, num_rows]), "image", num_rows, [], inputs)

    def _pools(self, handle: int) -> bool:
        """Drawn by itself, so that the rest of a trace does not depend on it."""
        share = 0.6 if NOTHING in self.config.groups else 0.1
        return random.Random(f"{self.seed} {handle}").random() < share

    def _request(self, handle: int, expectation: Expectation) -> Request:
        pick = self.random
        params = SamplingParams(max_tokens=expectation.max_tokens, temperature=0.0)
        params.update_from_generation_config({}, EOS)
        if expectation.stops_on_repetition:
            params.repetition_detection = RepetitionDetectionParams(
                max_pattern_size=2, min_pattern_size=1, min_count=2
            )
        longest = min(len(expectation.prompt) + expectation.max_tokens, self.config.max_len)
        fits = longest <= self.config.steps.max_num_batched_tokens
        is_indivisible = fits and (
            pick.random() < self.indivisible or NOTHING in self.config.groups
        )
        rows = {item.digest: item.num_rows for item in expectation.media}
        is_indivisible = is_indivisible and sum(rows.values()) <= self.config.encoder_rows
        self.num_indivisible += is_indivisible
        pools = expectation.pools
        request = Request(
            handle=handle,
            prompt_token_ids=list(expectation.prompt),
            params=PoolingParams(task="embed") if pools else params,
            seed=expectation.seed,
            priority=pick.randrange(3),
            arrival_time=float(self.num_steps),
            needs_host_ids=pick.random() < 0.15,
            resumable=not is_indivisible and pick.random() < 0.15 and not pools,
            grammar=None if pools or not expectation.has_grammar else self._grammar(),
            prerequisites=[Outside(*self._opening())] if pick.random() < 0.2 else [],
            adapter=expectation.adapter,
            is_indivisible=is_indivisible,
            media=expectation.media,
        )
        if pick.random() >= 0.9:
            self.undrafted.add(expectation.seed)
        return request

    def _grammar(self) -> EndingGrammar:
        return EndingGrammar(*self._opening())

    def _opening(self) -> tuple[int, Callable[[], int]]:
        """When something outside is ready, and by which clock."""
        self.num_waits += 1
        return self.num_steps + self.random.randrange(0, 6), lambda: self.num_steps

    def _feed(self, handle: int) -> None:
        """Send the next turn, or the end of the input."""
        if self.to_feed[handle] == 0:
            del self.to_feed[handle]
            finished = self.scheduler.extend(handle, [], resumable=False)
        else:
            self.to_feed[handle] -= 1
            turn = self.random.choice(self.blocks)[:2]
            self.expected[handle].turns.append(turn)
            finished = self.scheduler.extend(handle, turn, resumable=True)
        if finished is not None:
            self._collect(SchedulerOutput(finished=[finished]))

    def _abort(self, handle: int) -> None:
        assert self.scheduler.abort(handle)
        assert not self.scheduler.abort(handle), "a request ended twice"
        self.open.remove(handle)
        self.expected[handle].is_cut = True

    def _change_weights(self) -> None:
        """Change the model's weights where nobody has begun, so that the oracle knows what is
        computed with which.
        """
        if self.scheduler.running or self.results:
            return
        if any(self.expected[handle].output or self.expected[handle].turns for handle in self.open):
            return
        self.num_changes += 1
        self.runner.weights += 1
        self.scheduler.change_weights()
        for handle in self.open:
            self.expected[handle].weights = self.runner.weights

    def _begin_stores(self) -> bool:
        """Whether what became findable last has still to be stored."""
        plan = self.scheduler.schedule(float(self.num_steps))
        if plan is None:
            return False
        self.results.append(self._execute(plan))
        self.slots_in_flight.append(set())
        self._update()
        return True

    def _step_tier(self) -> None:
        if self.tier is None:
            return
        self.scheduler.end_transfers(*self.tier.step())
        if self._own.random() < self.tier.pressure:
            # others need all free blocks for a moment: what was cached is only in the tier now
            pool = self.scheduler.memory.pool
            pool.release(pool.allocate(pool.num_free) or [])

    def _step_encoder(self) -> None:
        self._collect(self.scheduler.end_encodings(*self.encoder.step()))

    # one step

    def _step(self) -> None:
        self.num_steps += 1
        launched = False
        if len(self.results) < self.depth:
            protected = [r for r in self.scheduler.running.values() if _is_in_prompt(r)]
            plan = self.scheduler.schedule(float(self.num_steps), self._allowance())
            assert all(r.row >= 0 for r in protected), "an indivisible prompt was preempted"
            if plan is not None:
                self._check_plan(plan)
                self.results.append(self._execute(plan))
                launched = True
        if self.results and (len(self.results) >= self.depth or not launched):
            self._update()

    def _allowance(self) -> PromptAllowance | None:
        """Drawn by itself, as what pools."""
        pick = random.Random(f"{self.seed} at {self.num_steps}")
        if self.seed % 3:
            return None
        return PromptAllowance(pick.choice((0.0, 1.0, 5.0, 40.0)), pick.choice((0.0, 0.1, 2.0)))

    def _check_plan(self, plan: StepPlan) -> None:
        invariants.check_plan(self.scheduler, plan)
        self._check_loads(plan)
        for new in plan.added:
            prerequisites = self.scheduler.running[new.row].prerequisites
            assert all(p.is_ready for p in prerequisites), "a request did not wait"
            if new.source is not None:
                self.num_sources_read += new.source.is_written
                self.num_sources_written += not new.source.is_written
            has_state = STATE in self.config.groups
            is_hit = has_state and new.num_computed_tokens > 0
            self.num_snapshot_hits += is_hit
            self.num_snapshots_taken += is_hit and self.scheduler.running[new.row].takes_snapshot
        for chunk in plan.chunks:
            request = self.scheduler.running[chunk.row]
            end = request.num_computed_tokens
            self.num_split_media += any(item.start < end < item.end for item in request.media)
            if request.is_indivisible and not request.generates:
                found = request.num_hit_tokens
                assert chunk.num_tokens == request.num_prompt_tokens - found, "a prompt was cut"
                assert not chunk.samples, "a pooled prompt draws no token"
                self.num_whole_pools += 1
            if self.config.groups == (NOTHING,):
                assert not any(request.block_ids), "blocks for layers that keep nothing"

    def _check_loads(self, plan: StepPlan) -> None:
        """No step in flight uses a slot that the plan fills, and the weights are there."""
        loaded = dict(plan.adapter_loads)
        assert len(loaded) == len(plan.adapter_loads), "a slot is filled twice"
        assert self.slots.kept.issuperset(loaded.values()), "weights are not in host memory"
        assert not loaded.keys() & {slot for used in self.slots_in_flight for slot in used}
        rows = {*plan.decode_rows, *(chunk.row for chunk in plan.chunks)}
        self.slots_in_flight.append({self.scheduler.running[row].adapter_slot for row in rows})

    def _execute(self, plan: StepPlan) -> StepResult:
        if self.seed % 2:  # as to a worker in another process
            plan = MessageDecoder(StepPlan).decode(MessageEncoder().encode(plan))
        result = self.runner.execute(plan)
        if self.tier is not None:
            self.tier.begin(plan)
        if self.seed % 2:
            result = MessageDecoder(StepResult).decode(MessageEncoder().encode(result))
        self.num_accepted += len(result.token_ids) - len(plan.sampled_rows)
        if self.random.random() < self.chaos / 2:
            rows = [*plan.decode_rows, *(c.row for c in plan.chunks)]
            if rows:
                result.errors[self.random.choice(rows)] = "injected"
        return result

    def _update(self) -> None:
        self.slots_in_flight.popleft()
        out = self.scheduler.update(self.results.popleft(), float(self.num_steps))
        self._collect(out)

    def _collect(self, out: SchedulerOutput) -> None:
        counts = out.counts or [1] * len(out.handles)
        token_ids = iter(out.token_ids)
        for handle, count in zip(out.handles, counts, strict=True):
            assert handle in self.open, "an id for a request that has ended"
            self.expected[handle].output += [next(token_ids) for _ in range(count)]
        assert not list(token_ids), "ids of no request"
        for end in out.finished:
            self.open.remove(end.handle)
            self.expected[end.handle].reason = end.reason
            self.expected[end.handle].is_cut = end.message == "injected"

    def _compare(self, handle: int, expectation: Expectation) -> None:
        right, reason = expectation.answer(self.config)
        got = expectation.output
        if expectation.is_cut:
            assert got == right[: len(got)], f"request {handle}: {got} is not a prefix of {right}"
            return
        assert got == right, f"request {handle}: {got} instead of {right}"
        assert expectation.reason is reason, f"request {handle}: ended by {expectation.reason}"


def _is_in_prompt(request: Request) -> bool:
    """Does the request have an indivisible prompt in a step in flight?"""
    is_running = request.state is State.RUNNING
    return request.is_indivisible and is_running and not request.is_decoding


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
