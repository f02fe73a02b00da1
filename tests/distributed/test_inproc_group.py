"""Threads of one process exchange tensors: each gets the same, and none waits for the dead."""

import threading
from functools import partial

import pytest
import torch

from quire.distributed.inproc_group import InprocExchange
from quire.errors import EngineDeadError
from quire.executor.worker_threads import WorkerThreads
from quire.step.faults import RowFailures


@pytest.fixture(params=[2, 4])
def exchange(request):
    return InprocExchange(request.param)


@pytest.fixture
def threads(exchange):
    found = WorkerThreads(exchange)
    yield found
    found.close()
    assert not any(thread.name.startswith("worker") for thread in threading.enumerate())


def test_each_gets_all_in_the_order_of_the_ranks(exchange, threads):
    def work(group):
        found = []
        for number in range(300):  # whoever is early must not take what is of another round
            found.append(group.gather(torch.tensor([[number, group.rank]])).tolist())
            found.append(group.broadcast(torch.tensor([number, group.rank + 1])).tolist())
        return found

    for found in threads.run([partial(work, group) for group in exchange.groups()]):
        for number in range(300):
            assert found[2 * number] == [[[number, rank] for rank in range(exchange.size)]]
            assert found[2 * number + 1] == [number, 1]


def test_memory_may_be_used_again_after_an_exchange(exchange, threads):
    """As recorded programs do, while a slower worker would still be reading it."""

    def work(group):
        x, out = torch.empty(4000, 1), torch.empty(4000, group.size)
        peaks, largest = torch.empty(4000), torch.empty(4000)
        for number in range(100):
            group.gather(x.fill_(number + group.rank), out.unsqueeze(2))
            group.largest(peaks.fill_(number + group.rank), largest)
            x.fill_(-1.0)
            peaks.fill_(1e9)
            assert torch.equal(out, torch.arange(number, number + group.size).expand_as(out))
            assert torch.equal(largest, torch.full_like(largest, number + group.size - 1.0))

    threads.run([partial(work, group) for group in exchange.groups()])


def test_the_largest_of_a_nan_is_nan(exchange, threads):
    def work(group):
        return group.largest(torch.tensor([1.0, torch.nan if group.rank == 1 else 2.0]))

    for found in threads.run([partial(work, group) for group in exchange.groups()]):
        assert found[0] == 1.0 and found[1].isnan()


def failing(exchange, threads, errors, at):
    """What `run` raises when workers raise these after so many exchanges; None: they wait."""

    def work(group):
        for number in range(5):
            if number == at and errors[group.rank] is not None:
                raise errors[group.rank]
            group.gather(torch.zeros(1))

    with pytest.raises(Exception) as raised:  # noqa: PT011
        threads.run([partial(work, group) for group in exchange.groups()])
    return raised.value


def test_what_a_worker_raises_ends_the_others_and_is_raised(exchange, threads):
    for rank in range(exchange.size):
        errors = [None] * exchange.size
        errors[rank] = ValueError(f"of {rank}")
        assert failing(exchange, threads, errors, 2) is errors[rank]
        test_each_gets_all_in_the_order_of_the_ranks(exchange, threads)


def test_of_several_errors_the_one_that_says_most_is_raised(exchange, threads):
    rest = [None] * (exchange.size - 2)
    dead, other = EngineDeadError("gone"), ValueError("x")
    named = RowFailures({1: "a"}), RowFailures({2: "b"})
    assert failing(exchange, threads, [other, dead, *rest], 0) is dead
    assert failing(exchange, threads, [named[0], dead, *rest], 0) is dead
    assert failing(exchange, threads, [other, named[0], *rest], 0).errors == {1: "a"}
    assert failing(exchange, threads, [*named, *rest], 0).errors == {1: "a", 2: "b"}
