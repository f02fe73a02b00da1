"""Which waiting request gets a row, and when: the order, the limits, and what it waits for."""

import pytest

from tests.scheduling.scene import NOTHING, Scene


def test_no_more_requests_run_than_there_are_rows():
    scene = Scene(max_num_seqs=2)
    for handle in range(3):
        scene.add(handle, 3, max_tokens=2)
    scene.step()
    assert scene.running == [0, 1] and scene.waiting == [2]
    scene.steps(2)
    assert scene.running == [2], "a row is free again"


def test_the_first_that_does_not_fit_holds_back_those_after_it():
    scene = Scene(num_blocks=5, max_num_batched_tokens=8, max_len=16)
    scene.add(0, 8, max_tokens=1)
    scene.add(1, 12, max_tokens=1)
    scene.add(2, 1, max_tokens=1)
    scene.step()
    assert scene.waiting == [1, 2], "request 2 would fit, and must not overtake"


def test_a_prompt_in_chunks_keeps_the_blocks_for_its_rest():
    scene = Scene(num_blocks=5, max_num_batched_tokens=6, max_len=16)
    scene.add(0, 12, max_tokens=1)
    assert scene.tokens(scene.step()) == {0: 6}
    assert scene.num_free == 2
    scene.add(1, 8, max_tokens=1)
    assert scene.tokens(scene.step()) == {0: 6}, "one of the two free blocks is for these"
    assert scene.tokens(scene.step()) == {1: 6}


def test_a_step_counts_once_what_each_running_request_still_needs(monkeypatch):
    scene = Scene(max_num_batched_tokens=30)
    memory, counted = scene.scheduler.memory, []
    outstanding = memory.outstanding

    def counting(requests):
        counted.append([request.handle for request in requests])
        return outstanding(requests)

    scene.add(0, 40)
    scene.step()
    monkeypatch.setattr(memory, "outstanding", counting)
    for handle in range(1, 5):
        scene.add(handle, 5)
    scene.step()
    assert scene.running == [0, 1, 2, 3, 4]
    assert counted == [[0], [1], [2], [3]], "not all of them again for each that is admitted"
    assert scene.scheduler._life.blocks._outstanding == 0, "nobody lacks blocks for its tokens"


def test_by_priority_the_smallest_number_is_admitted_first():
    scene = Scene(policy="priority", max_num_seqs=1)
    scene.add(0, 3, max_tokens=2, priority=1)
    scene.add(1, 3, max_tokens=1, priority=2)
    scene.step()
    scene.add(2, 3, max_tokens=1, priority=0)
    assert scene.waiting == [2, 1], "and a running request is not stopped for it"
    scene.step()
    assert scene.running == []
    scene.step()
    assert scene.waiting == [1]


# Waiting for something outside


class Later:
    """Something that is ready when the test says so."""

    is_ready = False

    def wait(self, timeout_s):
        raise AssertionError("the scheduler never blocks")


def test_a_request_waits_for_everything_outside_and_others_overtake_it():
    scene = Scene()
    grammar, weights = Later(), Later()
    scene.add(0, 3, prerequisites=[grammar, weights])
    scene.add(1, 3)
    assert scene.scheduler.waiting.num_deferred == 1
    scene.step()
    assert scene.running == [1]
    grammar.is_ready = True
    scene.step()
    assert scene.running == [1], "the other one is missing"
    assert scene.scheduler.waiting.num_deferred == 1
    weights.is_ready = True
    assert scene.scheduler.waiting.num_deferred == 0, "it waits for room alone"
    scene.step()
    assert scene.running == [0, 1]


def test_a_grammar_is_something_to_wait_for():
    scene = Scene()
    grammar = Later()
    request = scene.add(0, 3, grammar=grammar)
    assert list(request.prerequisites) == [grammar]
    assert scene.plan() is None and scene.scheduler.has_work


# Further resources


class AtMostOne:
    """A resource of which one request at a time can have a share."""

    is_exhausted = False

    def __init__(self, wants, holds_back_others):
        self.wants = wants
        self.holds_back_others = holds_back_others
        self.holders = []

    def offer(self, request, want):
        return 0 if request.handle in self.wants and self.holders else want

    def take(self, request):
        if request.handle in self.wants:
            self.holders.append(request.handle)

    def give_back(self, request):
        if request.handle in self.wants:
            self.holders.remove(request.handle)


def test_a_resource_of_the_builder_limits_admission_like_rows_and_blocks():
    scarce = AtMostOne(wants={0, 1}, holds_back_others=False)
    scene = Scene([scarce])
    for handle in range(3):
        scene.add(handle, 3, max_tokens=2)
    scene.step()
    assert scene.running == [0, 2] and scarce.holders == [0], "request 1 is passed over"
    scene.steps(2)
    assert scene.running == [1] and scarce.holders == [1]


def test_a_resource_can_hold_back_those_after_a_request():
    scene = Scene([AtMostOne(wants={0, 1}, holds_back_others=True)])
    for handle in range(3):
        scene.add(handle, 3, max_tokens=2)
    scene.step()
    assert scene.running == [0]


def test_a_preempted_request_gives_its_share_back():
    scarce = AtMostOne(wants={0}, holds_back_others=False)
    scene = Scene([scarce])
    scene.add(0, 3)
    scene.step()
    scene.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert scarce.holders == [] and scene.waiting == [0]


# Indivisible prompts


def test_an_indivisible_prompt_waits_for_a_step_with_room_for_all_of_it():
    scene = Scene(max_num_batched_tokens=8)
    scene.add(0, 3, max_tokens=3)
    scene.step()
    scene.add(1, 7, max_tokens=1, is_indivisible=True)
    scene.add(2, 7, max_tokens=1, is_indivisible=True)
    plan = scene.plan()
    assert scene.tokens(plan) == {0: 1, 1: 7}
    scene.finish(plan)
    plan = scene.plan()
    assert scene.tokens(plan) == {0: 1, 2: 7}


@pytest.mark.parametrize(("is_indivisible", "victim"), [(False, 1), (True, 0)])
def test_an_indivisible_prompt_in_flight_is_not_preempted(is_indivisible, victim):
    scene = Scene(num_blocks=6, max_len=16)
    scene.add(0, 4)
    scene.steps(4)
    scene.add(1, 12, max_tokens=2, is_indivisible=is_indivisible)
    scene.plan()
    assert scene.running == [0, 1] and scene.num_free == 0
    scene.plan()  # request 0 needs a block now
    assert scene.waiting == [victim]


def test_a_model_that_keeps_nothing_needs_no_blocks_and_reuses_nothing():
    scene = Scene(groups=(NOTHING,), num_blocks=2)
    for handle in range(2):
        scene.add(handle, list(range(40)), max_tokens=1, is_indivisible=True)
    plan = scene.step()
    assert [new.block_ids for new in plan.added] == [([],)]
    assert scene.num_free == 1
    plan = scene.step()
    assert plan.added[0].num_computed_tokens == 0
