"""The scheduler's promises, written as checks. Tests call `check` after every step; it costs
O(blocks + requests).
"""

from __future__ import annotations

from collections import Counter

from quire.scheduling.block_groups import BlockGroup, SourceGroup, StateGroup
from quire.scheduling.request import Request, State
from quire.scheduling.scheduler import Scheduler
from quire.step.plan import NULL_BLOCK, StepPlan


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError, naming what is broken, unless every invariant holds."""
    _check_pool(scheduler)
    _check_keys(scheduler)
    _check_places(scheduler)
    _check_encoders(scheduler)
    for request in scheduler.running.values():
        _check_request(scheduler, request)


def check_plan(scheduler: Scheduler, plan: StepPlan) -> None:
    """The plan keeps the budget, and no row occurs twice."""
    rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
    assert len(rows) == len(set(rows)), "a row is planned twice"
    steps = scheduler.config.steps
    assert plan.num_tokens <= steps.max_num_batched_tokens, "the budget is exceeded"
    most = scheduler.config.max_drafts
    assert most is None or sum(plan.sampled_drafts) <= most, "there are too many drafts"
    assert all(chunk.num_tokens > 0 for chunk in plan.chunks), "an empty chunk"
    assert len(rows) <= steps.max_num_seqs, "more rows than allowed"
    encoded = sum(item.num_rows for item in plan.encodings)
    assert encoded <= scheduler.config.encoder_rows, "more rows are encoded than allowed"
    drafts = plan.sampled_drafts
    assert max(drafts, default=0) <= scheduler.config.num_drafts, "more drafts than allowed"
    held = {b for r in scheduler.running.values() for t in r.block_ids for b in t}
    assert {target for _, target in plan.copies} <= held | _snapshots(scheduler)
    assert set(plan.zero_blocks) <= held, "a block that no request holds is zeroed"


def check_idle(scheduler: Scheduler) -> None:
    """Nothing is left of requests that ended."""
    check(scheduler)
    assert not scheduler.requests and not scheduler.running and not len(scheduler.waiting)
    assert scheduler.memory.pool.num_free == scheduler.config.num_blocks - 1, "blocks leaked"
    transfers = scheduler.transfers
    assert transfers is None or not transfers.num_leased, "leases leaked"
    assert transfers is None or not transfers._loads and not transfers._stores
    connections = scheduler.connections
    assert connections is None or not connections.num_leased, "leases of a connector leaked"
    assert not scheduler.memory._writing, "keys of unwritten blocks leaked"
    sources = scheduler.memory.sources
    assert sources is None or not sources._writing, "names of unwritten sources leaked"
    states = scheduler.memory.states
    assert states is None or not states._writing, "keys of unmade snapshots leaked"
    assert not scheduler.chunked and not scheduler.lane.members
    assert not len(scheduler.rows.stops), "stop ids leaked"
    assert len(scheduler.rows._free) == scheduler.config.steps.max_num_seqs, "rows leaked"
    encoders = scheduler.encoders
    if encoders is None:
        return
    assert not encoders._held and not any(o.holders for o in encoders._outputs.values())
    assert encoders._known.keys() == encoders._outputs.keys(), "names of media leaked"
    assert all(output.is_ready for output in encoders._outputs.values()), "rows never came"


def _snapshots(scheduler: Scheduler) -> set[int]:
    return {
        block
        for request in [*scheduler.running.values(), *scheduler.waiting]
        for blocks in request.snapshots.values()
        for block in blocks
    }


def _check_pool(scheduler: Scheduler) -> None:
    pool = scheduler.memory.pool
    held = Counter(
        block
        for request in scheduler.running.values()
        for table in [*request.block_ids, *request.snapshots.values()]
        for block in table
        if block != NULL_BLOCK
    )
    for request in scheduler.waiting:
        tables = [*request.block_ids, *request.snapshots.values()]
        held.update(b for table in tables for b in table if b != NULL_BLOCK)
    if scheduler.transfers is not None:
        held.update(b for lease in scheduler.transfers._leases.values() for b in lease.blocks)
    if scheduler.connections is not None:
        loads = [lease for _, lease in scheduler.connections._loads.values()]
        leases = [*scheduler.connections._sends.values(), *loads]
        held.update(b for lease in leases for b in lease.blocks)
    if scheduler.memory.states is not None:
        held.update(scheduler.memory.states._sources)
    assert pool._ref[NULL_BLOCK] == 0
    for block in range(1, pool.num_blocks):
        assert pool._ref[block] == held[block], f"block {block}: references are not its holders"
    listed = []
    for anchor in (0, pool.num_blocks, pool.num_blocks + 1):
        block = pool._next[anchor]
        while block != anchor:
            listed.append(block)
            assert pool._prev[pool._next[block]] == block, "a free list is torn"
            block = pool._next[block]
    free = {b for b in range(1, pool.num_blocks) if pool._ref[b] == 0}
    assert len(listed) == len(free) == pool.num_free and set(listed) == free


def _check_keys(scheduler: Scheduler) -> None:
    pool = scheduler.memory.pool
    _check_snapshots(scheduler)
    named = {key: block for block, key in enumerate(pool._key) if key is not None}
    assert named == pool._by_key, "keys and blocks do not match"
    for request in scheduler.memory._writing.values():
        assert request.row >= 0 or request.block_ids, "a request without blocks writes one"


def _check_snapshots(scheduler: Scheduler) -> None:
    """Snapshots are counted, and have no more blocks than they may."""
    states, pool = scheduler.memory.states, scheduler.memory.pool
    if states is None:
        return
    findable = sum(key is not None and key[1] in states._groups for key in pool._key)
    assert pool.num_early == findable, "findable snapshots are miscounted"
    assert states._num_pending == len(_snapshots(scheduler)), "pending snapshots are miscounted"
    assert findable + states._num_pending <= states._most, "snapshots exceed their share"


def _check_encoders(scheduler: Scheduler) -> None:
    """Outputs are held by running requests alone, and their rows are counted."""
    encoders = scheduler.encoders
    if encoders is None:
        return
    used = sum(output.num_rows for output in encoders._outputs.values())
    assert used + encoders.num_free == encoders.num_rows and encoders.num_free >= 0
    held = {(d, handle) for handle, digests in encoders._held.items() for d in digests}
    assert held == {(d, h) for d, output in encoders._outputs.items() for h in output.holders}
    for request in scheduler.running.values():
        first, end = request.num_confirmed_tokens, request.num_computed_tokens
        begun = {item.digest for item in request.media_between(first, end)}
        mine = encoders._held.get(request.handle, set())
        assert mine <= {item.digest for item in request.media}
        assert mine <= begun, "an output is held that is not needed"
    running = {request.handle for request in scheduler.running.values()}
    assert {handle for handle, digests in encoders._held.items() if digests} <= running


def _check_places(scheduler: Scheduler) -> None:
    """Every request is in exactly one place, and its state says which."""
    waiting = list(scheduler.waiting)
    assert waiting == sorted(waiting, key=scheduler.policy)
    for request in waiting:
        assert request.state in (State.WAITING, State.PREEMPTED) and request.row == -1
        assert request.num_computed_tokens == 0
        assert not request.block_ids or not request.load.is_ready, "blocks that nobody loads"
    for row, request in scheduler.running.items():
        assert request.row == row and request.state in (State.RUNNING, State.IDLE)
        places = (request in scheduler.lane) + scheduler.chunked.count(request)
        assert places <= (request.state is State.RUNNING)
    idle = [r for r in scheduler.requests.values() if r.state is State.IDLE and r.row < 0]
    known = {r.handle for r in [*waiting, *scheduler.running.values(), *idle]}
    assert known == set(scheduler.requests)
    rows = sorted([*scheduler.rows._free, *scheduler.running])
    assert rows == list(range(scheduler.config.steps.max_num_seqs)), "a row is lost or double"


def _check_request(scheduler: Scheduler, request: Request) -> None:
    lane, computed = scheduler.lane, request.num_computed_tokens
    if request in lane:
        computed = lane.position(request)
        assert request.due >= lane.tick, "an event of the lane was missed"
        assert request in lane._calendar[request.due]
    fewest, most = _new_tokens(scheduler, request)
    least = computed - request.num_drafts_in_flight
    assert least <= request.num_tokens + fewest, "tokens are computed that do not exist"
    assert computed <= request.num_tokens + most <= request.max_total_tokens
    assert request.num_confirmed_tokens <= computed
    for group, table in zip(scheduler.memory.groups, request.block_ids, strict=True):
        assert len(table) >= group.num_blocks(computed), "computed tokens without blocks"
        unread = group.num_unread(least)
        assert NULL_BLOCK not in table[unread:], "a block that is still read was given back"
        if not isinstance(group, SourceGroup):
            assert not _shares_writable(scheduler, group, table, least)
            continue
        assert request.source is not None
        assert len(table) == group.num_source_blocks(request.source.num_rows), "a source grew"
        shared = any(scheduler.memory.pool._ref[block] > 1 for block in table)
        assert not (shared and request.writes_source), "a source is read before it is written"


def _new_tokens(scheduler: Scheduler, request: Request) -> tuple[int, int]:
    """The fewest and the most tokens that the steps in flight bring the request."""
    fewest = most = 0
    for step in scheduler.in_flight:
        if request.handle in step.cancelled:
            continue
        drafts = [n for asked, n in zip(*step.asked_drafts(), strict=True) if asked is request]
        fewest, most = fewest + len(drafts), most + len(drafts) + sum(drafts)
    return fewest, most


def _shares_writable(
    scheduler: Scheduler, group: BlockGroup, table: list[int], position: int
) -> bool:
    """Is a block that will still be written held by another request too?"""
    first = 0 if isinstance(group, StateGroup) else position // group.block_size
    return any(scheduler.memory.pool._ref[block] > 1 for block in table[first:])
