"""The scheduler against the hash model: thousands of random lives, and planted bugs that show."""

from collections import Counter

import pytest

from quire.scheduling import block_pool, block_tables, scheduler, streaming_input
from quire.scheduling.adapter_slots import SlotAllocator
from quire.scheduling.block_groups import FullGroup, SlidingGroup
from quire.scheduling.block_pool import BlockPool
from quire.scheduling.block_tables import BlockTables
from quire.scheduling.decode_lane import DecodeLane
from quire.scheduling.encoder_cache import EncoderCache
from quire.scheduling.lifecycle import Lifecycle
from quire.scheduling.request import Request, check_stop
from quire.scheduling.resources import Resources
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.source_blocks import SourceBlocks
from quire.scheduling.state_blocks import StateBlocks
from quire.scheduling.transfers import Transfers
from quire.step.media import EmbeddedSpan, MediaItem, Source
from tests.support.simulation.simulate import NOTHING, STATE, Trace, run_traces

NUM_TRACES = 4_250
PART = 250


@pytest.mark.parametrize("first", range(0, NUM_TRACES, PART))
def test_every_request_gets_its_text(first):
    run_traces(first, PART)


def test_a_request_that_is_alone_gives_up_snapshots_rather_than_itself():
    run_traces(6402, 1)


def test_the_traces_meet_what_they_are_for():
    met = Counter()
    for seed in range(600):
        trace = Trace(seed)
        trace.run()
        config, expected = trace.config, trace.expected.values()
        met["preemptions"] += trace.scheduler.counters.num_preemptions
        met["prefix hits"] += trace.scheduler.counters.prefix_hits
        met["depth 2"] += trace.depth == 2
        met["depth 4"] += trace.depth == 4
        met["accepted drafts"] += trace.num_accepted
        met["accepted drafts at depth 2"] += trace.num_accepted * (trace.depth - 1)
        met["windows"] += any(group.window for group in config.groups)
        met["states"] += STATE in config.groups
        met["snapshots that were hit"] += trace.num_snapshot_hits
        met["snapshots that were taken over"] += trace.num_snapshots_taken
        met["groups without memory"] += NOTHING in config.groups
        met["groups of two block sizes"] += any(group.block_size for group in config.groups)
        encoders, is_late = trace.scheduler.encoders, config.defers_encodings
        met["items of media"] += trace.num_media
        met["bidirectional items"] += trace.num_bidirectional
        met["items in several chunks"] += trace.num_split_media
        met["rows that were there"] += encoders.num_hits
        met["late rows"] += is_late and trace.encoder.num_encoded
        met["late rows that failed"] += is_late and trace.encoder.num_failed
        met["rows within the step"] += not is_late and trace.encoder.num_encoded
        met["rows that failed"] += not is_late and trace.encoder.num_failed
        met["rows that were dropped"] += trace.encoder.num_dropped
        met["changes of weights"] += trace.num_changes
        if trace.tier is not None:
            met["loads"] += trace.tier.num_loaded
            met["failed loads"] += trace.tier.num_failed
            met["stores"] += trace.tier.num_stored
        met["sources"] += trace.num_sources_written
        met["sources that were there"] += trace.num_sources_read
        met["adapters"] += sum(e.adapter > 0 for e in expected)
        met["adapters that were read again"] += trace.host.num_read_again
        met["waits"] += trace.num_waits
        met["indivisible prompts"] += trace.num_indivisible
        met["whole prompts that pool"] += trace.num_whole_pools
        met["aborted"] += sum(e.is_cut for e in expected)
        met["further turns"] += sum(len(e.turns) for e in expected)
        for expectation in expected:
            met[expectation.reason] += 1
    assert all(count >= 5 for count in met.values()), met
    assert len(met) >= 34 + 5


def test_equal_seeds_give_equal_lives():
    first, second = Trace(11), Trace(11)
    first.run()
    second.run()
    assert first.num_steps == second.num_steps
    assert [e.output for e in first.expected.values()] == [
        e.output for e in second.expected.values()
    ]


# Planted bugs: blocks and prefixes


def forget_the_prefix(monkeypatch):
    real, root = block_pool.next_key, block_pool.root_key(None)
    monkeypatch.setattr(
        block_tables, "next_key", lambda parent, ids, embedded: real(root, ids, embedded)
    )


def leave_the_adapter_out_of_keys(monkeypatch):
    real = block_pool.root_key
    monkeypatch.setattr(
        block_tables, "root_key", lambda salt, _, weights, source: real(salt, 0, weights, source)
    )


def leave_the_weights_out_of_keys(monkeypatch):
    real = block_pool.root_key
    monkeypatch.setattr(
        block_tables, "root_key", lambda salt, adapter, _, source: real(salt, adapter, 0, source)
    )


def leave_the_source_out_of_keys(monkeypatch):
    real = block_pool.root_key
    monkeypatch.setattr(block_tables, "root_key", lambda salt, *others: real(salt, *others[:2]))


def name_a_source_by_its_digest_alone(monkeypatch):
    real = SourceBlocks.find
    monkeypatch.setattr(
        SourceBlocks, "find", lambda self, request, _: real(self, request, request.source.digest)
    )


def read_a_source_that_is_not_written(monkeypatch):
    real = SourceBlocks.allocate

    def allocate(self, request):
        real(self, request)
        if request.writes_source and self._are_shared:
            for number in self._groups:
                for index, block in enumerate(request.block_ids[number]):
                    self._pool.publish(block, self._key(request, number, index), request, 0)

    monkeypatch.setattr(SourceBlocks, "allocate", allocate)


def write_no_source(monkeypatch):
    real = Request._source_of_row

    def source(self):
        found = real(self)
        return found and Source(found.digest, found.num_rows, is_written=True)

    monkeypatch.setattr(Request, "_source_of_row", source)


def encode_no_source(monkeypatch):
    real = Request.media_between

    def between(self, start, end):
        return [item for item in real(self, start, end) if item.places]

    monkeypatch.setattr(Request, "media_between", between)


def take_a_source_after_others_took_its_blocks(monkeypatch):
    real = SourceBlocks.hold
    monkeypatch.setattr(SourceBlocks, "hold", lambda self, request: None)
    allocate = SourceBlocks.allocate

    def late(self, request):
        allocate(self, request)
        real(self, request)

    monkeypatch.setattr(SourceBlocks, "allocate", late)
    monkeypatch.setattr(SourceBlocks, "cost", lambda self, request: 0)


def leave_digests_out_of_keys(monkeypatch):
    monkeypatch.setattr(Request, "embedded_in", lambda self, start, end: b"")


def touch_without_counting(monkeypatch):
    def touch(self, blocks):
        for block in blocks:
            if self._ref[block] == 0:
                self._unlink(block)
                self.num_free -= 1
                self._ref[block] = 1

    monkeypatch.setattr(BlockPool, "touch", touch)


def one_block_late(monkeypatch):
    real = BlockTables.grow

    def grow(self, request, want, least=1):
        grown = real(self, request, max(1, want - 1), min(least, max(1, want - 1)))
        return grown and (min(want, grown[0] + 1), grown[1])

    monkeypatch.setattr(BlockTables, "grow", grow)


def window_one_short(monkeypatch):
    real = SlidingGroup.num_unread
    monkeypatch.setattr(SlidingGroup, "num_unread", lambda self, p: real(self, p + 1))


def boundary_one_late(monkeypatch):
    real = DecodeLane._enter_calendar

    def enter(self, request, earliest):
        real(self, request, earliest)
        self._calendar[request.due].remove(request)
        request.due += 1
        self._calendar.setdefault(request.due, []).append(request)

    monkeypatch.setattr(DecodeLane, "_enter_calendar", enter)


def hit_the_last_token(monkeypatch):
    real = BlockTables.find_hit

    def find_hit(self, request):
        request.output_token_ids.append(0)
        try:
            return real(self, request)
        finally:
            request.output_token_ids.pop()

    monkeypatch.setattr(BlockTables, "find_hit", find_hit)


def publish_what_is_not_computed(monkeypatch):
    real = BlockTables.take_hit

    def take_hit(self, request):
        real(self, request)
        request.num_computed_tokens = request.num_hit_tokens
        missing = request.num_tokens - request.num_hit_tokens
        if self.grow(request, missing, missing):
            self.publish(request, request.num_tokens)

    monkeypatch.setattr(BlockTables, "take_hit", take_hit)


def adopt_any_block(monkeypatch):
    monkeypatch.setattr(FullGroup, "hit_blocks", lambda self, find, count: [1] * count)


def count_cancelled_results(monkeypatch):
    def leave(self, request):
        if request in self.lane:
            self.lane.leave(request)
        elif request in self.chunked:
            self.chunked.remove(request)

    monkeypatch.setattr(Lifecycle, "_leave_steps", leave)


# Drafts


def advance_by_all_drafts(monkeypatch):
    real = scheduler.record_drafts

    def record_drafts(step, result, lane, gone, counters):
        before = {row: request.num_drafts_in_flight for row, request in lane.members.items()}
        real(step, result, lane, gone, counters)
        for row, request in lane.members.items():
            request.num_drafts_in_flight = before[row]

    monkeypatch.setattr(scheduler, "record_drafts", record_drafts)


def count_no_draft_in_flight(monkeypatch):
    real = DecodeLane.position
    monkeypatch.setattr(
        DecodeLane, "position", lambda self, r: real(self, r) - r.num_drafts_in_flight
    )


def release_windows_by_the_upper_bound(monkeypatch):
    real = BlockTables.release_unread
    monkeypatch.setattr(
        BlockTables,
        "release_unread",
        lambda self, request, position: real(
            self, request, position + request.num_drafts_in_flight
        ),
    )


def publish_a_slot_that_a_rejected_draft_wrote(monkeypatch):
    real = Request.num_reusable_tokens.fget
    monkeypatch.setattr(
        Request, "num_reusable_tokens", property(lambda self: real(self) + self.is_decoding)
    )


def ignore_drafts_in_the_budget(monkeypatch):
    real = DecodeLane.plan_drafts
    monkeypatch.setattr(DecodeLane, "plan_drafts", lambda self, most: real(self, 1 << 20))


def draft_beyond_the_last_token(monkeypatch):
    monkeypatch.setattr(
        DecodeLane, "room", lambda self, request: request.capacity - self.position(request)
    )


def draft_beyond_the_blocks(monkeypatch):
    monkeypatch.setattr(DecodeLane, "room", lambda self, request: self.stride)


def look_at_the_last_token_only(monkeypatch):
    monkeypatch.setattr(scheduler, "find_stop", lambda stopped, num_new: (check_stop(stopped), 0))


def keep_what_follows_a_stop(monkeypatch):
    real = scheduler.find_stop

    def find_stop(request, num_new):
        return real(request, num_new)[0], 0

    monkeypatch.setattr(scheduler, "find_stop", find_stop)


# State


def start_from_what_a_block_held(monkeypatch):
    real = StateBlocks.take_changes
    monkeypatch.setattr(StateBlocks, "take_changes", lambda self: (real(self)[0], []))


def start_a_hit_without_its_state(monkeypatch):
    real = StateBlocks.take_changes
    monkeypatch.setattr(StateBlocks, "take_changes", lambda self: ([], real(self)[1]))


def copy_the_state_before_the_last_chunk(monkeypatch):
    real = StateBlocks.make_snapshot

    def make_snapshot(self, request):
        request.num_state_updates -= 1
        real(self, request)
        request.num_state_updates += 1

    monkeypatch.setattr(StateBlocks, "make_snapshot", make_snapshot)


def keep_a_snapshot_one_block_off(monkeypatch):
    real, publish = StateBlocks._ends, StateBlocks.publish

    def ends(self, request, after):
        return [end - self._border for end in real(self, request, after) if end > self._border]

    def off(self, request, num_tokens):
        for end in [end for end in request.snapshots if end < num_tokens]:
            request.snapshots[end + self._border] = request.snapshots.pop(end)
        publish(self, request, num_tokens)

    monkeypatch.setattr(StateBlocks, "_ends", ends)
    monkeypatch.setattr(StateBlocks, "publish", off)


def keep_a_snapshot_one_token_off(monkeypatch):
    real = StateBlocks._ends

    def ends(self, request, after):
        return [end + 1 for end in real(self, request, after) if end + 1 < request.num_tokens]

    monkeypatch.setattr(StateBlocks, "_ends", ends)


def go_on_in_a_snapshot_that_stays_findable(monkeypatch):
    monkeypatch.setattr(BlockPool, "forget", lambda self, block: None)


def keep_more_snapshots_than_their_share(monkeypatch):
    real = StateBlocks._make_room

    def make_room(self):
        most, self._most = self._most, self._pool.num_blocks
        try:
            return real(self)
        finally:
            self._most = most

    monkeypatch.setattr(StateBlocks, "_make_room", make_room)


def resume_a_state_that_went_on(monkeypatch):
    def pause(self, request, stop):
        self._leave_steps(request)
        streaming_input.pause(request, stop)
        return self.take_input(request)

    monkeypatch.setattr(Lifecycle, "pause", pause)


# Admission


def preempt_an_indivisible_prompt(monkeypatch):
    monkeypatch.setattr(Request, "is_protected", False)


def split_an_indivisible_prompt(monkeypatch):
    real = Scheduler.add

    def add(self, request):
        real(self, request)
        request.is_whole = False

    monkeypatch.setattr(Scheduler, "add", add)


def admit_what_still_waits(monkeypatch):
    monkeypatch.setattr(Request, "is_ready", True)


# Adapters


def take_no_adapter_slot(monkeypatch):
    def enter(self, request):
        for resource in self._held[:2]:
            resource.take(request)

    monkeypatch.setattr(Resources, "enter", enter)


def take_the_slot_of_a_step_in_flight(monkeypatch):
    monkeypatch.setattr(SlotAllocator, "_is_unused", lambda self, number: not self._users[number])


def take_a_slot_that_is_used(monkeypatch):
    monkeypatch.setattr(SlotAllocator, "_evictable", lambda self: next(iter(self._slots), None))


def load_weights_that_are_not_there(monkeypatch):
    real = SlotAllocator._may_take_slot

    def may_take_slot(self, number, is_overdue):
        self.kept, kept = {number}, self.kept
        try:
            return real(self, number, is_overdue)
        finally:
            self.kept = kept

    monkeypatch.setattr(SlotAllocator, "_may_take_slot", may_take_slot)


def leave_the_adapter_before_in_a_slot(monkeypatch):
    real = SlotAllocator._fill

    def fill(self, number):
        real(self, number)
        if self._slots[number] == 1:
            self._loads.setdefault(1, number)
            del self._loads[1]

    monkeypatch.setattr(SlotAllocator, "_fill", fill)


def want_more_than_fits(monkeypatch):
    real = SlotAllocator._may_take_slot

    def may_take_slot(self, number, is_overdue):
        may = real(self, number, is_overdue)
        if not may:
            self.wanted[number] = None
        return may

    monkeypatch.setattr(SlotAllocator, "_may_take_slot", may_take_slot)


# Planted bugs: transfers


def drop_the_lease(monkeypatch):
    real = Transfers._lease

    def lease(self, blocks):
        number = real(self, blocks)
        self._leases[number].end()
        return number

    monkeypatch.setattr(Transfers, "_lease", lease)


def read_what_comes_late(monkeypatch):
    real = Transfers.begin_load

    def begin_load(self, request, outstanding):
        begun = real(self, request, outstanding)
        if begun:
            self._memory.publish(request, request.load.num_tokens)
            self.give_up(request)
        return begun

    monkeypatch.setattr(Transfers, "begin_load", begin_load)


def keep_what_a_failed_load_left(monkeypatch):
    real = Transfers.end
    monkeypatch.setattr(Transfers, "end", lambda self, done, failed: real(self, done + failed, []))


def store_what_is_gone(monkeypatch):
    monkeypatch.setattr(Transfers, "evicted", lambda self, block, key: None)


# Planted bugs: media


def drop_rows_that_are_held(monkeypatch):
    real = EncoderCache._make_room

    def make_room(self, *args):
        held = [output.holders for output in self._outputs.values()]
        for output in self._outputs.values():
            output.holders = set()
        self._wanted.clear()
        try:
            return real(self, *args)
        finally:
            for output, holders in zip(self._outputs.values(), held, strict=True):
                output.holders = holders

    monkeypatch.setattr(EncoderCache, "_make_room", make_room)


def hold_rows_of_a_request_that_left(monkeypatch):
    monkeypatch.setattr(EncoderCache, "give_back", lambda self, request: None)


def split_a_bidirectional_item(monkeypatch):
    monkeypatch.setattr(Request, "end_of_chunk", lambda self, position, end: end)


def begin_inside_a_bidirectional_item(monkeypatch):
    real = Request.end_of_chunk
    monkeypatch.setattr(
        Request, "end_of_chunk", lambda self, p, end: real(self, p, end) if p else end
    )


def use_rows_that_are_not_there(monkeypatch):
    real = EncoderCache._begin
    monkeypatch.setattr(
        EncoderCache, "_begin", lambda self, item, is_ready: real(self, item, is_ready=True)
    )


def pass_an_item_without_rows(monkeypatch):
    real = EncoderCache._look
    monkeypatch.setattr(
        EncoderCache,
        "_look",
        lambda self, r, first, end: real(self, r, first, end)._replace(end=end),
    )


def keep_rows_that_failed(monkeypatch):
    monkeypatch.setattr(EncoderCache, "fail", lambda self, step_id, digests: None)


def keep_rows_of_other_weights(monkeypatch):
    monkeypatch.setattr(EncoderCache, "forget_all", lambda self: None)


def drop_rows_without_a_word(monkeypatch):
    real = EncoderCache.take_changes
    monkeypatch.setattr(
        EncoderCache, "take_changes", lambda self, step_id: ([], real(self, step_id)[1])
    )


def take_rows_from_the_first(monkeypatch):
    def spans(self):
        for start, end in self.places:
            yield EmbeddedSpan(start, end, self.digest, 0, self.is_bidirectional)

    monkeypatch.setattr(MediaItem, "spans", spans)


BUGS = [
    drop_rows_that_are_held,
    hold_rows_of_a_request_that_left,
    split_a_bidirectional_item,
    begin_inside_a_bidirectional_item,
    use_rows_that_are_not_there,
    pass_an_item_without_rows,
    keep_rows_that_failed,
    keep_rows_of_other_weights,
    drop_rows_without_a_word,
    take_rows_from_the_first,
    drop_the_lease,
    read_what_comes_late,
    keep_what_a_failed_load_left,
    store_what_is_gone,
    leave_the_weights_out_of_keys,
    leave_digests_out_of_keys,
    leave_the_source_out_of_keys,
    name_a_source_by_its_digest_alone,
    read_a_source_that_is_not_written,
    write_no_source,
    encode_no_source,
    take_a_source_after_others_took_its_blocks,
    forget_the_prefix,
    leave_the_adapter_out_of_keys,
    touch_without_counting,
    one_block_late,
    window_one_short,
    boundary_one_late,
    hit_the_last_token,
    publish_what_is_not_computed,
    adopt_any_block,
    count_cancelled_results,
    advance_by_all_drafts,
    count_no_draft_in_flight,
    release_windows_by_the_upper_bound,
    publish_a_slot_that_a_rejected_draft_wrote,
    ignore_drafts_in_the_budget,
    draft_beyond_the_last_token,
    draft_beyond_the_blocks,
    look_at_the_last_token_only,
    keep_what_follows_a_stop,
    start_from_what_a_block_held,
    start_a_hit_without_its_state,
    copy_the_state_before_the_last_chunk,
    keep_a_snapshot_one_block_off,
    keep_a_snapshot_one_token_off,
    go_on_in_a_snapshot_that_stays_findable,
    keep_more_snapshots_than_their_share,
    resume_a_state_that_went_on,
    preempt_an_indivisible_prompt,
    split_an_indivisible_prompt,
    admit_what_still_waits,
    take_no_adapter_slot,
    take_the_slot_of_a_step_in_flight,
    take_a_slot_that_is_used,
    load_weights_that_are_not_there,
    leave_the_adapter_before_in_a_slot,
    want_more_than_fits,
]


LATE = (want_more_than_fits,)
"""Bugs that take many traces to be seen."""


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
@pytest.mark.sharp(when=lambda plant: plant not in LATE)
def test_a_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_traces(0, 1200)
