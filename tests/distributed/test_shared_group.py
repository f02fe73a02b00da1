"""Ranks exchange tensors through shared memory: each gets the same, and none waits for the dead."""

import contextlib
import os
import resource
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.distributed.inproc_group import InprocExchange
from quire.distributed.shared_group import SharedExchange, SharedGroup
from quire.distributed.worker_group import ExchangeAborted
from quire.errors import LoadError
from quire.hardware.native import find_native
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recorded_group import RecordedGroup
from quire.kernels.cpu.runtime import CpuRuntime

native, _ = find_native()
pytestmark = pytest.mark.skipif(
    native is None or not hasattr(os, "memfd_create"), reason="needs native code on Linux"
)

PAGE = 4096


@pytest.fixture(params=[1, 2, 4])
def exchange(request):
    found = SharedExchange(request.param, PAGE)
    yield found
    found.close()


def groups_of(exchange):
    return [SharedGroup(exchange.fileno(), rank) for rank in range(exchange.size)]


def on_all(exchange, work, groups=None):
    """work(group) of each rank, in threads: ranks do not know whether they share a process."""
    groups = groups or groups_of(exchange)
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(work, group) for group in groups]
        return [future.result(timeout=60) for future in futures]


def test_ranks_get_what_threads_get(exchange):
    """Of tensors of every kind and length, around and above the memory of a slot."""
    generator = torch.Generator().manual_seed(exchange.size)
    cases = []
    for number in range(60):
        dtype = [torch.float32, torch.bfloat16, torch.int32, torch.int8][number % 4]
        lengths = torch.randint(0, [3, 40, 3000][number % 3], (2,), generator=generator).tolist()
        shape = [lengths[0] % 70, lengths[1]][: 1 + number % 2]
        parts = torch.randint(-100, 100, (exchange.size, *shape, 2), generator=generator)
        cases.append(parts.to(dtype)[..., 0] if number % 5 == 0 else parts.to(dtype))
    peaks = torch.rand(exchange.size, 2500, 2, generator=generator)[..., 0]
    peaks[-1, 7] = peaks[0, 11] = torch.nan

    def work(group):
        found = [group.gather(case[group.rank]) for case in cases]
        return *found, group.largest(peaks[group.rank]), group.broadcast(cases[5][group.rank])

    inproc = InprocExchange(exchange.size)
    expected = on_all(exchange, work, inproc.groups())
    for found in on_all(exchange, work):
        for mine, theirs in zip(found, expected[0], strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine.nan_to_num(7e9), theirs.nan_to_num(7e9))


def test_memory_may_be_used_again_after_an_exchange(exchange):
    """As recorded programs do, while a slower worker would still be reading it."""

    def work(group):
        x, out = torch.empty(4000, 1), torch.empty(4000, group.size, 1)
        peaks, largest = torch.empty(4000), torch.empty(4000)
        for number in range(30):
            group.gather(x.fill_(number + group.rank), out)
            group.largest(peaks.fill_(number + group.rank), largest)
            x.fill_(-1.0)
            peaks.fill_(1e9)
            expected = torch.arange(number, number + group.size)
            assert torch.equal(out[..., 0], expected.expand(4000, -1).float())
            assert torch.equal(largest, torch.full_like(largest, number + group.size - 1.0))

    on_all(exchange, work)
    assert exchange.counts() == [60] * exchange.size


def test_results_may_be_strided(exchange):
    def work(group):
        wide = torch.zeros(9, group.size, 6)
        group.gather(torch.full((9, 3), 1.0 + group.rank), wide[:, :, ::2])
        spread = torch.zeros(9, 2)
        group.largest(torch.full((9,), 1.0 + group.rank), spread[:, 1])
        return wide, spread

    for wide, spread in on_all(exchange, work):
        ranks = torch.arange(1.0, exchange.size + 1)[None, :, None]
        assert torch.equal(wide[:, :, ::2], ranks.expand(9, -1, 3))
        assert torch.equal(wide[:, :, 1::2], torch.zeros(9, exchange.size, 3))
        assert torch.equal(spread, torch.tensor([0.0, exchange.size]).expand(9, 2))


def test_an_exchange_is_an_entry_of_a_program(exchange):
    def work(group):
        runtime = CpuRuntime()
        recorded = RecordedGroup(runtime, group)
        program = Program(runtime, 50)
        x, peaks = torch.empty(50, 2, 3), torch.empty(50)
        with program.recording():
            out, largest = recorded.gather(x), recorded.largest(peaks)
        assert len(program) == 2
        assert program._calls == [], "the calls are native"
        found = []
        for num_tokens in (50, 1, 17):
            x.copy_(torch.arange(300.0).view(50, 2, 3) * (group.rank + num_tokens))
            peaks.copy_(torch.arange(50.0) * (group.rank - num_tokens))
            program.replay(num_tokens)
            found.append((out[:num_tokens].clone(), largest[:num_tokens].clone()))
        return found

    for found in on_all(exchange, work):
        for (out, largest), num_tokens in zip(found, (50, 1, 17), strict=True):
            ranks = torch.arange(exchange.size) + num_tokens
            every = torch.arange(300.0).view(50, 1, 2, 3)[:num_tokens] * ranks[:, None, None]
            assert torch.equal(out, every)
            last = exchange.size - 1 - num_tokens
            assert torch.equal(largest, torch.arange(50.0)[:num_tokens] * last)


def test_who_comes_late_is_waited_for():
    """Longer than ranks spin and than they sleep at once, and before it has joined."""
    exchange = SharedExchange(2)
    first = SharedGroup(exchange.fileno(), 0)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(first.gather, torch.tensor([1.0]))
        time.sleep(0.25)
        assert not found.done()
        second = SharedGroup(exchange.fileno(), 1)
        assert second.gather(torch.tensor([2.0])).tolist() == [[1.0, 2.0]]
        assert found.result(60).tolist() == [[1.0, 2.0]]


def test_an_abort_ends_every_wait_until_a_reset():
    exchange = SharedExchange(4)
    groups = groups_of(exchange)

    def fail(group):
        if group.rank == 2:
            return None
        with pytest.raises(ExchangeAborted) as raised:
            for _ in range(1000):
                group.gather(torch.zeros(3))
        return str(raised.value)

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(fail, group) for group in groups]
        while exchange.aborted == "":
            exchange.abort("rank 2 failed")
        exchange.abort("a later reason")
        texts = [future.result(60) for future in futures]
    assert texts == ["rank 2 failed"] * 2 + [None, "rank 2 failed"]
    for group in groups:
        for call in (group.gather, group.largest, group.broadcast):
            with pytest.raises(ExchangeAborted, match="rank 2 failed"):
                call(torch.zeros(3))
    exchange.reset()
    assert exchange.aborted == ""
    for found in on_all(exchange, lambda group: group.gather(torch.ones(1) * group.rank), groups):
        assert found.tolist() == [[0.0, 1.0, 2.0, 3.0]]


def test_an_exchange_ends_on_all_ranks_or_on_none_whenever_an_abort_falls():
    exchange = SharedExchange(3)
    groups = groups_of(exchange)

    def until_aborted(group):
        with contextlib.suppress(ExchangeAborted):
            while True:
                group.largest(torch.zeros(1))

    with ThreadPoolExecutor(3) as pool:
        for turn in range(150):
            futures = [pool.submit(until_aborted, group) for group in groups]
            for _ in range(turn * 7):  # another moment each time
                exchange.counts()
            exchange.abort("now")
            for future in futures:
                future.result(60)
            assert len(set(exchange.counts())) == 1, turn
            exchange.reset()


def test_an_abort_ends_the_replay_of_a_program():
    exchange = SharedExchange(2)
    runtime = CpuRuntime()
    recorded = RecordedGroup(runtime, SharedGroup(exchange.fileno(), 0))
    program = Program(runtime, 4)
    x = torch.zeros(4, 2)
    with program.recording():
        recorded.gather(x)
    exchange.abort("enough")
    with pytest.raises(ExchangeAborted, match="enough"):
        program.replay(4)


def test_a_rank_that_is_killed_ends_the_others():
    exchange = SharedExchange(3)

    def exchange_forever(rank):
        group = SharedGroup(exchange.fileno(), rank)
        while True:
            group.gather(torch.zeros(5000))

    child = os.fork()
    if child == 0:
        try:
            exchange_forever(1)
        finally:
            os._exit(1)
    errors = []

    def work(rank):
        try:
            exchange_forever(rank)
        except ExchangeAborted as error:
            errors.append(str(error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    while min(exchange.counts()) < 100:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    # Not even reaped: a process that has ended holds no lock.
    assert errors == ["rank 1 is gone"] * 2 and exchange.aborted == "rank 1 is gone"
    os.waitpid(child, 0)


def traces():
    """Names of exchanges in shared memory; other tests may have other names there. Open files and
    mappings of this process.
    """
    mappings = Path("/proc/self/maps").read_text().count("quire-exchange")
    return (
        [name for name in os.listdir("/dev/shm") if "exchange" in name],
        len(os.listdir("/proc/self/fd")),
        mappings,
    )


def test_nothing_is_left():
    before = traces()
    for _ in range(20):
        exchange = SharedExchange(2, 1 << 20)
        on_all(exchange, lambda group: group.gather(torch.zeros(100_000)))
        assert traces()[0] == before[0], "the memory has no name"
        exchange.close()
        exchange.close()
        del exchange
    assert traces() == before


def test_what_is_not_an_exchange_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(10 * PAGE))
    with file.open("r+b") as opened, pytest.raises(ValueError, match="not an exchange"):
        SharedGroup(opened.fileno(), 0)
    exchange = SharedExchange(2)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        SharedGroup(exchange.fileno(), 2)
    kept = SharedGroup(exchange.fileno(), 1)
    with pytest.raises(ValueError, match="rank 1 joined before"):
        SharedGroup(exchange.fileno(), 1)
    assert kept.rank == 1


def test_a_system_without_memory_for_it_is_told():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(LoadError, match="The ranks get no memory"):
            SharedExchange(2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
