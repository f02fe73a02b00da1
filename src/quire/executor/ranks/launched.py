"""One worker of a model whose other workers are in processes that an external launcher has started,
as torchrun does. Each of these processes has a whole engine, which gets the same calls.

Every engine plans for itself, and all plan the same. What a step has given is known to the process
whose worker samples, which tells the others: so all engines know the same, and go on alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.meeting import Meeting, OpenedGroup
from quire.distributed.mesh import Mesh, MeshPlace
from quire.errors import EngineDeadError, LoadError, PeersLost
from quire.executor.platform import Platform, open_platform
from quire.executor.ranks.failures import cause_of, failure_of
from quire.executor.ranks.messages import RankAnswer
from quire.executor.ranks.peers import Peers
from quire.executor.ranks.rank_main import stage_of
from quire.executor.ranks.stage_links import StageLinks
from quire.executor.ranks.step_ends import only_changes, read_step
from quire.executor.ranks.wiring import open_stages
from quire.executor.uniproc import LocalWorkers, take_torch_threads
from quire.executor.worker import Worker
from quire.executor.worker_builder import build_worker
from quire.executor.worker_config import WorkerConfig, WorkerFacts
from quire.hardware.launched import LaunchedProcess
from quire.hardware.native import find_native
from quire.params import RequestParams
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.runner.runner import NoTokens, Step
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan
from quire.step.result import NewTokens


@dataclass(frozen=True, slots=True)
class LaunchConnections:
    """Connections of a process to the others of its model. `tensors`: the group of its stage; None:
    it has its stage alone. `meeting` has the store, which lives as long as this.
    """

    place: MeshPlace
    meeting: Meeting
    peers: Peers
    tensors: OpenedGroup | None
    stages: StageLinks

    def close(self) -> None:
        """Have the others find this process gone."""
        self.peers.close()
        self.stages.close()
        if self.tensors is not None:
            self.tensors.close()


class ExternalLauncherExecutor(LocalWorkers):
    """The worker of this process. Calls reach it alone: whoever makes them, makes them in each
    process.

    A step ends on all processes or on none: before rows advance they meet.
    """

    def __init__(
        self,
        worker: Worker,
        connections: LaunchConnections,
        num_blocks: int,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_blocks`: those of the process that has the fewest."""
        super().__init__([worker], on_close)
        self.place = connections.place
        self._connections = connections
        self._peers = connections.peers
        self._num_blocks = num_blocks
        self._num_aborts = 0
        self._serial = 0
        self._tokens: list[NewTokens] = []
        """Tokens of earlier steps that the worker has not drawn itself."""
        self._drafts: dict[int, list[int]] = {}
        self._unread: deque[AlikeStep] = deque()
        """Steps that have sampled, and whose results have not been read."""
        self._encoder = MessageEncoder()
        self._decoder = MessageDecoder(RankAnswer)

    @property
    def facts(self) -> WorkerFacts:
        return replace(super().facts, num_blocks=self._num_blocks)

    # steps

    def launch(self, plan: StepPlan) -> AlikeStep:
        rows = {*plan.decode_rows, *(chunk.row for chunk in plan.chunks)}
        rows.difference_update(new.row for new in plan.added)  # these bring all of their ids
        while any(step.comes_before(rows) for step in self._unread):
            self.settle_oldest()
        # before it runs: different steps would wait for each other in their exchanges
        self._peers.require_same(plan)
        for new in plan.added:
            # the row had another request, whose drafts are left
            self._drafts.pop(new.row, None)
        tokens, self._tokens = self._tokens, []
        return AlikeStep(self, plan, self._begin(plan, tokens))

    def needs_host_ids(self, params: RequestParams) -> bool:
        """As the worker that samples says; with several stages none may be scheduled ahead, since a
        step does not begin before the last stage has drawn the ids that it reads.
        """
        own = self.worker.needs_host_ids(params)
        ((sampler,), *_) = self._peers.numbers(own)
        return bool(sampler) or self.place.mesh.pp > 1

    def compute(self, step: AlikeStep, mask: GrammarMask | None) -> bool:
        """Have a step computed to its end, and agree that it has succeeded on all processes.
        Returns whether it moves rows by its results on the worker that samples.
        """
        try:
            if self.place.is_last_stage:
                step.own.compute(mask if self.place.samples else None)
        except Exception as error:
            raise self._fail(error) from error
        return self._agree(step.own.moves_rows)

    def advance(self, step: AlikeStep, *, moves_rows: bool) -> None:
        """Advance the rows of a step that has succeeded."""
        is_moved = moves_rows and not self.place.samples
        if is_moved or not self.place.is_last_stage:
            step.own.advance_unsampled()
        else:
            step.own.advance()
        self._unread.append(step)

    def read(self, step: AlikeStep, *, moves_rows: bool) -> RankAnswer:
        """Wait for the results of the oldest step that has not been read."""
        assert self._unread[0] is step, "steps are read in their order"
        self._serial += 1
        answer = None
        if self.place.is_last_stage:
            answer = read_step(step.own, self._serial, self.place, moves_rows=moves_rows)
        frames = self._peers.broadcast([] if answer is None else self._encoder.encode(answer))
        answer = answer or self._decoder.decode(frames)
        self._unread.popleft()
        if (new := answer.tokens) is not None:
            start = 0
            for row, count in zip(new.rows, new.num_drafts, strict=True):
                self._drafts[row] = new.draft_ids[start : start + count]
                start += count
            if not self.place.is_last_stage or (moves_rows and not self.place.samples):
                self._tokens.append(new)
        return answer

    def drafts_of(self, row: int, count: int) -> list[int]:
        """The first `count` drafts of a row, as the last step of it has left them."""
        return self._drafts.get(row, [])[:count]

    def settle_oldest(self) -> None:
        """Take in the results of the oldest step that has not been read."""
        self._unread[0].settle()

    def _begin(self, plan: StepPlan, tokens: list[NewTokens]) -> Step | NoTokens:
        stages = self._connections.stages
        is_launched = is_sent = False
        try:
            before = stages.receive(self._width)
            is_launched = True
            step = self.worker.launch(plan, before, tokens)
            is_sent = True
            stages.send(step.stage_output)
            return step
        except Exception as error:
            # the next stage waits for states
            if not is_sent:
                stages.send_failure()
            if not is_launched:
                # its changes of rows count on all ranks
                self.worker.launch(only_changes(plan), None, tokens)
            raise self._fail(error) from error

    @property
    def _width(self) -> int:
        """The numbers of a hidden state that comes from another stage."""
        return int(self.worker.get_model().spec.dim) if self.place.mesh.pp > 1 else 0

    def _agree(self, moves_rows: bool) -> bool:
        """Meet the others at the end of a step. Raises the error of one that has failed."""
        found = self._peers.numbers(0, moves_rows)
        if any(failed for failed, _ in found):
            raise self._recover(None)
        return bool(found[0][1])

    def _fail(self, error: Exception) -> Exception:
        """End the wait of the others, and meet them; returns the error of the step."""
        if isinstance(error, EngineDeadError):
            return error
        if self._connections.tensors is not None:
            self._connections.tensors.group.abort(f"rank {self.place.rank} failed: {error}")
        # those whose step has gone well wait there, in `_agree`
        self._peers.numbers(1, 0)
        return self._recover(error)

    def _recover(self, own: Exception | None) -> Exception:
        """Make exchanges usable again, of which all are out; returns the error of the step."""
        self._num_aborts += 1
        if self._connections.tensors is not None:
            try:
                self._connections.tensors.rejoin(self._num_aborts)
            except PeersLost as error:
                return EngineDeadError(f"The processes of the launcher do not meet: {error}")
        return cause_of(self._peers.failures(None if own is None else failure_of(own)))

    def shutdown(self) -> None:
        super().shutdown()
        self._connections.close()


class AlikeStep:
    """A step that the engines of all processes have planned alike."""

    def __init__(
        self, executor: ExternalLauncherExecutor, plan: StepPlan, own: Step | NoTokens
    ) -> None:
        """`own`: the step of this process's worker."""
        self.own = own
        self._executor = executor
        self._sampled = set(plan.sampled_rows)
        self._moves_rows = False
        self._answer: RankAnswer | None = None

    def comes_before(self, rows: set[int]) -> bool:
        """Whether the results of this step come before another step of these rows."""
        if self._moves_rows:
            return True
        return self._executor.place.mesh.pp > 1 and not rows.isdisjoint(self._sampled)

    def sample(self, mask: GrammarMask | None = None) -> None:
        """Compute on all processes; then, only if none failed, advance."""
        self._moves_rows = self._executor.compute(self, mask)
        self._executor.advance(self, moves_rows=self._moves_rows)

    def drafts(self, row: int, count: int) -> list[int]:
        """Return drafts as the worker that samples has them."""
        return self._executor.drafts_of(row, count)

    def settle(self) -> None:
        """Take in the results, whether they could be read or not."""
        if self._answer is None:
            self._answer = self._executor.read(self, moves_rows=self._moves_rows)

    def result(self) -> RunnerOutput:
        """Wait for the results. Raises RuntimeError where they could not be read."""
        while self._answer is None:
            self._executor.settle_oldest()
        if self._answer.output is None:
            raise RuntimeError(self._answer.unread)
        return self._answer.output


def open_external_launcher(
    config: WorkerConfig,
    *,
    platform: Platform | None = None,
    exchange: ExpertExchange | None = None,
) -> ExternalLauncherExecutor:
    """Meet the other processes of the launcher and build this one's worker. Raises LoadError where
    they do not come, or a worker cannot be built.
    """
    assert platform is None and exchange is None, "the plan names the device"
    launched, parallel = config.parallel.launched, config.parallel
    assert launched is not None, "the plan is that of a launched process"
    mesh = parallel.mesh
    try:
        connections = connect(launched, mesh, config)
    except PeersLost as error:
        raise LoadError(str(error)) from error
    native, _ = find_native()
    restore_threads = take_torch_threads(parallel.num_threads if native is None else 1)
    try:
        worker = _build(_agreed(config, connections.peers), connections)
    except BaseException:
        restore_threads()
        connections.close()
        raise
    fewest = min(n for (n,) in connections.peers.numbers(worker.facts.num_blocks))
    return ExternalLauncherExecutor(worker, connections, fewest, restore_threads)


def connect(launched: LaunchedProcess, mesh: Mesh, config: WorkerConfig) -> LaunchConnections:
    """Connect a process to those with which it has a model. Raises PeersLost."""
    copy, rank = divmod(launched.rank, mesh.world_size)
    is_host = launched.rank == 0 and not launched.launcher_has_store
    meeting = Meeting.at(
        launched.address,
        launched.port,
        f"quire/{copy}",
        rank,
        mesh.world_size,
        is_host=is_host,
    ).anew()
    place = mesh.place(rank)
    # the one that samples is the first: others take its numbers and its bytes
    order = [(mesh.sampling_rank + n) % mesh.world_size for n in range(mesh.world_size)]
    peers = Peers(meeting.among("world", order).open_group())
    tensors = None
    if mesh.tp > 1:
        stage = meeting.among(f"tp {place.pp_rank}", place.group("tp"))
        tensors = stage.open_group(config.device_type)
    stages = open_stages(meeting, place, config.torch_dtype)
    return LaunchConnections(place, meeting, peers, tensors, stages)


_OWN_MODEL = {
    "model", "model_folder", "served_model_names", "tokenizer_folder", "tokenizer_mode",
    "chat_template", "weights_folder", "weight_bytes", "packed_weights_bytes", "prompts",
    "hf_config", "encoder_transfer",
}  # fmt: skip
_OWN_MEMORY = {"num_blocks", "kv_cache_bytes", "memory_utilization", "kv_events", "kv_connector"}
"""The decisions about the model and about memory that may differ between processes which plan the
same steps: where files lie, and what follows from the memory of each.
"""


def _shared(part: msgspec.Struct, own: set[str]) -> dict[str, Any]:
    """The decisions of a part of the plan in which processes have to agree."""
    return {name: getattr(part, name) for name in part.__struct_fields__ if name not in own}


def _agreed(config: WorkerConfig, peers: Peers) -> WorkerConfig:
    """The config with as few blocks as any process has. Raises InvalidParameter where they have
    been given different options.
    """
    memory = config.memory
    peers.require_options(
        {
            "tensor_parallel_size": config.parallel.mesh,
            **_shared(config.model, _OWN_MODEL),
            **_shared(memory, _OWN_MEMORY),
            "steps": config.steps,
            "speculative_config": config.speculation,
            "lora_config": config.adapters,
        }
    )
    # engines that plan the same need pools of one size
    fewest = min(count for (count,) in peers.numbers(memory.num_blocks))
    memory = msgspec.structs.replace(memory, num_blocks=fewest)
    return replace(config, memory=memory)


def _build(config: WorkerConfig, connections: LaunchConnections) -> Worker:
    """Build the worker; it fails on all processes or on none."""
    failure, worker = None, None
    group = None if connections.tensors is None else connections.tensors.group
    try:
        stage = stage_of(config, connections.place)
        worker = build_worker(config, open_platform(config), group=group, stage=stage)
    except Exception as error:
        failure = error
        if group is not None:
            group.abort(f"rank {connections.place.rank} does not start: {error}")
    told = connections.peers.failures(None if failure is None else failure_of(failure))
    if failure is not None:
        raise failure
    if told:
        assert worker is not None
        worker.close()
        raise LoadError(f"Another process of the launcher does not start: {cause_of(told)}")
    assert worker is not None
    return worker
