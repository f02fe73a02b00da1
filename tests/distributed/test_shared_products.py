"""Ranks that write the parts of a product where all can read them get the bits of one worker."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quire.distributed.shared_group import SharedExchange, SharedGroup
from quire.hardware.native import find_native
from quire.kernels.cpu.plain_ops import recordable
from quire.kernels.cpu.program import Program
from quire.kernels.cpu.recorded_group import RecordedGroup
from quire.kernels.cpu.runtime import CpuRuntime
from quire.models.heads import HeadPart, LanguageModelHead
from quire.models.layers import SharedProjection
from quire.ops.select import select
from tests.kernels.cpu.segment_worker import FORMATS, INPUTS, draw, part_of

native, _ = find_native()
pytestmark = [
    pytest.mark.skipif(
        native is None or not hasattr(os, "memfd_create"), reason="needs native code on Linux"
    ),
    pytest.mark.usefixtures("one_torch_thread"),
]

PAGE = 4096
OUT, CAPACITY = 100, 25
"""A slot of one page has room for 10 rows of a product, so that many rows are several pieces."""
DTYPE = torch.bfloat16


def on_all(work, size):
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, rank) for rank in range(size)]
        return [future.result(timeout=60) for future in futures]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_parts_add_up_to_the_product_of_one_worker(name, size):
    stored_as = FORMATS[name]
    x, weight = draw(CAPACITY, INPUTS, dtype=DTYPE), draw(OUT, INPUTS, dtype=DTYPE, seed=1)
    bias, other = draw(OUT, 1, dtype=DTYPE).flatten(), draw(64, OUT, dtype=DTYPE, seed=3)
    exchange = SharedExchange(size, PAGE)

    def open_ops():
        runtime = CpuRuntime()
        ops = select(device="cpu", dtype=DTYPE, providers=["cpu"], runtime=runtime)
        return runtime, recordable(ops, runtime)

    _, whole_ops = open_ops()
    peaks = whole_ops.row_peaks(weight)
    packed = whole_ops.pack_linear(weight, bias, stored_as, 4)
    last = whole_ops.pack_linear(other, None)

    def work(rank):
        runtime, ops = open_ops()
        group = RecordedGroup(runtime, SharedGroup(exchange.fileno(), rank))
        own, later = part_of(weight, rank, size), ops.pack_linear(other, None)
        own = ops.pack_linear(own, bias, stored_as, 4 // size, peaks)
        rounds = stored_as is not None and stored_as.rounds_rows
        project = SharedProjection(ops, group, own, rounds)
        program = Program(runtime, CAPACITY)
        given = torch.empty(CAPACITY, INPUTS // size, dtype=DTYPE)
        with program.recording():
            y = project(given)
            after = ops.linear(y, later)
        assert len(program) == 2 + 2 * rounds, "product, exchange and sum are one entry"
        found = []
        for num_tokens in (CAPACITY, 1, 17, 10):
            given[:num_tokens] = part_of(x, rank, size)[:num_tokens]
            program.replay(num_tokens)
            found.append((y[:num_tokens].clone(), after[:num_tokens].clone()))
        return found

    for found in on_all(work, size):
        for y, after in found:
            expected = whole_ops.linear(x[: len(y)], packed)
            assert torch.equal(y, expected)
            assert torch.equal(after, whole_ops.linear(expected, last))
    exchange.close()


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_of_ranks_lie_side_by_side_where_the_first_reads_them(size):
    x, weight = draw(CAPACITY, INPUTS, dtype=DTYPE), draw(4 * 32, INPUTS, dtype=DTYPE, seed=1)
    exchange = SharedExchange(size, PAGE)
    runtime = CpuRuntime()
    ops = recordable(select(device="cpu", dtype=DTYPE, providers=["cpu"], runtime=runtime), runtime)
    expected = ops.logits(x, ops.pack_linear(weight, None), 0.5, 3.0)

    def work(rank):
        runtime = CpuRuntime()
        ops = select(device="cpu", dtype=DTYPE, providers=["cpu"], runtime=runtime)
        ops, group = (
            recordable(ops, runtime),
            RecordedGroup(runtime, SharedGroup(exchange.fileno(), rank)),
        )
        part = HeadPart(ops.pack_linear(weight.chunk(size)[rank], None), group)
        head = LanguageModelHead(ops, part.weight, 0.5, 3.0, part)
        program = Program(runtime, CAPACITY)
        given = torch.empty(CAPACITY, INPUTS, dtype=DTYPE)
        with program.recording():
            scores = head.shared_logits(given)
        assert len(program) == 2, "a product and a meeting: nothing is copied"
        found = []
        for rows in ([*range(CAPACITY)], [3], [7, 1, 20]):
            given[: len(rows)] = x[rows]
            program.replay(len(rows))
            found.append((rows, scores[: len(rows)].clone()))
            group.broadcast(torch.zeros(1))  # as the first one, which has read them, gives ids
        return found

    for rows, scores in on_all(work, size)[0]:
        assert torch.equal(scores, expected[rows])
    exchange.close()


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_for_the_first_rank_comes_to_it_alone(size):
    exchange = SharedExchange(size, PAGE)

    def work(rank):
        group = SharedGroup(exchange.fileno(), rank)
        found = []
        # in one piece, in several of whole rows, in several of each row
        for shape in ((3, 5), (40, 100), (2, 3000)):
            x = torch.arange(shape[0] * shape[1]).view(shape).float() * (rank + 1)
            out = torch.full((shape[0], size, shape[1]), -1.0)
            group.gather(x, out, to_first=True)
            found.append(out)
        return found

    first, *others = on_all(work, size)
    for out in first:
        plain = torch.arange(out[:, 0].numel()).view(out[:, 0].shape).float()
        expected = torch.stack([plain * (rank + 1) for rank in range(size)], 1)
        assert torch.equal(out, expected)
    for found in others:
        assert all(bool((out == -1).all()) for out in found)
    exchange.close()


def test_waits_are_counted():
    exchange = SharedExchange(2)
    first, second = (SharedGroup(exchange.fileno(), rank) for rank in range(2))
    assert exchange.waits() == [(0, 0), (0, 0)]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(first.gather, torch.zeros(1))
        while not exchange.waits()[0][1]:  # until it sleeps
            pass
        second.gather(torch.zeros(1))
        found.result(60)
    (waited_ns, sleeps), other = exchange.waits()
    assert waited_ns > 0
    assert sleeps > 0
    assert other[1] == 0
    exchange.close()
