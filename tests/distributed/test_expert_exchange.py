"""Rounds of cores that share experts: the same results as one core, and no fault that spreads."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.distributed import expert_exchange
from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.gloo_group import GlooGroup
from quire.errors import PeersLost
from quire.ops.moe import MoeArgs, grouped_mixture, mixture
from quire.ops.routing import RouteArgs, route

WIDTH, EXPERTS, LAYERS = 8, 5, 3
ROUTE_ARGS, ARGS = RouteArgs(2, "softmax", renorm=True), MoeArgs()
torch.manual_seed(0)
WEIGHTS = torch.randn(LAYERS, EXPERTS, WIDTH, WIDTH)
ROUTERS = torch.randn(LAYERS, EXPERTS, WIDTH)


class Board:
    """The memory that threads exchange through; a rank that dies breaks the barrier."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.cells = [None] * size

    def swap(self, rank, value):
        try:
            self.cells[rank] = value
            self.barrier.wait(20)
            found = list(self.cells)
            self.barrier.wait(20)
        except threading.BrokenBarrierError:
            raise PeersLost("gone") from None
        return found


class ThreadGroup:
    def __init__(self, board, rank):
        self.board, self.rank, self.size = board, rank, board.size

    def all_gather(self, values, while_waiting):
        return self.board.swap(self.rank, list(values))

    def all_to_all(self, sent, to_each, from_each, while_waiting):
        found = self.board.swap(self.rank, sent.split(to_each))
        received = [parts[self.rank] for parts in found]
        assert [len(part) for part in received] == from_each
        return torch.cat(received)


def expert(layer, index, rows):
    # one row after the other, so that nothing depends on who else is in the batch
    return torch.stack([WEIGHTS[layer, index] @ row for row in rows])


def layer_alone(layer, x):
    choice = route(x @ ROUTERS[layer].T, ROUTE_ARGS)
    return mixture(
        x, *choice, EXPERTS, ARGS, lambda index, rows, _: expert(layer, index, rows)
    ).tanh()


def alone(x):
    """All layers on one core."""
    for layer in range(LAYERS):
        x = layer_alone(layer, x)
    return x


class Core:
    def __init__(self, group, run=expert):
        self.exchange = ExpertExchange(
            group, num_experts=EXPERTS, num_layers=LAYERS, width=WIDTH, dtype=torch.float32
        )
        start = self.exchange.experts.start
        for layer in range(LAYERS):
            self.exchange.add_layer(lambda e, rows, at=layer: run(at, start + e, rows))

    def forward(self, x, before_layer=lambda layer: None):
        self.exchange.begin(True)
        try:
            for layer in range(LAYERS):
                before_layer(layer)
                choice = route(x @ ROUTERS[layer].T, ROUTE_ARGS)
                x = grouped_mixture(x, *choice, EXPERTS, ARGS, self.exchange).tanh()
            return x
        finally:
            self.exchange.finish()


def together(size, *tasks, groups=None):
    """Run one task for each rank at the same time; results or errors."""
    if groups is None:
        board = Board(size)
        groups = [ThreadGroup(board, rank) for rank in range(size)]

    def run(rank):
        try:
            return tasks[rank](groups[rank])
        except Exception as error:
            if isinstance(groups[rank], ThreadGroup):
                groups[rank].board.barrier.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def inputs(*counts):
    draw = torch.Generator().manual_seed(sum(counts))
    return [torch.randn(count, WIDTH, generator=draw) for count in counts]


@pytest.mark.parametrize("counts", [(3, 4), (1, 0), (0, 1), (9, 1, 2), (0, 0, 5), (2, 2, 2, 2)])
def test_every_core_gets_what_it_would_have_computed_alone(counts):
    batches = inputs(*counts)

    def task(x):
        return lambda group: Core(group).forward(x)

    found = together(len(counts), *map(task, batches))
    for x, y in zip(batches, found, strict=True):
        assert torch.equal(y, alone(x))


def test_the_same_over_gloo(tmp_path):
    batches = inputs(6, 0, 3)

    def task(rank):
        def run(_):
            core = Core(GlooGroup.of_file(tmp_path / "group", rank, 3, 30))
            first = core.forward(batches[rank])
            assert core.exchange.idle_round(rank == 1) is True
            assert core.exchange.idle_round(False) is False
            return first

        return run

    found = together(3, *map(task, range(3)), groups=[None] * 3)
    for x, y in zip(batches, found, strict=True):
        assert torch.equal(y, alone(x))


def test_a_wave_ends_for_all_when_nobody_has_work_and_all_know_who_ends():
    def task(rank):
        def run(group):
            exchange = Core(group).exchange
            exchange.is_ending = rank == 0
            goes_on = [exchange.idle_round(rank == 1), exchange.idle_round(False)]
            first = exchange.all_end
            exchange.is_ending = True
            goes_on.append(exchange.idle_round(False))
            return goes_on, first, exchange.all_end, exchange.num_rounds

        return run

    assert together(2, task(0), task(1)) == [([True, False, False], False, True, 3)] * 2


@pytest.mark.parametrize("at", range(LAYERS))
def test_a_pass_that_fails_is_run_again_in_halves_and_disturbs_nobody(at):
    batches = inputs(4, 3)

    def fails(layer):
        if layer == at:
            raise ZeroDivisionError

    def faulty(group):
        core = Core(group)
        with pytest.raises(ZeroDivisionError):
            core.forward(batches[0], fails)
        halves = [core.forward(batches[0][:2]), core.forward(batches[0][2:])]
        assert core.exchange.idle_round(False) is False
        return torch.cat(halves)

    def healthy(group):
        core = Core(group)
        found = [core.forward(batches[1]) for _ in range(2)]
        assert core.exchange.idle_round(False) is True
        assert core.exchange.idle_round(False) is False
        assert torch.equal(*found)
        return found[0]

    first, second = together(2, faulty, healthy)
    assert torch.equal(first, alone(batches[0]))
    assert torch.equal(second, alone(batches[1]))


def test_an_expert_that_fails_on_a_row_fails_its_owner_alone():
    poisonous, harmless = torch.full((2, WIDTH), 1e30), inputs(3)[0]

    def choosy(layer, index, rows):
        if rows.abs().max() > 1e20:
            raise ArithmeticError("too large")
        return expert(layer, index, rows)

    def faulty(group):
        core = Core(group, choosy)
        with pytest.raises(RuntimeError, match="failed on these rows"):
            core.forward(poisonous)
        return core.forward(harmless)

    def healthy(group):
        core = Core(group, choosy)
        first = core.forward(harmless)
        assert torch.equal(first, core.forward(harmless))
        return first

    for found in together(2, faulty, healthy):
        assert torch.equal(found, alone(harmless))


def test_a_core_that_is_gone_is_an_error_and_no_wait():
    def gone(group):
        Core(group).exchange.begin(True)
        group.board.barrier.abort()

    def left(group):
        core = Core(group)
        with pytest.raises(PeersLost):
            core.forward(inputs(3)[0])
        with pytest.raises(PeersLost):
            core.exchange.begin(True)
        core.exchange.finish()  # nothing is exchanged any more

    assert together(2, gone, left) == [None, None]


def test_cores_in_different_rounds_are_found_out():
    def ahead(group):
        core = Core(group)
        core.exchange.num_rounds = 1
        with pytest.raises(PeersLost, match="different rounds"):
            core.exchange.begin(True)

    def behind(group):
        with pytest.raises(PeersLost, match="different rounds"):
            Core(group).exchange.begin(True)

    assert together(2, ahead, behind) == [None, None]


def test_experts_show_that_they_go_on_with_many_rows(monkeypatch):
    monkeypatch.setattr(expert_exchange, "_ROWS", 2)
    many, pieces = inputs(9)[0], []

    def of_many(group):
        return Core(group).forward(many)

    def idle(group):
        core = Core(group)
        core.exchange.note_done = lambda: pieces.append(1)
        assert core.exchange.idle_round(False) is True

    found, _ = together(2, of_many, idle)
    assert torch.equal(found, alone(many))
    theirs = range(EXPERTS // 2, EXPERTS)
    x, expected = many, 0
    for layer in range(LAYERS):
        chosen, _ = route(x @ ROUTERS[layer].T, ROUTE_ARGS)
        expected += sum(-(-int((chosen == each).sum()) // 2) for each in theirs)
        x = layer_alone(layer, x)
    assert len(pieces) == expected


def exchange_rows(group, while_waiting):
    return group.all_to_all(torch.zeros(2, 1, dtype=torch.uint8), [1, 1], [1, 1], while_waiting)


@pytest.mark.parametrize("wait", [lambda group, call: group.all_gather([1], call), exchange_rows])
def test_a_gloo_group_whose_others_stay_away_gives_up(tmp_path, wait):
    calls = []

    def waits(_):
        group = GlooGroup.of_file(tmp_path / "group", 0, 2, 1.0)
        with pytest.raises(PeersLost, match="silent"):
            wait(group, lambda: calls.append(1))
        ready.set()

    def silent(_):
        _group = GlooGroup.of_file(tmp_path / "group", 1, 2, 1.0)
        assert ready.wait(30)

    ready = threading.Event()
    assert together(2, waits, silent, groups=[None, None]) == [None, None]
    assert calls
    with pytest.raises(PeersLost, match="did not come"):
        GlooGroup.of_file(tmp_path / "lonely", 0, 2, 0.5)
