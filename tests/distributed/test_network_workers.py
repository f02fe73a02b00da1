"""Workers that talk by gloo get what workers in one process get."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quire.distributed.gloo_group import GlooGroup
from quire.distributed.inproc_group import InprocExchange
from quire.distributed.network_workers import NetworkWorkers
from quire.distributed.worker_group import ExchangeAborted

SIZE = 2


def joined(folder: Path, rank: int, timeout_s: float = 20.0) -> NetworkWorkers:
    return NetworkWorkers(lambda n: GlooGroup.of_file(folder / f"{n}", rank, SIZE, timeout_s))


@pytest.fixture
def groups(tmp_path):
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: joined(tmp_path, rank), range(SIZE)))


def on_all(work, groups):
    with ThreadPoolExecutor(SIZE) as pool:
        return [f.result(60) for f in [pool.submit(work, group) for group in groups]]


def test_workers_get_what_threads_get(groups):
    generator = torch.Generator().manual_seed(3)
    parts = torch.randn(SIZE, 13, 4, 6, generator=generator)[..., ::2]
    peaks = torch.rand(SIZE, 13, generator=generator)
    peaks[1, 7] = torch.nan

    def work(group):
        out, largest = torch.empty(13, SIZE, 4, 3), torch.empty(13)
        group.gather(parts[group.rank], out)
        group.largest(peaks[group.rank], largest)
        none = group.gather(parts[group.rank, :0].bfloat16())
        return out, largest.nan_to_num(7e9), group.broadcast(parts[group.rank]), none

    expected = on_all(work, InprocExchange(SIZE).groups())[0]
    for found in on_all(work, groups):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


def test_a_worker_that_is_gone_ends_the_others(groups):
    groups.pop()
    with pytest.raises(ExchangeAborted, match="gone"):
        groups[0].gather(torch.zeros(3))


def test_an_abort_ends_the_wait_of_the_others_until_all_have_rejoined(groups):
    def fail(group):
        if group.rank:
            group.abort("rank 1 cannot go on")
        with pytest.raises(ExchangeAborted, match="gone" if group.rank == 0 else "cannot go on"):
            group.gather(torch.zeros(3))
        with pytest.raises(ExchangeAborted):
            group.broadcast(torch.zeros(3))

    def again(group):
        group.rejoin(1)
        group.rejoin(1)  # what has rejoined stays
        return group.gather(torch.tensor([group.rank]))

    on_all(fail, groups)
    for found in on_all(again, groups):
        assert found.tolist() == [[0, 1]]
