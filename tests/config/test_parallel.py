"""Who runs which copies, and who balances between them (rule 12.7)."""

import msgspec
import pytest

from quire.config.args.engine_args import EngineArgs
from quire.config.resolve.resolve import resolve
from quire.errors import InvalidParameter, NotBuiltYet
from quire.models.cutting.rank_facts import RankFacts
from tests.config import plans

MODEL, MACHINE = plans.make_model(), plans.make_machine(num_cores=8)
MOE = msgspec.structs.replace(MODEL, num_experts=8)


def plan(model=MODEL, headless=False, **wishes):
    wishes = {f"data_parallel_{name}": value for name, value in wishes.items()}
    return resolve(EngineArgs(max_model_len=2048, **wishes), model, MACHINE, is_headless=headless)


@pytest.mark.parametrize(
    ("wishes", "mode", "ranks"),
    [
        ({}, "internal", (0,)),
        ({"size": 4}, "internal", (0, 1, 2, 3)),
        ({"size": 4, "size_local": 1}, "internal", (0,)),
        ({"size": 4, "size_local": 0}, "internal", ()),
        ({"size": 4, "size_local": 2, "start_rank": 2}, "hybrid", (2, 3)),
        ({"size": 4, "size_local": 2, "hybrid_lb": True}, "hybrid", (0, 1)),
        ({"size": 4, "size_local": 4, "hybrid_lb": True}, "internal", (0, 1, 2, 3)),
        ({"size": 4, "size_local": 2, "start_rank": 2, "headless": True}, "internal", (2, 3)),
    ],
)
def test_modes_and_ranks(wishes, mode, ranks):
    headless = wishes.pop("headless", False)
    found = plan(headless=headless, **wishes)
    assert (found.parallel.data_parallel_mode, found.parallel.data_parallel_ranks) == (mode, ranks)
    assert found.parallel.num_threads == max(1, MACHINE.num_cores // max(1, len(ranks)))


def test_one_copy_of_a_mixture_may_be_balanced_from_outside():
    found = plan(MOE, size=4, rank=3).parallel
    assert (found.data_parallel_mode, found.data_parallel_ranks) == ("external", (3,))
    assert plan(MOE, size=2, rank=1, external_lb=True).parallel.data_parallel_mode == "external"


# a server for each copy


@pytest.mark.parametrize(
    ("wishes", "ranks"),
    [
        ({"size": 4}, (0, 1, 2, 3)),
        ({"size": 4, "size_local": 2}, (0, 1)),
        ({"size": 4, "size_local": 2, "start_rank": 2}, (2, 3)),
    ],
)
@pytest.mark.parametrize("model", [MODEL, MOE])
def test_servers_of_one_machine_share_its_threads(model, wishes, ranks):
    found = plan(model, multi_port_external_lb=True, **wishes).parallel
    assert (found.data_parallel_mode, found.data_parallel_ranks) == ("external", ranks)
    assert found.num_threads == MACHINE.num_cores // len(ranks)


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"size": 1}, "do not form one of the equal parts"),
        ({"size": 4, "size_local": 3}, "do not form one of the equal parts"),
        ({"size": 4, "size_local": 2, "start_rank": 1}, "multiple of 2"),
        ({"size": 4, "rank": 1}, "choose one"),
        ({"size": 4, "hybrid_lb": True}, "choose one"),
        ({"size": 4, "headless": True}, "choose one"),
    ],
)
def test_servers_that_cannot_be(wishes, words):
    headless = wishes.pop("headless", False)
    with pytest.raises(InvalidParameter, match=words):
        plan(headless=headless, multi_port_external_lb=True, **wishes)


# machines that were told of each other


def on_node(node, model=MODEL, headless=False, **wishes):
    args = EngineArgs(
        max_model_len=2048, data_parallel_size=4, nnodes=2, node_rank=node,
        master_addr="10.0.0.1", **wishes,
    )  # fmt: skip
    return resolve(args, model, MACHINE, is_headless=headless).parallel


@pytest.mark.parametrize(("node", "ranks"), [(0, (0, 1)), (1, (2, 3))])
def test_machines_have_equal_parts_of_the_copies(node, ranks):
    found = on_node(node, headless=node > 0)
    assert (found.data_parallel_mode, found.data_parallel_ranks) == ("internal", ranks)
    assert (found.data_parallel_address, found.nnodes) == ("10.0.0.1", 1)
    hybrid = on_node(node, data_parallel_hybrid_lb=True)
    assert (hybrid.data_parallel_mode, hybrid.data_parallel_ranks) == ("hybrid", ranks)
    ports = on_node(node, data_parallel_multi_port_external_lb=True)
    assert (ports.data_parallel_mode, ports.data_parallel_ranks) == ("external", ranks)


def test_a_machine_with_one_copy_may_be_balanced_from_outside():
    args = EngineArgs(
        max_model_len=2048, data_parallel_size=2, nnodes=2, node_rank=1,
        data_parallel_external_lb=True,
    )  # fmt: skip
    found = resolve(args, MOE, MACHINE).parallel
    assert (found.data_parallel_mode, found.data_parallel_ranks) == ("external", (1,))


@pytest.mark.parametrize(
    ("node", "wishes", "words"),
    [
        (1, {}, "--headless"),
        (0, {"headless": True}, "--headless"),
        (1, {"headless": True, "data_parallel_start_rank": 1}, "has 2"),
        (0, {"data_parallel_size_local": 3}, "has 2"),
        (0, {"data_parallel_backend": "ray"}, "from one command"),
        (2, {"headless": True}, "begin with 0"),
    ],
)
def test_parts_of_machines_that_cannot_be(node, wishes, words):
    with pytest.raises(InvalidParameter, match=words):
        on_node(node, **wishes)


def test_addresses_are_for_cores_that_run_elsewhere():
    assert plan(size=2).parallel.data_parallel_address is None
    assert plan(size=2, size_local=1).parallel.data_parallel_address == "127.0.0.1"
    assert (
        plan(size=2, size_local=1, address="10.0.0.7").parallel.data_parallel_address == "10.0.0.7"
    )
    assert plan(size=2, size_local=1, start_rank=1, headless=True).parallel.data_parallel_address


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"size": 2, "rank": 1}, "Start independent engines"),
        ({"size": 4, "hybrid_lb": True, "external_lb": True, "size_local": 2}, "choose one"),
        ({"size": 4, "hybrid_lb": True}, "data_parallel_size_local"),
        ({"size": 4, "size_local": 2, "start_rank": 3}, "beyond data_parallel_size=4"),
        ({"size": 4, "start_rank": 1}, "the front end has the first copies"),
        ({"size": 2, "size_local": 0, "headless": True}, "has some"),
    ],
)
def test_wishes_that_do_not_go_together(wishes, words):
    headless = wishes.pop("headless", False)
    with pytest.raises(InvalidParameter, match=words):
        plan(headless=headless, **wishes)


def test_an_engine_balanced_from_outside_has_one_core():
    with pytest.raises(InvalidParameter, match="has 1 core"):
        plan(MOE, size=4, rank=1, size_local=2)
    with pytest.raises(InvalidParameter, match="needs it"):
        plan(MOE, size=4, external_lb=True)


def spread(model=MOE, is_spread=True, **wishes):
    args = EngineArgs(max_model_len=2048, enable_expert_parallel=is_spread, **wishes)
    return resolve(args, model, MACHINE)


def test_experts_are_spread_over_the_cores_of_one_machine():
    two = spread(data_parallel_size=2)
    assert (two.parallel.enable_expert_parallel, two.parallel.use_graphs) == (True, False)
    one = spread()
    assert (one.parallel.enable_expert_parallel, one.parallel.use_graphs) == (False, True)


OF_RANKS = msgspec.structs.replace(
    MOE,
    rank=RankFacts(
        memories=(), num_parameters=MODEL.num_parameters, stage_layers=(1, 1), same_bits=True
    ),
)


@pytest.mark.parametrize("wish", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_experts_are_spread_over_cores_with_ranks(wish):
    found = spread(OF_RANKS, data_parallel_size=2, **wish).parallel
    assert found.is_lock_step
    assert found.distributed_executor_backend == "mp"
    with pytest.raises(NotBuiltYet, match=r"Leave it out: .*processes of 'mp'"):
        spread(OF_RANKS, data_parallel_size=2, distributed_executor_backend="a:Class", **wish)


def test_experts_may_be_spread_over_machines():
    front = spread(data_parallel_size=4, data_parallel_size_local=2)
    assert front.parallel.enable_expert_parallel
    other = EngineArgs(
        max_model_len=2048, enable_expert_parallel=True, data_parallel_size=4, nnodes=2,
        node_rank=1, master_addr="10.0.0.1",
    )  # fmt: skip
    found = resolve(other, MOE, MACHINE, is_headless=True).parallel
    assert (found.enable_expert_parallel, found.data_parallel_ranks) == (True, (2, 3))


def test_spread_experts_leave_room_for_keys_and_values():
    model = msgspec.structs.replace(MOE, num_expert_parameters=MODEL.num_parameters // 2)
    wishes = {"data_parallel_size": 2, "max_num_seqs": 64}
    more, fewer = (spread(model, is_spread, **wishes) for is_spread in (True, False))
    assert more.memory.num_blocks > fewer.memory.num_blocks


@pytest.mark.parametrize(
    ("model", "wishes", "words"),
    [
        (MODEL, {}, "no experts to spread"),
        (MOE, {"data_parallel_size": 9}, "8 experts for 9 cores"),
        (
            OF_RANKS,
            {"data_parallel_size": 3, "tensor_parallel_size": 4},
            r"8 experts for 3 cores of 4 workers.*smaller data_parallel_size or tensor",
        ),
        (MOE, {"data_parallel_size": 4, "data_parallel_size_local": 0}, "meet at the first"),
        (MOE, {"data_parallel_size": 2, "data_parallel_rank": 1}, "one front end"),
        (
            MOE,
            {"data_parallel_size": 2, "data_parallel_multi_port_external_lb": True},
            "one front end",
        ),
    ],
)
def test_experts_that_cannot_be_spread(model, wishes, words):
    with pytest.raises(InvalidParameter, match=words):
        spread(model, **wishes)
