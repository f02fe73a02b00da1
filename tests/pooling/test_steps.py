"""A pooling head in the steps of a core: ahead on a late device, preempted, run again."""

import itertools

import numpy as np
import pytest

from quire import PoolingParams
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.hardware.native import find_native
from quire.runner.warm_up import warm_up_pooling
from quire.step.columns import PooledOutput
from quire.testing import make_checkpoint
from tests.pooling import models
from tests.runner.late_engines import open_core
from tests.support.output_parts import of_kind
from tests.support.simulation import invariants

pytestmark = pytest.mark.skipif(
    find_native()[0] is None, reason="plain torch promises no equal bits in another batch"
)
LATE = {"rtol": 1e-4, "atol": 1e-5}
TASKS = ("embed", "token_embed")
ASKED = models.prompts(seed=3, lengths=(1, 40, 33, 90, 7, 64, 20))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen3", dtype="float32")


def open_pooling(folder, pooling="MEAN", **options):
    config = {"seq_pooling_type": pooling}
    fixed = {"runner": "pooling", "pooler_config": config, "max_num_batched_tokens": 24}
    fixed |= {"max_model_len": 160, "num_gpu_blocks_override": 60}
    return open_core(folder, **{**fixed, "max_num_seqs": 4, **options})[0]


def add(core, handle, prompt):
    params = PoolingParams(
        task=TASKS[handle % 2], use_activation=bool(handle % 3), skip_reading_prefix_cache=True
    )
    core.add_request(EngineCoreRequest(handle, prompt, params, 0, 0.0))


def drain(core, disturb=lambda core, step: None):
    found, ends = {}, {}
    for step in itertools.count():
        if not core.has_work:
            break
        disturb(core, step)
        out = core.step()
        invariants.check(core.scheduler)
        assert not {one.handle for one in of_kind(PooledOutput, out)} & found.keys(), "two results"
        found |= {one.handle: one.values for one in of_kind(PooledOutput, out)}
        ends |= {one.handle: one.reason for one in out.finished}
    invariants.check_idle(core.scheduler)
    return found, ends


def run(core, disturb=lambda core, step: None):
    for handle, prompt in enumerate(ASKED):
        add(core, handle, prompt)
    found, ends = drain(core, disturb)
    assert set(ends.values()) == {FinishReason.STOP} and len(ends) == len(ASKED)
    core.shutdown()
    return [found[handle] for handle in range(len(ASKED))]


def same(found, wanted, late_seed=None):
    """On the late device plain torch computes, which promises no bits."""
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, **({"rtol": 0, "atol": 0} if late_seed is None else LATE))


@pytest.mark.parametrize("pooling", ["MEAN", "CLS", "LAST"])
def test_ahead_preempted_and_run_again(folder, pooling):
    wanted = run(open_pooling(folder, pooling, max_num_batched_tokens=512, max_num_seqs=1))
    assert {len(values.shape) for values in wanted} == {1, 2}
    for late_seed in (None, 4):
        same(run(open_pooling(folder, pooling, late_seed=late_seed)), wanted, late_seed)

        def preempt(core, step):
            if step % 5 == 4 and step < 30:
                core.scheduler.reset_prefix_cache(reset_running_requests=True)

        core = open_pooling(folder, pooling, late_seed=late_seed)
        same(run(core, preempt), wanted, late_seed)
        core = open_pooling(folder, pooling, late_seed=late_seed)
        head = core.executor.worker.model_runner.heads.of(PoolingParams())
        begin, calls = head.begin, itertools.count()

        def fail_now_and_then(inputs, begin=begin, calls=calls):
            step = begin(inputs)
            if len(inputs.rows) > 1 and next(calls) % 2:
                compute = step.compute

                def broken(states, mask):
                    compute(states, mask)
                    raise RuntimeError("after the head has computed")

                step.compute = broken
            return step

        head.begin = fail_now_and_then
        same(run(core), wanted, late_seed)


@pytest.mark.parametrize("late_seed", [None, 2])
def test_warm_up_leaves_nothing(folder, late_seed):
    wanted = run(open_pooling(folder))
    core = open_pooling(folder, late_seed=late_seed)
    runner = core.executor.worker.model_runner
    warm_up_pooling(runner, tasks=TASKS, num_tokens=24, num_rows=4, max_len=48)
    assert (runner.rows.handles == -1).all()
    same(run(core), wanted, late_seed)
