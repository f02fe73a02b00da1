"""Threads: they start late, sleep when idle, survive fork and end with their pool."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quire.errors import InvalidParameter
from quire.hardware.host import gather_machine_facts
from quire.kernels.cpu.runtime import CpuRuntime, open_runtime
from quire.ops import select
from tests.support.needs import NATIVE, needs_native

pytestmark = needs_native


def make_add(num_threads, isa=None):
    runtime = CpuRuntime(num_threads=num_threads, isa=isa)
    ops = select(device="cpu", dtype=torch.float32, providers=["cpu"], runtime=runtime)
    return runtime, ops.add


def num_pool_threads(expected):
    """Threads of pools in this process. One that was joined stays listed until the kernel has
    removed it, so this looks again until there are as many as expected, a bounded time.
    """
    counted = -1
    for _ in range(10_000):
        counted = sum(name_of(task) == "quire-cpu" for task in Path("/proc/self/task").iterdir())
        if counted == expected:
            break
    return counted


def name_of(task):
    try:
        return (task / "comm").read_text().strip()
    except OSError:  # it has ended
        return None


def big(value):
    return torch.full((300, 1024), float(value))  # many tiles


def test_threads_start_with_the_first_work_for_them():
    runtime, add = make_add(3)
    assert runtime.pool.num_started == 0
    add(big(1)[:1], big(2)[:1])
    assert runtime.pool.num_started == 0, "one tile is the caller's"
    assert torch.equal(add(big(1), big(2)), big(3))
    assert runtime.pool.num_started == 2


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.full
def test_threads_end_with_their_pool_and_on_resizing():
    gc.collect()  # pools of earlier tests
    before = num_pool_threads(0)
    for _ in range(5):
        runtime, add = make_add(4)
        add(big(1), big(2))
        assert num_pool_threads(before + 3) == before + 3
        runtime.pool.resize(2)
        assert num_pool_threads(before) == before
        assert torch.equal(add(big(1), big(2)), big(3))
        assert num_pool_threads(before + 1) == before + 1
        del runtime, add
        assert num_pool_threads(before) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads thread states in /proc")
def test_idle_threads_sleep():
    runtime, add = make_add(3)
    add(big(1), big(2))
    assert runtime.pool.num_started == 2
    for _ in range(20_000):  # they spin for 50 us first, longer on a busy machine
        tasks = [(task / "stat").read_text() for task in Path("/proc/self/task").iterdir()]
        threads = [stat for stat in tasks if "(quire-cpu)" in stat]  # of other pools, too
        if all("(quire-cpu) S" in stat for stat in threads):
            break
    assert len(threads) >= 2 and all("(quire-cpu) S" in stat for stat in threads)


def test_several_pools_live_side_by_side():
    pairs = [make_add(n) for n in (1, 2, 3)]
    for _ in range(20):
        results = [add(big(n), big(1)) for n, (_, add) in enumerate(pairs)]
        assert all(torch.equal(result, big(n + 1)) for n, result in enumerate(results))


def test_results_do_not_depend_on_the_threads():
    torch.manual_seed(0)
    x, delta = torch.randn(300, 1024), torch.randn(300, 1024)
    results = [make_add(n)[1](x, delta, 0.3) for n in (1, 2, 5)]
    assert all(torch.equal(results[0], result) for result in results[1:])


@pytest.mark.parametrize("size", [0, -1])
def test_a_pool_has_a_thread(size):
    with pytest.raises(ValueError, match="at least one thread"):
        NATIVE.Pool(size)


PROGRAM = """
import os, sys, time, torch
from quire.kernels.cpu.runtime import CpuRuntime
from quire.ops import select

torch.set_num_threads(1)  # a child of fork() may not use torch's own pool
runtime = CpuRuntime(num_threads=3)
add = select(device="cpu", dtype=torch.float32, providers=["cpu"], runtime=runtime).add
x = torch.ones(300, 1024)
assert torch.equal(add(x, x), 2 * x)
"""
FORK = """
child = os.fork()
y = add(x, x)
assert torch.equal(y, torch.full_like(y, 2.0)) and runtime.pool.num_started == 2
if child == 0:
    del runtime, add
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""


def run(code, **options):
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code],
        check=True,
        timeout=120,
        **options,
    )


def test_the_interpreter_ends_while_threads_wait():
    run(PROGRAM)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_computes_with_threads_of_its_own():
    run(PROGRAM + FORK)


def has_amx():
    """Whether products of bfloat16 pairs are slower than those of fp32: see csrc/core/level.cpp."""
    return "amx_bf16" in gather_machine_facts().features


def test_levels_are_named_and_refused_with_a_reason():
    usable = [name for name, why in NATIVE.levels() if not why]
    fast = [name for name in usable if name != "avx512_bf16" or not has_amx()]
    assert usable[0] == "portable" and NATIVE.best_level() == fast[-1]
    assert CpuRuntime().isa == fast[-1]
    assert [CpuRuntime(isa=name).isa for name in usable] == usable
    for name, why in NATIVE.levels():
        if why:
            with pytest.raises(InvalidParameter, match=f"{why}; this machine runs portable"):
                CpuRuntime(isa=name)
    with pytest.raises(InvalidParameter, match="QUIRE_CPU_ISA='mmx' is not allowed: this machine"):
        open_runtime(num_threads=1, isa="mmx")


def test_an_installation_without_native_code_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr("quire.kernels.cpu.runtime.find_native", lambda: (None, "no compiler"))
    monkeypatch.setattr("quire.kernels.cpu.find_native", lambda: (None, "no compiler"))
    assert open_runtime(num_threads=2) is None
    assert caplog.messages == [
        "Falling back to plain torch, which is several times slower: no compiler."
    ]
    ops = select(device="cpu", dtype=torch.float32)
    why = {choice.op: (choice.provider, choice.why) for choice in ops.report()}
    assert why["norm"] == ("torch", "cpu: norm: no compiler")
    with pytest.raises(InvalidParameter, match="no compiler"):
        open_runtime(num_threads=2, isa="avx2")
