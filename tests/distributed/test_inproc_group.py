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
            found.append(group.all_gather(torch.tensor([number, group.rank])).tolist())
            found.append(group.broadcast(torch.tensor([number, group.rank + 1])).tolist())
        return found

    for found in threads.run([partial(work, group) for group in exchange.groups()]):
        for number in range(300):
            assert found[2 * number] == [[number, rank] for rank in range(exchange.size)]
            assert found[2 * number + 1] == [number, 1]


def failing(exchange, threads, errors, at):
    """What `run` raises when workers raise these after so many exchanges; None: they wait."""

    def work(group):
        for number in range(5):
            if number == at and errors[group.rank] is not None:
                raise errors[group.rank]
            group.all_gather(torch.zeros(1))

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
