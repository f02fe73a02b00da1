"""Cores that share experts, in processes of their own: the tokens of one core, whatever dies."""

import os
import signal

import psutil
import pytest

from quire import EngineArgs, SamplingParams
from quire.engine.wire.control_calls import Utility
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.errors import EngineError, RequestError
from quire.testing.checkpoints import make_checkpoint
from tests.engine.launched import launch_async, launch_sync
from tests.support.needs import needs_ranks

pytestmark = pytest.mark.slow

NUM_TOKENS = 24
RANKS = {
    "tensor_parallel_size": 2,
    "worker_extension_cls": "tests.executor.rank_extension.RankExtension",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("moe"), "tiny", family="qwen3_moe", dtype="float32"
    )


def plan_of(folder, **wishes):
    args = EngineArgs(
        model=str(folder),
        max_num_seqs=8,
        num_gpu_blocks_override=200,
        max_model_len=256,
        logits_processors=["tests.support.poison:Poison"],
        **wishes,
    )
    return args.create_engine_config()


def request(handle, rank=None, max_tokens=NUM_TOKENS, **extra):
    params = SamplingParams(
        temperature=0.7 * (handle % 2),
        repetition_penalty=1.1,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args=extra or None,
    )
    prompt = [(7 * handle + 3 * place) % 1000 for place in range(5 + 9 * handle)]
    return EngineCoreRequest(handle, prompt, params, handle, 0.0, data_parallel_rank=rank)


class Crowd:
    """Requests of one client, read until all have ended; `at` does something after so many
    outputs.
    """

    def __init__(self, client):
        self.client = client
        self.tokens, self.ends, self.live = {}, {}, set()
        self.at = {}
        self.num_outputs = 0

    def add(self, *requests):
        for one in requests:
            self.tokens[one.handle] = []
            self.live.add(one.handle)
            self.client.add_request(one)

    def run(self):
        while self.live:
            for one in self.client.get_output():
                self.tokens[int(one.request_id)] += one.new_token_ids
                self.num_outputs += 1
                if one.finished:
                    self.ends[int(one.request_id)] = one.finish_reason
                    self.live.discard(int(one.request_id))
                if self.num_outputs in self.at:
                    self.at.pop(self.num_outputs)()
        return self.tokens


@pytest.fixture(scope="module")
def expected(folder):
    client = launch_sync(plan_of(folder))
    try:
        crowd = Crowd(client)
        crowd.add(*map(request, range(8)))
        return crowd.run()
    finally:
        client.shutdown()


@pytest.fixture(
    scope="module", params=["cores", pytest.param("ranks", marks=[pytest.mark.full, *needs_ranks])]
)
def wishes(request):
    """The options of two cores, with one worker each or with ranks."""
    sizes = RANKS if request.param == "ranks" else {}
    return {"data_parallel_size": 2, "enable_expert_parallel": True, **sizes}


@pytest.fixture(scope="module")
def client(folder, wishes):
    """One engine for all tests: what one does to it, it must have survived in the next."""
    before = set(psutil.Process().children(recursive=True))
    plan = plan_of(folder, **wishes)
    found = launch_sync(plan, max_restarts=3)
    yield found
    found.shutdown()
    assert set(psutil.Process().children(recursive=True)) == before


def kill(client, rank, how=signal.SIGKILL):
    os.kill(client.core_status(rank).pid, how)


def rest(client):
    """Wait until the coordinator has heard that both cores have nothing, and their wave is over."""
    coordinator = client.remote.coordinator
    while True:
        latest = coordinator.latest
        has_work = [one.num_running_reqs + one.num_waiting_reqs for one in latest.stats.values()]
        if latest.wave and not latest.is_running and has_work == [0, 0]:
            return
        client._wait(5.0)
        client._take()


def test_two_cores_give_the_tokens_of_one_in_wave_after_wave(client, expected):
    crowd = Crowd(client)
    crowd.add(*(request(handle, handle % 2) for handle in range(8)))
    assert crowd.run() == expected
    for rank in (0, 1):  # a request that comes to cores at rest wakes all of them
        alone = Crowd(client)
        alone.add(request(3, rank))
        assert alone.run() == {3: expected[3]}
    rest(client)


def test_control_calls_and_what_is_refused(client, expected):
    client.call(Utility("sleep", (1, "keep")))
    assert client.call(Utility("is_sleeping")) is True
    assert client.call(Utility("wake_up")) is True
    with pytest.raises(RequestError, match="other cores compute with the experts"):
        client.call(Utility("sleep", (2,)))
    assert client.call(Utility("reset_prefix_cache")) is True
    client.call(Utility("collective_rpc", ("reload_weights",)))
    client.call(Utility("pause_scheduler", ("keep",)))
    crowd = Crowd(client)
    crowd.add(request(1, 0), request(2, 1))
    client.call(Utility("resume_scheduler"))
    assert crowd.run() == {1: expected[1], 2: expected[2]}
    with pytest.raises(EngineError, match="is fixed"):
        client.remote.require_scalable()


def test_a_step_that_fails_in_one_core_costs_one_request(client, expected):
    """Its halves are rounds of their own, while the other core decodes."""
    crowd, num_restarts = Crowd(client), client.num_restarts
    bad = request(4, 0)
    bad.sampling_params.extra_args = {"raise_at": 6}
    crowd.add(request(0, 0), request(1, 1), request(2, 0), request(3, 1), bad)
    found = crowd.run()
    assert crowd.ends.pop(4) is FinishReason.ERROR
    assert found.pop(4) == expected[4][:6]
    assert found == {handle: expected[handle] for handle in range(4)}
    assert set(crowd.ends.values()) == {FinishReason.LENGTH}
    assert client.num_restarts == num_restarts


@pytest.mark.full
def test_aborted_requests_leave_their_cores_and_change_no_other(client, expected):
    """Also where a core has no others, and serves its experts from then on."""
    num_restarts = client.num_restarts
    for aborted in ((6, 7), (0, 2, 4, 6), (0, 1, 2, 4, 5, 6, 7)):
        crowd = Crowd(client)

        def abort(crowd=crowd, aborted=aborted):
            client.abort_requests(aborted)
            crowd.live.difference_update(aborted)

        crowd.at[12] = abort
        crowd.add(*(request(handle, handle % 2) for handle in range(8)))
        for handle, tokens in crowd.run().items():
            seen = len(tokens) if handle in aborted else NUM_TOKENS
            assert tokens == expected[handle][:seen]
        rest(client)
    alone = Crowd(client)
    alone.add(request(3, 0))
    assert alone.run() == {3: expected[3]}
    assert client.num_restarts == num_restarts


@pytest.mark.full
@pytest.mark.parametrize(
    "call",
    [
        *(("fail_with", rank, 5 + rank) for rank in (0, 1)),
        *(
            ("fail_inside", rank, 7 + 2 * layer + rank, layer)
            for rank in (0, 1)
            for layer in (0, 1)
        ),
    ],
)
def test_a_pass_that_fails_on_one_rank_costs_one_request(client, wishes, expected, call):
    """Before its round, or in the middle of it, where the other rank waits for this one."""
    if "tensor_parallel_size" not in wishes:
        pytest.skip("cores with one worker have no ranks")
    method, *given = call
    crowd, num_restarts = Crowd(client), client.num_restarts
    client.call(Utility("collective_rpc", (method, None, given)))
    bad = request(4, 0)
    bad.prompt_token_ids[:2] = [given[1]] * 2
    crowd.add(request(0, 0), request(1, 1), request(2, 0), request(3, 1), bad)
    found = crowd.run()
    assert crowd.ends.pop(4) is FinishReason.ERROR
    assert found.pop(4) == []
    assert found == {handle: expected[handle] for handle in range(4)}
    assert client.num_restarts == num_restarts


@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_death_of_one_core_restarts_the_group(client, expected, victim, how):
    crowd, num_restarts = Crowd(client), client.num_restarts
    crowd.at[40] = lambda: kill(client, victim, how)
    crowd.add(*(request(handle, handle % 2) for handle in range(8)))
    assert crowd.run() == expected
    assert client.num_restarts == num_restarts + 2
    first, second = (client.core_status(rank).incarnation for rank in (0, 1))
    assert first == second


@pytest.mark.full
def test_a_core_that_dies_at_rest_is_back_for_the_next_request(client, expected):
    crowd = Crowd(client)
    kill(client, 1)
    crowd.add(request(5, 0))
    assert crowd.run() == {5: expected[5]}


@pytest.mark.full
def test_a_poisonous_request_in_one_core_costs_itself_alone(client, expected):
    crowd = Crowd(client)
    crowd.add(request(1, 1), request(2, 0), request(4, 0, poison_at=8))
    found = crowd.run()
    assert crowd.ends == {
        1: FinishReason.LENGTH, 2: FinishReason.LENGTH, 4: FinishReason.ERROR
    }  # fmt: skip
    assert found == {1: expected[1], 2: expected[2], 4: expected[4][:8]}


@pytest.mark.full
@pytest.mark.parametrize(("core", "rank", "at"), [(0, 1, "begin"), (1, 0, "_run")])
def test_a_rank_that_hangs_is_found_though_all_others_wait_for_it(
    client, wishes, expected, core, rank, at
):
    if "tensor_parallel_size" not in wishes:
        pytest.skip("cores with one worker have no ranks")
    crowd, num_restarts = Crowd(client), client.num_restarts
    client.call(Utility("collective_rpc", ("hang_after", None, [core, rank, 12, at])))
    crowd.add(*(request(handle, handle % 2) for handle in range(8)))
    assert crowd.run() == expected
    assert client.num_restarts == num_restarts + 2


@pytest.mark.full
def test_a_request_that_hangs_its_core_is_found_though_the_others_wait_for_it(
    client, wishes, expected
):
    if "tensor_parallel_size" in wishes:
        pytest.skip("ranks that hang in their first step are found after five minutes, twice")
    limit_s, client.remote.longest_turn_s = client.remote.longest_turn_s, 2.5
    try:
        crowd = Crowd(client)
        crowd.add(request(1, 1), request(4, 0, hang_at=8))
        found = crowd.run()
    finally:
        client.remote.longest_turn_s = limit_s
    assert crowd.ends == {1: FinishReason.LENGTH, 4: FinishReason.ERROR}
    assert found == {1: expected[1], 4: expected[4][:8]}


def test_the_coordinator_may_be_killed_at_any_time(client, expected):
    coordinator = client.remote.coordinator
    before = coordinator.num_restarts, client.num_restarts
    crowd = Crowd(client)
    crowd.at[20] = lambda: os.kill(coordinator.pid, signal.SIGTERM)  # left to the front end
    crowd.at[40] = lambda: os.kill(coordinator.pid, signal.SIGKILL)
    crowd.add(*(request(handle, handle % 2) for handle in range(8)))
    assert crowd.run() == expected
    os.kill(coordinator.pid, signal.SIGKILL)  # between two waves
    later = Crowd(client)
    later.add(request(6, 1))
    assert later.run() == {6: expected[6]}
    assert (coordinator.num_restarts, client.num_restarts) == (before[0] + 2, before[1])


async def _drained(client, num_requests):
    live = num_requests
    tokens = {}
    while live:
        for one in await client.get_output():
            tokens.setdefault(int(one.request_id), []).extend(one.new_token_ids)
            live -= one.finished
    return tokens


@pytest.mark.full
@pytest.mark.anyio
async def test_an_event_loop_hears_of_the_coordinators_death(folder, expected):
    client = launch_async(plan_of(folder, data_parallel_size=2, enable_expert_parallel=True))
    try:
        os.kill(client.remote.coordinator.pid, signal.SIGKILL)
        client.add_request(request(2, 1))
        client.add_request(request(3, 0))
        assert await _drained(client, 2) == {2: expected[2], 3: expected[3]}
        assert client.remote.coordinator.num_restarts == 1
        with pytest.raises(EngineError, match="is fixed"):
            await client.scale(3, 1.0)
    finally:
        client.shutdown()


@pytest.mark.full
def test_requests_may_finish_when_all_are_told_to_end(client):
    """The last test of `client`."""
    processes = dict(client.remote.pool.processes)
    client.add_request(request(7, 1))
    client.shutdown(30.0)
    assert [process.exit_code for process in processes.values()] == [0, 0]
