"""Processes that a launcher has started have an engine each, which all give the bits of one rank.

The processes are threads here, which exchange by shared memory as processes do;
`python -m torch.distributed.run --nproc-per-node 2 -m tests.executor.ranks.launched_run` starts
real ones.
"""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.engine.core.builder import build_core
from quire.engine.wire.output_parts import FinishReason
from quire.errors import EngineDeadError, InvalidParameter, LoadError
from quire.hardware.launched import launched_process
from quire.testing import make_checkpoint
from tests.executor.ranks.test_multiproc import DRAFTS, EXTENSION, SHAPE, repeating
from tests.executor.worker_cores import plan_of, requests, same_bits, serve
from tests.support.needs import needs_ranks

pytestmark = needs_ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), SHAPE, "llama", dtype="float32")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def environment(rank, size, port):
    return {
        "RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_RANK": f"{rank}",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}",
    }  # fmt: skip


def plans_of(folder, monkeypatch, size, **wishes):
    """The plans of processes, each of which has its own environment."""
    port, found = free_port(), []
    for rank in range(size):
        for name, value in environment(rank, size, port).items():
            monkeypatch.setenv(name, value)
        backend = {"distributed_executor_backend": "external_launcher"}
        found.append(plan_of(folder, **backend | {"cpu_threads": 1}, **wishes))
    return found


def on_all(work, given):
    with ThreadPoolExecutor(len(given)) as pool:
        return [f.result(120) for f in [pool.submit(work, each) for each in given]]


def served(plan, given):
    core = build_core(plan)
    try:
        return serve(core, list(given))
    finally:
        core.shutdown()


def asked():
    found = [*requests(), *repeating()]
    for handle, request in enumerate(found):
        request.handle = handle
    return found


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), pytest.param((2, 2), marks=pytest.mark.full)])
def test_every_engine_has_the_bits_of_one_rank(folder, monkeypatch, sizes):
    tp, pp = sizes
    wishes = {"speculative_config": DRAFTS}
    right = served(plan_of(folder, **wishes), asked())
    parallel = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp}
    plans = plans_of(folder, monkeypatch, tp * pp, **wishes | parallel)
    assert [plan.parallel.launched.rank for plan in plans] == list(range(tp * pp))
    every = on_all(lambda plan: served(plan, asked()), plans)
    assert right.num_accepted > 3 and right.logprobs and right.prompts
    for found in every:
        assert same_bits(found, right)
        assert found.num_accepted > 3


@pytest.fixture
def pair(folder, monkeypatch):
    """The cores of two processes that share layers."""
    wishes = {"tensor_parallel_size": 2, "worker_extension_cls": EXTENSION}
    cores = on_all(build_core, plans_of(folder, monkeypatch, 2, **wishes))
    yield cores
    on_all(lambda core: core.shutdown(), cores)


@pytest.mark.parametrize("rank", range(2))
def test_a_request_that_fails_on_one_process_ends_alone_on_all(pair, rank):
    right = on_all(lambda core: serve(core, list(requests(5))), pair)[0]
    for core in pair:
        core.executor.collective_rpc("fail_with", (rank, 299), {})
    given = [list(requests(5)) for _ in pair]
    for each in given:
        each[2].prompt_token_ids = [299, 299, *each[2].prompt_token_ids]
    with ThreadPoolExecutor(2) as pool:
        every = list(pool.map(serve, pair, given))
    for found in every:
        assert found.ends[2].reason is FinishReason.ERROR
        others = [handle for handle in right.tokens if handle != 2]
        assert {h: found.tokens[h] for h in others} == {h: right.tokens[h] for h in others}


def test_calls_reach_the_worker_of_their_own_process(pair):
    assert [core.executor.collective_rpc("rank_and_pid", (), {})[0][0] for core in pair] == [0, 1]
    assert pair[0].executor.driver_worker.rank == 0


def test_engines_that_get_other_requests_say_so_and_do_not_hang(pair):
    def serve_own(core):
        given = list(requests(3))
        if core is pair[1]:
            given[1].prompt_token_ids = given[1].prompt_token_ids[:-1]
        with pytest.raises(EngineDeadError, match="planned different steps"):
            serve(core, given)

    on_all(serve_own, pair)


def test_other_options_are_an_error_before_anything_is_loaded(folder, monkeypatch):
    plans = plans_of(folder, monkeypatch, 2, tensor_parallel_size=2)
    plans[1] = plans[1].changed(max_model_len=48)

    def refused(plan):
        with pytest.raises(InvalidParameter, match="max_model_len.*another process has (64|48)"):
            build_core(plan)

    on_all(refused, plans)


def test_the_fewest_blocks_of_any_process_are_those_of_all(folder, monkeypatch):
    plans = plans_of(folder, monkeypatch, 2, tensor_parallel_size=2)
    plans[1] = plans[1].changed(num_blocks=31)
    cores = on_all(build_core, plans)
    assert [core.scheduler.memory.pool.num_blocks for core in cores] == [31, 31]
    on_all(lambda core: core.shutdown(), cores)


def test_what_keeps_one_process_from_starting_ends_the_others(tmp_path, folder, monkeypatch):
    broken = make_checkpoint(tmp_path, SHAPE, "llama", dtype="float32")
    plans = plans_of(folder, monkeypatch, 2, tensor_parallel_size=2)
    plans[1] = plans[1].changed(model_folder=str(broken))
    for file in broken.glob("*.safetensors"):
        file.unlink()

    def refused(plan):
        text = "safetensors" if plan is plans[1] else "does not start.*safetensors"
        with pytest.raises(LoadError, match=text):
            build_core(plan)

    on_all(refused, plans)


def test_processes_that_are_copies_form_groups(folder, monkeypatch):
    """Four processes with two workers each are two engines, as one with four is one."""
    plans = plans_of(folder, monkeypatch, 4, tensor_parallel_size=2)
    right = served(plan_of(folder), requests(3))
    assert all(same_bits(found, right) for found in on_all(lambda p: served(p, requests(3)), plans))


def test_one_process_needs_no_launcher(folder):
    plan = plan_of(folder, distributed_executor_backend="external_launcher")
    assert plan.parallel.distributed_executor_backend == "uni"


@pytest.mark.parametrize(
    "given,why",
    [
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (environment(2, 2, 1), "RANK is 2 of WORLD_SIZE=2"),
        (environment("x", 2, 1), "RANK is 'x'"),
        (environment(0, 0, 1), "WORLD_SIZE is '0'"),
        (environment(1, 2, 1) | {"LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK is 1 of LOCAL_WORLD_SIZE=1"),
    ],
)
def test_an_environment_that_is_not_that_of_a_launcher_is_refused(given, why):
    with pytest.raises(InvalidParameter, match=why):
        launched_process(given)


def test_groups_that_do_not_come_out_even_are_refused(folder, monkeypatch):
    with pytest.raises(InvalidParameter, match="started 3 processes .* form groups of 2"):
        plans_of(folder, monkeypatch, 3, tensor_parallel_size=2)
    with pytest.raises(InvalidParameter, match="data_parallel_size"):
        plans_of(folder, monkeypatch, 2, tensor_parallel_size=2, data_parallel_size=2)
