"""Two steps in flight on a late device: the same answers as one step at a time on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire import SamplingParams
from quire.engine.core.builder import build_core
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.runner.sampling.custom import CustomProcessors
from quire.step.faults import RowFailures
from quire.step.grammar_mask import GrammarMask
from tests.runner.late_engines import Life, late_target, open_core, plan_of


def serve(folder, life, *, disturbed=False, break_at=None, **wishes):
    core, driver = open_core(folder, **wishes)
    if break_at is not None:
        break_launches(core, *break_at)
    found = life.run(core, disturbed=disturbed)
    core.shutdown()
    return found, driver


def break_launches(core, handle, at_output, kind):
    """Launches with this request fail from some token on: naming its row, or nobody."""
    worker = core.executor.worker
    runner = worker.model_runner
    launch = worker.launch

    def failing(plan):
        launched = launch(plan)
        rows = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        bad = [row for row in rows if runner.rows.handles[row] == handle]
        if bad and runner.rows.num_tokens[bad[0]] >= at_output:
            raise RowFailures({bad[0]: "named"}) if kind == "named" else RuntimeError("unnamed")
        return launched

    worker.launch = failing


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sharp(when=lambda seed: seed < 12)
def test_any_life_has_the_answers_of_one_step_at_a_time(folder, seed):
    life = Life(seed)
    blocks = {} if seed % 3 else {"num_gpu_blocks_override": 15}  # too few for five requests
    right, _ = serve(folder, life, **blocks)
    found, driver = serve(folder, life, disturbed=seed % 2 == 1, late_seed=seed, **blocks)
    for handle in range(life.num_requests):
        assert found.tokens.get(handle) == right.tokens.get(handle)
        assert found.ends.get(handle) == right.ends.get(handle)
        assert found.logprobs.get(handle) == right.logprobs.get(handle)
        assert found.prompts.get(handle) == right.prompts.get(handle)
    assert driver.num_waits > 0


@pytest.mark.parametrize("kind", ["named", "unnamed"])
@pytest.mark.parametrize("seed", range(4))
def test_a_fault_costs_its_request_alone(folder, kind, seed):
    life = Life(seed)
    culprit = next(r for r in life.requests if r.handle not in life.aborted)
    length = len(culprit.prompt_token_ids)
    right, _ = serve(folder, life)
    found, _ = serve(folder, life, late_seed=seed, break_at=(culprit.handle, length, kind))
    assert found.ends[culprit.handle][0] is FinishReason.ERROR
    for handle in found.tokens:
        if handle not in life.aborted and handle != culprit.handle:
            assert found.tokens[handle] == right.tokens[handle]


def greedy(handle, prompt, **fields):
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, **fields)
    return EngineCoreRequest(handle, prompt, params, seed=0, arrival_time=0.0)


def drain(core):
    tokens = {}
    while core.has_work:
        out = core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            tokens.setdefault(handle, []).append(token)
    return tokens


def test_ids_are_read_one_step_late_and_the_extra_token_is_dropped(folder):
    core, _ = open_core(folder, late_seed=0)
    core.add_request(greedy(0, [20, 21, 22]))
    right = drain(core)[0]
    stop = right[3]
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, stop_token_ids=[stop])
    core.add_request(EngineCoreRequest(1, [20, 21, 22], params, seed=0, arrival_time=0.0))
    tokens = []
    while not (out := core.step()).finished:
        tokens += out.token_ids
        assert len(core.scheduler.in_flight) == 1, "a step runs while the ids are read"
    tokens += out.token_ids
    assert tokens == right[: right.index(stop) + 1]
    drain(core)
    core.shutdown()


def test_nothing_but_reading_waits(folder, monkeypatch):
    """A decode step is launched and sampled without a look at any value on the device."""
    target, _ = late_target(3)
    core = build_core(plan_of(folder, async_scheduling=True), target)
    for handle in range(3):
        core.add_request(greedy(handle, [20 + handle, 21, 22]))
    core.step()
    core.step()
    worker, looked = core.executor.worker, []
    launch = worker.launch

    def watched(plan):
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__bool__", "__int__", "nonzero", "cpu"):
                patch.setattr(torch.Tensor, name, lambda *_, name=name: looked.append(name))
            step = launch(plan)
            step.sample()
        step.sample = lambda mask=None: None
        return step

    worker.launch = watched
    core.step()
    assert looked == []
    worker.launch = launch
    drain(core)
    core.shutdown()


class NextOfLast:
    """Allows the token behind the newest one alone: it must have seen every id."""

    def __new__(cls, *_):
        from quire import LogitsProcessor

        class Processor(LogitsProcessor):
            def __init__(self):
                self.outputs = {}

            def is_argmax_invariant(self):
                return False

            def update_state(self, batch_update):
                from quire.runner.sampling import process_dict_updates

                process_dict_updates(self.outputs, batch_update, lambda p, prompt, out: out)

            def apply(self, logits):
                for index, out in self.outputs.items():
                    wanted = (out[-1] + 1) % 300 if out else 40
                    logits[index] = float("-inf")
                    logits[index, wanted] = 0.0
                return logits

        return Processor()


def test_rows_that_need_ids_on_the_host_wait_for_them(folder):
    core, _ = open_core(folder, late_seed=5)
    sampler = core.executor.worker.model_runner.heads.of(SamplingParams()).sampler
    sampler._custom = CustomProcessors([NextOfLast()])
    for handle in range(3):
        core.add_request(greedy(handle, [30 + handle, 5]))
    assert drain(core) == {handle: list(range(40, 49)) for handle in range(3)}
    core.shutdown()


def test_masks_that_are_made_from_the_ids_so_far_reach_their_rows(folder):
    """As a grammar does it: in each step one token is allowed, the one behind the newest."""
    core, _ = open_core(folder, late_seed=6)
    core.executor.needs_host_ids = lambda params: True
    running = core.scheduler.running

    def masks(plan, launched):
        rows = plan.sampled_rows
        bits = np.zeros((len(rows), 10), dtype=np.int32)
        for place, row in enumerate(rows):
            output = running[row].output_token_ids
            wanted = output[-1] + 1 if output else 33 * (running[row].handle + 1)
            bits[place, wanted // 32] = 1 << wanted % 32
        return GrammarMask(list(range(len(rows))), bits) if rows else None

    core._boundary._masks = masks
    for handle in range(3):
        core.add_request(greedy(handle, [30 + handle, 5]))
    firsts = {handle: 33 * (handle + 1) for handle in range(3)}
    assert drain(core) == {h: list(range(first, first + 9)) for h, first in firsts.items()}
    core.shutdown()
