"""The feature of a core with a connector of K/V: the scheduler's half, asked about requests and
told of plans.

A connector's code may be anybody's. What it raises when it is asked about a request costs that
request its load; after any other exception nobody knows what it still does, and it is not used any
more. In both cases tokens are computed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from quire.distributed.kv_connector.base import KVConnectorBase_V1
from quire.distributed.kv_connector.multi import finished
from quire.distributed.kv_connector.views import (
    CachedRequestData,
    ConnectorRequest,
    KVCacheBlocks,
    NewRequestData,
    RequestStatus,
    StepView,
)
from quire.distributed.kv_events import AnyKVCacheEvent, KVCacheEvent
from quire.distributed.peers.params import PARAMS
from quire.engine.core.features import CoreFeature
from quire.engine.core.features.kv_tier import LOAD_FAILED
from quire.engine.wire.messages import EngineCoreRequest, SchedulerStats
from quire.errors import EngineError
from quire.params import SamplingParams
from quire.scheduling.request import Reason, Request, Stop
from quire.scheduling.settings import Pause
from quire.step.columns import AnyPart, TransferParams
from quire.step.plan import NULL_BLOCK, StepPlan
from quire.step.transfers import BlockKey

if TYPE_CHECKING:
    from quire.executor.kv_tier.connected_ranks import ConnectedRanks
    from quire.executor.kv_tier.connected_worker import ConnectedWorker
    from quire.scheduling.connection import ConnectedRequests
    from quire.scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

_SETTLE_S = 30.0
"""Seconds that a connector of one's own has to end what it moves before blocks are forgotten."""
_STATUS = {
    Reason.STOP: RequestStatus.FINISHED_STOPPED,
    Reason.LENGTH: RequestStatus.FINISHED_LENGTH_CAPPED,
    Reason.ABORT: RequestStatus.FINISHED_ABORTED,
    Reason.ERROR: RequestStatus.FINISHED_ERROR,
    Reason.REPETITION: RequestStatus.FINISHED_REPETITION,
}


class KVConnection(CoreFeature):
    """Stands between a scheduler and a connector: it is the scheduler's `Connection`."""

    fields = ("handle",)

    def __init__(self, connector: KVConnectorBase_V1, *, fails: bool) -> None:
        """fails: a request ends with an error where its load has failed, and is not computed."""
        self._connector, self._fails = connector, fails
        self._views: dict[int, ConnectorRequest] = {}
        self._failed: list[tuple[int, str]] = []
        self._parts: list[AnyPart] = []
        self._ended: set[str] = set()
        self._finished: set[str] = set()
        self._has_begun = False
        """Whether a load was begun that the worker has not been told of."""
        self._free_at: float | None = None
        """Time at which the blocks of a failed connector become free; None while it works."""
        self._to_load: set[int] = set()
        """Blocks of the requests that the next step loads something for."""
        self._bad: set[int] = set()
        self._bad_beside: set[int] = set()
        self._rows: dict[int, int] = {}
        self._computed: dict[int, int] = {}
        """Requests that have had a row -> the tokens that plans have computed."""
        self._sums: dict[str, int] = {}
        """Counts of the connector since the start, by the names of metrics."""
        self._reported: dict[str, int] = {}
        self._handed: int | None = None
        """The request that another engine goes on with, while it ends here."""
        self._handed_params: dict[str, Any] | None = None

    def attach(self, scheduler: Scheduler, worker: ConnectedWorker | ConnectedRanks) -> None:
        """Begin to serve a scheduler that was made with this connection."""
        self._scheduler, self._worker = scheduler, worker
        assert scheduler.connections is not None, "it was made with this connection"
        self._connections: ConnectedRequests = scheduler.connections

    # the scheduler

    def offer(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        view = self._views.get(request.handle)
        if view is None:
            return 0, False
        try:
            return self._connector.get_num_new_matched_tokens(view, num_local)
        except Exception:
            logger.exception("The connector has failed: request %d is computed.", request.handle)
            request.is_spoiled = True
            return 0, False

    def begin(self, request: Request, blocks: Sequence[tuple[int, BlockKey]], count: int) -> None:
        view = self._views[request.handle]
        view.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        self._has_begun = True
        tables = KVCacheBlocks(request.block_ids, blocks)
        try:
            self._connector.update_state_after_alloc(view, tables, count)
        except Exception:
            self._give_up()

    def entered(self, request: Request, count: int) -> None:
        view = self._views.get(request.handle)
        if view is None:
            return
        view.status = RequestStatus.RUNNING
        if count:
            # all of its blocks: the connector alone knows which of them it fills
            self._to_load.update(block for table in request.block_ids for block in table)
        try:
            blocks = KVCacheBlocks(request.block_ids)
            self._connector.update_state_after_alloc(view, blocks, count)
        except Exception:
            self._give_up()

    def finish(self, request: Request, stop: Stop | None) -> bool:
        view = self._views.pop(request.handle, None)
        self._computed.pop(request.handle, None)
        if view is None:
            return False
        self._ended.add(view.request_id)
        view.status = RequestStatus.FINISHED_ABORTED if stop is None else _STATUS[stop.reason]
        if request.handle == self._handed:  # its K/V is wanted, as that of a prompt
            view.status = RequestStatus.FINISHED_LENGTH_CAPPED
        view.keyed_blocks = lambda: self._keyed_blocks(request)
        # copies: a connector keeps them after the request has given its tables back
        tables = tuple(list(table) for table in request.block_ids)
        try:
            keeps, params = finished(self._connector, view, tables)
        except Exception:
            self._give_up()
            return False
        if request.handle == self._handed:
            self._handed_params = params
        elif params is not None and stop is not None:
            self._parts.append(TransferParams(request.handle, params))
        return keeps

    def take_bad_blocks(self) -> Collection[int]:
        if not self._bad:
            return ()
        bad, self._bad = self._bad, set()
        if self._fails:
            for request in self._scheduler.running.values():
                if any(block in bad for table in request.block_ids for block in table):
                    self._fail(request.handle)
        return bad

    def _keyed_blocks(self, request: Request) -> dict[BlockKey, int]:
        """The full blocks with computed tokens that a request has, by the names of contents."""
        memory, found = self._scheduler.memory, {}
        for number, (group, table) in enumerate(zip(memory.groups, request.block_ids, strict=True)):
            stride = group.block_size // memory.key_size
            count = request.num_reusable_tokens // group.block_size
            for index, block in enumerate(table[:count]):
                if block != NULL_BLOCK and (index + 1) * stride <= len(request.keys):
                    found[request.keys[(index + 1) * stride - 1], number] = block
        return found

    def hand_over(self, request: Request) -> dict[str, Any] | None:
        view = self._views.get(request.handle)
        if view is None or self._free_at is not None:
            return None
        view.kv_transfer_params = {"do_remote_decode": True}
        self._handed = request.handle
        self._scheduler.abort(request.handle)
        self._handed = None
        params, self._handed_params = self._handed_params, None
        return params

    # the core

    def prepare(self, request: Request, message: EngineCoreRequest) -> None:
        if self._free_at is not None:
            return
        params = message.params
        more = params.extra_args if isinstance(params, SamplingParams) else None
        given = more.get(PARAMS) if more else None
        view = ConnectorRequest(request, given if isinstance(given, dict) else None)
        self._views[request.handle] = view
        self._connector.on_new_request(view)

    def dismiss(self, request: Request) -> None:
        self.finish(request, None)

    def poll(self) -> Sequence[tuple[int, str]]:
        failed, self._failed = self._failed, []
        return [end for end in failed if self._scheduler.abort(end[0])]

    def planned(self, plan: StepPlan | None) -> None:
        if self._free_at is not None:
            self._free_blocks(self._free_at)
        elif plan is not None or self._has_news:
            self._begin_step(plan)
            if plan is None:
                self._end_step(has_computed=False)

    def completed(self) -> None:
        self._end_step(has_computed=True)

    def _begin_step(self, plan: StepPlan | None) -> None:
        self._has_begun = False
        output = self._output_of(plan) if self._connector.reads_steps else StepView()
        output.finished_req_ids, self._finished = set(self._ended), self._ended
        self._ended = set()
        try:
            bad = self._worker.begin(self._connector.build_connector_meta(output))
        except Exception:
            self._give_up()
            return
        # not before: where `begin` fails, these blocks have nothing in them
        self._to_load.clear()
        self._note_bad(bad)

    def _end_step(self, *, has_computed: bool) -> None:
        if self._free_at is not None:
            return
        finished_ids, self._finished = self._finished, set()
        try:
            output = self._worker.end(finished_ids, has_computed=has_computed)
            self._connector.update_connector_output(output)
            loaded = sorted(map(int, output.finished_recving or ()))
            sent = set(map(int, output.finished_sending or ()))
            bad_blocks = set(map(int, output.invalid_block_ids))
        except Exception:
            self._give_up()
            return
        ends = []
        self._note_bad(bad_blocks)
        for handle in loaded:
            if self._connections.is_loading(handle):
                bad = self._bad_beside.intersection(self._connections.blocks_of(handle))
                self._bad_beside -= bad
                ends.append((handle, bad))
                if bad and self._fails:
                    self._fail(handle)
        self._connections.end_loads(ends)
        self._connections.end_sends(sorted(sent.intersection(self._connections.sends)))
        if isinstance(output.kv_connector_stats, dict):
            self._sums |= output.kv_connector_stats

    def _give_up(self) -> None:
        """Use the connector no more; blocks that it may move stay for as long as that may take."""
        if self._free_at is None:
            logger.exception("The connector has failed, and is not used any more.")
            self._free_at = time.monotonic() + _SETTLE_S
        # nobody knows whether these were filled
        self._bad |= self._to_load
        self._to_load.clear()
        self._views.clear()
        self._connections.abandon_loads()

    def _free_blocks(self, time_s: float) -> None:
        """Free the blocks of a connector that has failed, if their time is over."""
        if time.monotonic() >= time_s:
            connections = self._connections
            connections.end_loads([(h, connections.blocks_of(h)) for h in connections.loads])
            connections.end_sends(list(connections.sends))

    def _note_bad(self, blocks: Collection[int]) -> None:
        """Blocks could not be filled, by loads beside steps or by the oldest step in flight."""
        for block in blocks:
            is_beside = self._connections.is_leased_to_load(block)
            (self._bad_beside if is_beside else self._bad).add(block)

    def _fail(self, handle: int) -> None:
        self._failed.append((handle, LOAD_FAILED))

    @property
    def _has_news(self) -> bool:
        connections = self._connections
        if connections.num_loading or connections.sends:
            return True
        if self._free_at is not None:
            return False
        has_ends = bool(self._ended) or self._has_begun
        return has_ends or self._connector.has_pending_push_work()

    def take_events(self) -> list[AnyKVCacheEvent]:
        if self._free_at is not None:
            return []
        try:
            found = list(self._connector.take_events())
        except Exception:
            self._give_up()
            return []
        return [event for event in found if isinstance(event, KVCacheEvent)]

    def take_parts(self) -> list[AnyPart]:
        parts, self._parts = self._parts, []
        return parts

    def is_busy(self) -> bool:
        if self._scheduler.pause is Pause.ALL:
            return False
        return self._has_news or bool(self._failed)

    def delays_end(self) -> bool:
        """Nobody waits for blocks that are kept for others."""
        return bool(self._connections.num_loading)

    def wait(self, timeout_s: float) -> None:
        """Wait for a load or a send to end, at most for `timeout_s`."""
        if self._free_at is None and self._has_news:
            self._worker.wait(timeout_s)
        elif self._has_news:
            time.sleep(timeout_s)

    def settle(self) -> None:
        end = max(time.monotonic(), self._free_at or 0.0) + _SETTLE_S
        can_end = self._free_at is None and self._worker.settle()
        while self._connections.num_loading or self._connections.sends:
            # a step without tokens, in which connectors report what has ended
            self.planned(None)
            if not can_end and time.monotonic() > end:
                raise EngineError("The connector still moves K/V: blocks cannot be forgotten.")
            self.wait(0.01)

    def forget_contents(self) -> None:
        self.settle()
        if self._connector.reset_cache() is False:
            raise EngineError("The connector could not forget what it keeps.")

    def weights_may_differ(self) -> None:
        self._worker.forget_root()
        self.settle()

    def report(self, stats: SchedulerStats) -> None:
        for name, value in self._sums.items():
            if name in SchedulerStats.__struct_fields__:
                setattr(stats, name, value - self._reported.get(name, 0))
                self._reported[name] = value

    def close(self) -> None:
        self._worker.close()
        self._connector.shutdown()

    # plans

    def _output_of(self, plan: StepPlan | None) -> StepView:
        output = StepView()
        if plan is None:
            return output
        for row in plan.removed:
            self._rows.pop(row, None)
        cached = output.scheduled_cached_reqs
        resumed = {}
        for new in plan.added:
            self._rows[new.row] = new.handle
            if new.handle in self._computed:
                resumed[new.handle] = tuple(new.block_ids)
            elif new.handle in self._views:
                output.scheduled_new_reqs.append(_new_request(new))
            self._computed[new.handle] = new.num_computed_tokens
        counts = {self._rows[row]: 1 for row in plan.decode_rows}
        counts |= {self._rows[chunk.row]: chunk.num_tokens for chunk in plan.chunks}
        grown: dict[int, list[list[int]]] = {}
        for each in plan.new_blocks:
            empty: list[list[int]] = [[] for _ in self._scheduler.memory.groups]
            grown.setdefault(self._rows[each.row], empty)[each.group] += each.block_ids
        fresh = {new.req_id for new in output.scheduled_new_reqs}
        for handle, count in counts.items():
            view = self._views.get(handle)
            if view is None:
                continue
            output.num_scheduled_tokens[view.request_id] = count
            if view.request_id not in fresh:
                blocks = resumed.get(handle) or (tuple(grown[handle]) if handle in grown else None)
                _add_cached(cached, view, self._computed[handle], blocks, handle in resumed)
            self._computed[handle] += count
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        return output


def _new_request(new: Any) -> NewRequestData:
    generates = isinstance(new.params, SamplingParams)
    return NewRequestData(
        str(new.handle),
        new.token_ids[: new.num_prompt_tokens],
        tuple(new.block_ids),
        new.num_computed_tokens,
        sampling_params=new.params if generates else None,
        pooling_params=None if generates else new.params,
        prefill_token_ids=new.token_ids,
    )


def _add_cached(
    cached: CachedRequestData,
    view: ConnectorRequest,
    computed: int,
    blocks: tuple[list[int], ...] | None,
    is_resumed: bool,
) -> None:
    cached.req_ids.append(view.request_id)
    cached.new_token_ids.append([])
    cached.new_block_ids.append(blocks)
    cached.num_computed_tokens.append(computed)
    cached.num_output_tokens.append(view.num_output_tokens)
    if is_resumed:
        cached.resumed_req_ids.add(view.request_id)
        cached.all_token_ids[view.request_id] = view.all_token_ids
