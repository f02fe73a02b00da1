"""The scheduler against the hash model: ten thousand random lives; planted bugs show."""

from collections import Counter

import pytest

from quire.scheduling import block_tables, prefix_cache
from quire.scheduling.block_groups import SlidingGroup
from quire.scheduling.block_pool import BlockPool
from quire.scheduling.block_tables import BlockTables
from quire.scheduling.decode_lane import DecodeLane
from quire.testing.simulate import Trace, run_traces

NUM_TRACES = 10_000
PART = 1_000


@pytest.mark.parametrize("first", range(0, NUM_TRACES, PART))
def test_every_request_gets_its_text(first):
    run_traces(first, PART)


def test_the_traces_meet_what_they_are_for():
    met = Counter()
    for seed in range(300):
        trace = Trace(seed)
        trace.run()
        met["preemptions"] += trace.scheduler.num_preemptions
        met["prefix hits"] += trace.scheduler.prefix_hits
        met["depth 2"] += trace.depth == 2
        met["windows"] += trace.config.windows != (None,)
        met["aborted"] += sum(e.is_cut for e in trace.expected.values())
        met["further turns"] += sum(len(e.turns) for e in trace.expected.values())
        for expectation in trace.expected.values():
            met[expectation.reason] += 1
    assert all(count >= 5 for count in met.values()), met
    assert len(met) >= 6 + 4


def test_equal_seeds_give_equal_lives():
    first, second = Trace(11), Trace(11)
    first.run()
    second.run()
    assert first.num_steps == second.num_steps
    assert [e.output for e in first.expected.values()] == [
        e.output for e in second.expected.values()
    ]


def forget_the_prefix(monkeypatch):
    real = prefix_cache.next_key
    monkeypatch.setattr(
        prefix_cache, "next_key", lambda parent, ids: real(prefix_cache.root_key(None), ids)
    )


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

    def grow(self, request, count):
        return real(self, request, count - 1) if count > 1 else real(self, request, count)

    monkeypatch.setattr(BlockTables, "grow", grow)


def window_one_short(monkeypatch):
    real = SlidingGroup.num_unread
    monkeypatch.setattr(SlidingGroup, "num_unread", lambda self, p: real(self, p + 1))


def boundary_one_late(monkeypatch):
    real = DecodeLane._enter_calendar

    def enter(self, request, position):
        real(self, request, position + 1)

    monkeypatch.setattr(DecodeLane, "_enter_calendar", enter)


def hit_the_last_token(monkeypatch):
    real = BlockTables.hit

    def hit(self, request):
        request.output_token_ids.append(0)
        try:
            return real(self, request)
        finally:
            request.output_token_ids.pop()

    monkeypatch.setattr(BlockTables, "hit", hit)


def publish_what_is_not_computed(monkeypatch):
    real = BlockTables.adopt

    def adopt(self, request, hit):
        real(self, request, hit)
        if self.room(request, request.num_tokens - hit) == request.num_tokens - hit:
            request.num_computed_tokens = hit
            self.grow(request, request.num_tokens - hit)
            self.publish(request, request.num_tokens)

    monkeypatch.setattr(BlockTables, "adopt", adopt)


def keep_void_results(monkeypatch):
    monkeypatch.setattr(
        "quire.scheduling.scheduler.Scheduler._leave_steps",
        lambda self, request: (
            self.lane.leave(request)
            if request in self.lane
            else self.chunked.remove(request)
            if request in self.chunked
            else None
        ),
    )


def ignore_the_salt_of_keys(monkeypatch):
    monkeypatch.setattr(block_tables, "hit_blocks", lambda group, find, n, position: [1] * n)


BUGS = [
    forget_the_prefix,
    touch_without_counting,
    one_block_late,
    window_one_short,
    boundary_one_late,
    hit_the_last_token,
    publish_what_is_not_computed,
    keep_void_results,
    ignore_the_salt_of_keys,
]


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_traces(0, 400)
