"""Random lives of supervised cores in virtual time: `python -m
tests.support.simulation.simulate_faults --traces 100000`.

A trace has one or two cores over the hash model, behind wires that delay, lose and repeat messages,
and a supervisor. Requests arrive, are aborted, poison the steps that they are in or the core that
takes them in, cannot be decoded; cores are killed or stop. At the end every request must have got
its ids, once and in order, or have ended for a reason of its own. A failure names the seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
import numpy as np

from quire.engine.client.client import CoreStatus
from quire.engine.client.kept_media import MOST_BYTES, KeptMedia
from quire.engine.client.pending_calls import PendingCalls
from quire.engine.client.remote_cores import RemoteCores
from quire.engine.client.supervisor import MEDIA_NOT_KEPT, Supervisor
from quire.engine.control_verbs import perform
from quire.engine.core.core import EngineCore
from quire.engine.core.features.plain_features import plain_features
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.delivery_monitor import Overdue
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, UtilityOutput
from quire.engine.wire.output_parts import Finished, FinishReason
from quire.engine.wire.prompt_media import PromptMedia
from quire.errors import EngineDeadError, EngineError
from quire.executor.worker_config import MediaFacts
from quire.params import RequestParams, SamplingParams
from quire.processes.codec import FrameOrder, LostFrames
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import KVGroupSpec
from quire.step.columns import RunnerOutput
from quire.step.media import MediaItem
from quire.step.plan import StepPlan
from tests.support.simulation import invariants
from tests.support.simulation.hash_model import EOS, HashEncoder, HashRunner, oracle
from tests.support.simulation.scheduler_settings import scheduler_config
from tests.support.simulation.traces import run_as_command

T = TypeVar("T")

VOCAB_SIZE = 40
BEAT_S = 2.0
SILENT_S = 7.0
PATIENCE_S = 5.0
MAX_RESTARTS = 6
ENCODER_ROWS = 9
MOST_REFUSED = 2
"""Starts in a row for which the system has no room: after more of them a core is given up."""
TURNS = 40
"""How many things happen before the trace goes on without an output."""


class Clock:
    """Virtual time: what is to happen, in its order."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def read(self) -> float:
        """Seconds."""
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        """`what` happens at this time."""
        heapq.heappush(self._events, (when, next(self._numbers), what))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """`what` happens so much later."""
        self.at(self.now + delay_s, what)

    def turn(self) -> None:
        """Let the next thing happen."""
        self.now, _, what = heapq.heappop(self._events)
        what()


class Wire:
    """Carries numbered messages in order, each after a delay; some are lost, some come twice."""

    def __init__(self, world: World, deliver: Callable[[int, Any], None]) -> None:
        self._world = world
        self._deliver = deliver
        self._latest = 0.0
        self.num_sent = 0

    def send(self, message: Any) -> None:
        """Send on; arrives within half a second, or never."""
        world, self.num_sent = self._world, self.num_sent + 1
        number = self.num_sent
        self._latest = max(self._latest, world.clock.now + world.random.random() * 0.5)
        for _ in range(world.fate()):
            world.clock.at(self._latest, lambda: self._deliver(number, message))


class Crash(BaseException):
    """A process ends inside a step: nothing in it catches that."""


class HashStep:
    """A launched step of the hash model."""

    def __init__(self, runner: HashRunner, plan: StepPlan) -> None:
        self._output = RunnerOutput(runner.execute(plan))

    def sample(self, mask: Any = None) -> None:
        """It has."""

    def result(self) -> RunnerOutput:
        return self._output


class HashExecutor:
    """Runs plans on the hash model; `before` is called with each of them."""

    def __init__(self, runner: HashRunner, before: Callable[[StepPlan], None]) -> None:
        self._runner = runner
        self._before = before

    def launch(self, plan: StepPlan) -> HashStep:
        self._before(plan)
        return HashStep(self._runner, plan)

    def needs_host_ids(self, params: RequestParams) -> bool:
        return False

    def collective_rpc(self, method: Any, args: Any, kwargs: Any) -> list[Any]:
        """There are no workers to call."""
        return []

    def shutdown(self) -> None:
        """Nothing to give back."""


class Life:
    """One life of a core process."""

    def __init__(self, world: World, cores: SimulatedCores, index: int, number: int) -> None:
        self.world = world
        self.number = number
        self.is_running = True
        self.is_stopped = False
        self.board: Collection[int] | None = ()
        self.intake: int | None = None
        self.inputs = FrameOrder()
        self.wire = Wire(world, lambda n, message: cores.arrive(self, index, n, message))
        self._cores, self._index = cores, index
        self._is_turning = False
        config = world.config
        runner = HashRunner(
            num_blocks=config.num_blocks,
            block_size=config.key_size,
            groups=config.groups,
            vocab_size=VOCAB_SIZE,
            encoder=HashEncoder(config.encoder_rows),
        )
        executor = HashExecutor(runner, self._poison)
        scheduler = Scheduler(config)
        self.core = EngineCore(
            scheduler,
            executor,
            depth=world.depth,
            log_stats=False,
            clock=world.clock.read,
            features=plain_features(scheduler, MediaFacts(("image",), config.encoder_rows)),
        )
        self.core.on_launch = self._note_step
        self._beat()

    def take(self, number: int, message: Callable[[Life], None]) -> None:
        """A message has come from the front end."""
        if not self.is_running or self.is_stopped:
            return
        try:
            if self.inputs.accept(number):
                message(self)
        except (LostFrames, Crash):
            self.end()
            return
        self._go_on()

    def take_in(self, request: EngineCoreRequest) -> None:
        """Decode a request and give it to the core."""
        handle = self.intake = request.handle
        if handle in self.world.unreadable:
            self.wire.send(EngineCoreOutputs(finished=[Finished(handle, FinishReason.ERROR)]))
        else:
            poison = self.world.poison.get(handle)
            if poison is not None and poison.at_intake:
                raise Crash
            self.core.take_in(request)
        self.intake = None

    def end(self) -> None:
        """The process ends; the front end learns of it a little later."""
        if self.is_running:
            self.is_running = False
            self.world.clock.after(
                self.world.random.random() * 0.3, lambda: self._cores.bury(self, self._index)
            )

    def perform(self, call_id: int, call: Utility[Any]) -> None:
        """Serve a control call and answer."""
        answer = perform(self.core, call.method, call.args)
        if isinstance(answer, Future):
            answer.add_done_callback(lambda future: self.wire.send((call_id, future.result())))
        else:
            self.wire.send((call_id, answer))

    def _go_on(self) -> None:
        if not self._is_turning and self.core.has_work:
            self._is_turning = True
            self.world.clock.after(0.01 + self.world.random.random() * 0.1, self._turn)

    def _turn(self) -> None:
        self._is_turning = False
        if not self.is_running or self.is_stopped:
            return
        try:
            outputs = self.core.step()
        except Crash:
            self.end()
            return
        if self.world.random.random() < 0.1:
            invariants.check(self.core.scheduler)
        if outputs.handles or outputs.finished:
            self.wire.send(outputs)
        self._go_on()

    def _note_step(self, handles: Collection[int]) -> None:
        self.board = None if self.world.random.random() < 0.02 else list(handles)

    def _poison(self, plan: StepPlan) -> None:
        scheduler = self.core.scheduler
        for row in [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]:
            request = scheduler.running.get(row)
            poison = None if request is None else self.world.poison.get(request.handle)
            if request is not None and poison is not None:
                is_due = len(request.output_token_ids) >= poison.at_output
                if is_due and (row in plan.decode_rows or not poison.decodes):
                    raise Crash

    def _beat(self) -> None:
        if self.is_running and not self.is_stopped:
            counts = self.wire.num_sent, self.inputs.num_taken
            delay_s = self.world.random.random() * 0.5
            self.world.clock.after(delay_s, lambda: self._cores.hear(self, self._index, *counts))
            self.world.clock.after(BEAT_S, self._beat)


@dataclass(slots=True)
class Link:
    """What the front end knows of a core's present life."""

    life: Life
    wire: Wire
    order: FrameOrder = field(default_factory=FrameOrder)
    heard_at: float = 0.0
    outgoing: Overdue = field(default_factory=lambda: Overdue(PATIENCE_S))
    incoming: Overdue = field(default_factory=lambda: Overdue(PATIENCE_S))
    is_dead: bool = False


class SimulatedCores:
    """The simulated cores as a supervisor sees them: they stand for `RemoteCores`."""

    def __init__(self, world: World, num_cores: int) -> None:
        self.world = world
        self.links: dict[int, Link] = {}
        self.lives: list[Life] = []
        self.events: deque[EngineCoreOutputs | EngineError] = deque()
        self._owners: dict[int, int] = {}
        self._refused: Counter[int] = Counter()
        """How often in a row each core's start was refused."""
        self._calls = PendingCalls()
        self.next_check_s = BEAT_S
        for index in range(num_cores):
            self._begin(index)
        world.clock.after(BEAT_S, self._tick)

    # what a supervisor calls

    @property
    def engine_indices(self) -> Sequence[int]:
        return list(self.links)

    def assign(self, request: EngineCoreRequest) -> int:
        """Any live core."""
        live = [index for index, link in self.links.items() if not link.is_dead]
        if not live:
            raise EngineDeadError("No engine core is left.")
        if request.handle not in self._owners:
            pinned = request.data_parallel_rank
            index = self.world.random.choice(live) if pinned is None else pinned
            self._owners[request.handle] = index
        return self._owners[request.handle]

    def payload_of(self, request: EngineCoreRequest) -> list[Any]:
        """Nothing: what is sent is the object."""
        return []

    def send_request(self, request: EngineCoreRequest, payload: list[Any]) -> None:
        """Send a copy, as a wire does."""
        index = self.assign(request)
        self.links[index].wire.send(lambda life: life.take_in(request))

    def abort_requests(self, handles: Sequence[int]) -> None:
        """Send it to the owners."""
        for handle in handles:
            index = self._owners.pop(handle, None)
            if index is not None:
                self.links[index].wire.send(lambda life, h=handle: life.core.abort_requests([h]))

    def engine_of(self, handle: int) -> int | None:
        return self._owners.get(handle)

    def is_dead(self, engine_index: int) -> bool:
        """As far as the front end knows."""
        return self.links[engine_index].is_dead

    def core_status(self, engine_index: int) -> CoreStatus:
        """Of a core that has run."""
        return CoreStatus(engine_index, 1, pid=0, is_running=True, is_started=True)

    def dying_step(self, engine_index: int) -> Collection[int] | None:
        """What is on its board."""
        life = self.links[engine_index].life
        if life.board is None:
            return None
        return [*life.board] if life.intake is None else [*life.board, life.intake]

    def restart_core(self, engine_index: int, first: Sequence[Utility[Any]] = ()) -> None:
        """A new life, with a new wire; sometimes the system has no room for one."""
        assert self.links[engine_index].is_dead, "a core that lives is not restarted"
        has_no_room = self.world.random.random() < self.world.no_room
        if has_no_room and self._refused[engine_index] < MOST_REFUSED:
            self._refused[engine_index] += 1
            raise OSError("no room for a process")
        self._refused[engine_index] = 0
        for handle in [h for h, owner in self._owners.items() if owner == engine_index]:
            del self._owners[handle]
        self._begin(engine_index)
        for call in first:
            self.links[engine_index].wire.send(lambda life, c=call: life.perform(-1, c))

    @property
    def is_idle(self) -> bool:
        """Nobody asks in virtual time."""
        return False

    def take(self) -> None:
        """What has arrived is taken already."""

    def next_output(self) -> EngineCoreOutputs | None:
        """What has come next; raises the error of a core that has died."""
        if not self.events:
            return None
        event = self.events.popleft()
        if isinstance(event, EngineError):
            raise event
        for end in event.finished:
            self._owners.pop(end.handle, None)
        return event

    def begin_call(self, utility: Utility[T]) -> Future[T]:
        """Call all live cores."""
        asked = {index for index, link in self.links.items() if not link.is_dead}
        if not asked:
            raise EngineDeadError("No engine core is left.")
        call_id, future = self._calls.begin(utility, asked)
        for index in asked:
            self.links[index].wire.send(lambda life: life.perform(call_id, utility))
        return future

    # what comes

    def arrive(self, life: Life, index: int, number: int, message: Any) -> None:
        """A message of a life, perhaps an earlier one."""
        link = self.links[index]
        if link.life is not life or link.is_dead:
            return
        try:
            if not link.order.accept(number):
                return
        except LostFrames:
            life.end()
            return
        if isinstance(message, EngineCoreOutputs):
            message.engine_index = index
            self.events.append(message)
        else:
            call_id, answer = message
            self._calls.answer(index, UtilityOutput(call_id, None, answer))

    def hear(self, life: Life, index: int, num_sent: int, num_taken: int) -> None:
        """A sign of life."""
        link, now = self.links[index], self.world.clock.now
        if link.life is not life or link.is_dead:
            return
        link.heard_at = now
        try:
            link.incoming.check(num_sent, link.order.num_taken, now)
            link.outgoing.check(link.wire.num_sent, num_taken, now)
        except LostFrames:
            life.end()

    def bury(self, life: Life, index: int) -> None:
        """A life is known to be over."""
        link = self.links[index]
        assert link.life is life, "a life ends once"
        link.is_dead = True
        error = EngineDeadError("It died.", engine_index=index)
        self.events.append(error)
        self._calls.fail(index, error)

    def _begin(self, index: int) -> None:
        number = len(self.lives)
        life = Life(self.world, self, index, number)
        self.lives.append(life)
        now = self.world.clock.now
        self.links[index] = Link(life, Wire(self.world, life.take), heard_at=now)

    def _tick(self) -> None:
        for link in self.links.values():
            if not link.is_dead and self.world.clock.now - link.heard_at > SILENT_S:
                link.life.end()
        self.world.clock.after(BEAT_S, self._tick)


@dataclass(slots=True)
class Poison:
    """The core dies of a step with this request as soon as it has so many ids; `decodes`: only of
    one that computes a single token of it; `at_intake`: already when it gets the request.
    """

    at_output: int
    decodes: bool
    at_intake: bool = False


class LateSource:
    """Makes the inputs of an item again, a little later."""

    nbytes = 4

    def __init__(self, world: World, inputs: dict[str, Any]) -> None:
        self._world = world
        self._inputs = inputs

    def make_inputs(self) -> Future[dict[str, Any]]:
        """They come within half a second."""
        self._world.num_remade += 1
        made: Future[dict[str, Any]] = Future()
        delay_s = self._world.own.random() * 0.5
        self._world.clock.after(delay_s, lambda: made.set_result(self._inputs))
        return made


@dataclass(slots=True)
class Story:
    """A request, and what came of it."""

    request: EngineCoreRequest
    output: list[int] = field(default_factory=list)
    end: Finished | None = None
    is_aborted: bool = False


class World:
    """One trace, determined by `seed`."""

    def __init__(self, seed: int) -> None:
        pick = self.random = random.Random(seed)
        self.clock = Clock()
        self.depth = pick.choice((1, 2))
        if seed % 5 == 0:
            self.depth = 4
        self.config = scheduler_config(
            max_num_seqs=pick.choice((2, 4, 8)),
            max_num_batched_tokens=pick.choice((8, 16, 64)),
            max_len=32,
            key_size=pick.choice((2, 4)),
            num_blocks=pick.choice((20, 40)),
            encoder_rows=ENCODER_ROWS,
        )
        self.own = random.Random(f"{seed} media")
        self.has_source = seed % 7 == 3
        """Whether the model reads a second content of each request."""
        if self.has_source:
            groups = (KVGroupSpec(), KVGroupSpec("source"))
            self.config = msgspec.structs.replace(self.config, groups=groups, encoder_rows=14)
        self.num_remade = 0
        media = KeptMedia(self.own.choice((MOST_BYTES, MOST_BYTES, 5)))
        self.loss = pick.choice((0.0, 0.0, 0.0, 0.01))
        self.repeats = pick.choice((0.0, 0.1))
        self.no_room = pick.choice((0.0, 0.0, 0.2))
        self.poison: dict[int, Poison] = {}
        self.unreadable: set[int] = set()
        self.stories: dict[int, Story] = {}
        self.num_kills = 0
        self.num_left = pick.randrange(2, 7)
        self.most_kills = pick.choice((0, 1, 1, 3))
        self.most_poison = pick.choice((0, 0, 1, 1, 2))
        self.cores = SimulatedCores(self, pick.choice((1, 1, 2)))
        self.supervisor = Supervisor(
            cast(RemoteCores, self.cores),
            max_restarts=MAX_RESTARTS,
            clock=self.clock.read,
            media=media,
        )
        self.is_paused = False

    def fate(self) -> int:
        """How often a message arrives."""
        if self.loss and self.random.random() < self.loss:
            return 0
        return 2 if self.random.random() < self.repeats else 1

    def run(self) -> None:
        """Live to the end; AssertionError if anything is wrong."""
        num_turns = 0
        while self.num_left or any(story.end is None for story in self.stories.values()):
            self._disturb()
            self._collect(self._output())
            num_turns += 1
            assert num_turns < 500, "no progress"
        for handle, story in self.stories.items():
            self._compare(handle, story)
        assert not any(len(j) for j in self.supervisor._journals.values()), "a request was kept"
        assert not self.supervisor._media.num_bytes, "media were kept"

    def met(self) -> Counter[str]:
        """How often what has happened."""
        met = Counter(str(story.end.reason) for story in self.stories.values() if story.end)
        met["kills"], met["restarts"] = self.num_kills, self.supervisor.num_restarts
        met["two cores"], met["depth 2"] = len(self.cores.links) == 2, self.depth == 2
        met["depth 4"] = self.depth == 4
        met["losses"], met["repeats"] = self.loss > 0, self.repeats > 0
        met["unreadable"] = len(self.unreadable)
        met["poison at intake"] = sum(poison.at_intake for poison in self.poison.values())
        met["media"] = sum(story.request.media is not None for story in self.stories.values())
        met["sources"] = len(self.stories) if self.has_source else 0
        met["media made again"] = self.num_remade
        met["media not kept"] = sum(
            story.end is not None and story.end.message == MEDIA_NOT_KEPT
            for story in self.stories.values()
        )
        met["innocents blamed"] = sum(
            story.end is not None
            and story.end.reason is FinishReason.ERROR
            and story.end.message != MEDIA_NOT_KEPT
            for handle, story in self.stories.items()
            if handle not in self.poison and handle not in self.unreadable
        )
        return met

    @property
    def is_calm(self) -> bool:
        """Is there so little going on that no chance can look like guilt?"""
        return self.loss == 0 and self.num_kills + len(self.poison) <= 1

    def _disturb(self) -> None:
        pick = self.random
        while self.num_left and pick.random() < 0.3:
            self.num_left -= 1
            self._add()
        open_ = [h for h, story in self.stories.items() if story.end is None]
        likely = 0.2 if self.is_paused else 0.05
        if open_ and pick.random() < 0.01:
            self._abort(pick.choice(open_))
        if self.stories and self.num_kills < self.most_kills and pick.random() < likely:
            self.num_kills += 1
            life = pick.choice(self.cores.lives[-2:])
            if pick.random() < 0.3:
                life.is_stopped = True
            else:
                life.end()
        if self.is_paused != (pick.random() < (0.2 if self.is_paused else 0.01)):
            self.is_paused = not self.is_paused
            call: Utility[None] = (
                Utility("pause_scheduler", ("keep", False))
                if self.is_paused
                else Utility("resume_scheduler")
            )
            self._call(call)
        if pick.random() < (0.2 if self.is_paused else 0.02):
            assert self._call(Utility("is_scheduler_paused")) is self.is_paused

    def _output(self) -> EngineCoreOutputs:
        """What comes next, or nothing when it does not come for a while."""
        for _ in range(TURNS):
            self.supervisor.take()
            outputs = self.supervisor.next_output()
            if outputs is not None:
                return outputs
            self.clock.turn()
        return EngineCoreOutputs()

    def _call(self, utility: Utility[T]) -> T:
        future = self.supervisor.begin_call(utility)
        until = self.clock.now + 60
        while not future.done():
            assert self.clock.now < until, "no answer"
            self.clock.turn()
            self.supervisor.take()
        return future.result()

    def _add(self) -> None:
        pick, handle = self.random, len(self.stories) + 1
        prompt = [pick.randrange(1, 4) for _ in range(pick.choice((1, 3, 8, 14)))]
        params = SamplingParams(temperature=0.0, max_tokens=pick.choice((1, 3, 6, 12)))
        params.update_from_generation_config({}, EOS)
        request = EngineCoreRequest(handle, prompt, params, seed=pick.randrange(9), arrival_time=0)
        request.media = self._media(len(prompt))
        if len(self.poison) < self.most_poison and pick.random() < 0.3:
            is_eager = pick.random() < 0.2
            self.poison[handle] = Poison(
                0 if is_eager else pick.choice((0, 0, 1, 4)), pick.random() < 0.3, is_eager
            )
        elif pick.random() < 0.05:
            self.unreadable.add(handle)
        self.stories[handle] = Story(request)
        self.supervisor.add_request(request)

    def _media(self, length: int) -> PromptMedia | None:
        """Of every third prompt; each second item has a source."""
        pick, start = self.own, 0
        items, sources = list[MediaItem](), dict[bytes, Any]()
        while pick.random() < 0.4 and start < length:
            num_rows, content = min(pick.randrange(1, 6), length - start), pick.randrange(3)
            digest, inputs = bytes([content, num_rows]), {"content": np.array(content)}
            items.append(MediaItem(digest, "image", num_rows, [(start, start + num_rows)], inputs))
            if pick.random() < 0.5:
                sources[digest] = LateSource(self, inputs)
            start += num_rows
        if self.has_source:
            num_rows, content = pick.randrange(1, 6), pick.randrange(3)
            digest, inputs = b"s%d %d" % (content, num_rows), {"content": np.array(9 + content)}
            items.append(MediaItem(digest, "image", num_rows, [], inputs))
        return PromptMedia(items, sources=sources) if items else None

    def _abort(self, handle: int) -> None:
        story = self.stories[handle]
        story.is_aborted = True
        story.end = Finished(handle, FinishReason.ABORT)
        self.supervisor.abort_requests([handle])

    def _collect(self, outputs: EngineCoreOutputs) -> None:
        ends = {end.handle: end for end in outputs.finished}
        for one in outputs:
            handle = int(one.request_id)
            story = self.stories[handle]
            if story.is_aborted:
                continue
            assert story.end is None, f"request {handle}: more behind its end"
            story.output += one.new_token_ids
            story.end = ends.get(handle)

    def _compare(self, handle: int, story: Story) -> None:
        request, params = story.request, story.request.params
        assert isinstance(params, SamplingParams) and story.end is not None
        most = params.max_tokens
        assert most is not None
        right = oracle(
            request.prompt_token_ids, seed=request.seed, num_tokens=most,
            vocab_size=VOCAB_SIZE, media=request.media.items if request.media else (),
            groups=self.config.groups,
        )  # fmt: skip
        got, reason = story.output, story.end.reason
        where = f"request {handle}: {got}, {reason!s}"
        assert got == right[: len(got)], f"{where}, is not a beginning of {right}"
        if story.is_aborted:
            return
        if handle in self.unreadable:
            assert (got, reason) == ([], FinishReason.ERROR), where
            return
        if story.end.message == MEDIA_NOT_KEPT:
            assert request.media is not None, where
            return
        if reason is FinishReason.ERROR:
            assert handle in self.poison or not self.is_calm, f"{where}: an innocent was blamed"
            return
        ending = FinishReason.STOP if right[-1] == EOS else FinishReason.LENGTH
        assert (got, reason) == (right, ending), f"{where} instead of {right}, {ending!s}"
        poison = self.poison.get(handle)
        if poison is not None and self.is_calm:
            # Each life may bring it one token: that much does not acquit. A step is launched
            # before the ids of those in flight are known.
            most = poison.at_output + self.depth - 1
            most += 8 if poison.decodes and not poison.at_intake else 0
            assert len(got) <= most, f"{where}: poison was run too often"


def run_traces(first: int, count: int) -> Counter[str]:
    """Run the traces with seeds first .. first+count-1: what they met. Raises AssertionError that
    names the first bad seed.
    """
    met: Counter[str] = Counter()
    for seed in range(first, first + count):
        world = World(seed)
        try:
            world.run()
        except Exception as error:
            raise AssertionError(f"trace {seed} failed: {error!r}") from error
        met += world.met()
    return met


if __name__ == "__main__":
    run_as_command(run_traces, "simulate supervised cores that die")
