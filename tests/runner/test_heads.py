"""Rows of a second kind in the same steps: a pooler's rows end with their prompt and get a vector,
and rows that generate do not notice.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch

from quire import PoolingParams, SamplingParams
from quire.engine.core.core import EngineCore
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.hardware.native import find_native
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.scheduling.scheduler import Scheduler
from quire.step.columns import PooledOutput
from tests.runner.late_engines import Life, open_core
from tests.support.output_parts import of_kind
from tests.support.simulation import invariants

native_only = pytest.mark.skipif(
    find_native()[0] is None, reason="plain torch promises no equal bits in another batch"
)
depths = pytest.mark.parametrize("late_seed", [None, 4], ids=["depth-1", "depth-2"])


class LastHidden:
    """A pooler: the hidden state behind a prompt's last token. `fails` has handles with bad luck,
    `breaks` those that end the whole step.
    """

    def __init__(self, runner):
        self.rows, self.owners = runner.rows, {}
        self.fails, self.breaks = set(), set()
        self.tasks = ("embed",)

    def needs_host_ids(self, params):
        return False

    def add_row(self, new):
        self.owners[new.row] = new.handle

    def remove_row(self, row):
        del self.owners[row]

    def begin(self, inputs):
        mine = [i for i, row in enumerate(inputs.rows.tolist()) if row in self.owners]
        return LastHiddenStep(self, inputs, mine) if mine else None


class LastHiddenStep:
    moves_rows = False

    def __init__(self, head, inputs, mine):
        rows = head.rows
        ends = rows.num_computed[inputs.rows] + inputs.counts == rows.num_prompt[inputs.rows]
        self.head = head
        self.places = [int(inputs.starts[i + 1]) - 1 for i in mine if ends[i]]
        self.whose = [int(inputs.rows[i]) for i in mine if ends[i]]
        self.handles = [head.owners[row] for row in self.whose]

    def compute(self, states, mask):
        if self.head.breaks & set(self.handles):
            raise RuntimeError("a kernel of the pooler")
        return [states.last.index_select(0, torch.tensor(self.places, dtype=torch.int64)).float()]

    def advance(self):
        pass

    def report(self, values, output):
        for row, handle, vector in zip(self.whose, self.handles, values[0], strict=True):
            if handle in self.head.fails:
                output.result.errors[row] = "the prompt could not be pooled"
            else:
                output.parts.append(PooledOutput(handle, vector.numpy().copy()))


def open_pooling_core(folder, **wishes):
    core, _ = open_core(folder, **wishes)
    runner = core.executor.worker.model_runner
    runner.register(PoolingParams, head := LastHidden(runner))
    return core, head


def prompts(count, seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(10, 200, draw.integers(1, 30)).tolist() for _ in range(count)]


def pooling(handle, prompt):
    return EngineCoreRequest(handle, prompt, PoolingParams(task="embed"), 0, 0.0)


def drain(core):
    """Vectors, endings and starts, by handle."""
    vectors, ends, starts = {}, {}, {}
    while core.has_work:
        out = core.step()
        invariants.check(core.scheduler)
        assert not {one.handle for one in of_kind(PooledOutput, out)} & vectors.keys(), (
            "two results"
        )
        vectors |= {one.handle: one.values for one in of_kind(PooledOutput, out)}
        starts |= {one.handle: one for one in out.started}
        ends |= {one.handle: one for one in out.finished}
    invariants.check_idle(core.scheduler)
    return vectors, ends, starts


def pooled_alone(folder, wanted):
    core, _ = open_pooling_core(folder)
    found = {}
    for handle, prompt in wanted.items():
        core.add_request(pooling(handle, prompt))
        found |= drain(core)[0]
    core.shutdown()
    return found


def test_a_vector_is_the_state_from_which_the_first_token_is_drawn(folder):
    core, _ = open_pooling_core(folder)
    model = core.executor.worker.get_model()
    for handle, prompt in enumerate(prompts(4)):
        core.add_request(pooling(handle, prompt))
        vectors, ends, starts = drain(core)
        assert ends[handle].reason is FinishReason.STOP and handle in starts
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        core.add_request(EngineCoreRequest(9, prompt, params, 0, 0.0))
        [token] = core.step().token_ids + core.step().token_ids
        with torch.inference_mode():
            logits = model.logits(torch.from_numpy(vectors[handle])[None])
        assert int(logits.argmax()) == token
    core.shutdown()


@native_only
@pytest.mark.parametrize("num_blocks", [30, 15], ids=["roomy", "tight"])
@pytest.mark.parametrize("seed", range(3))
def test_kinds_share_steps_and_neither_changes_the_other_s_bits(folder, seed, num_blocks):
    life, wanted = Life(seed), dict(enumerate(prompts(8, seed), 100))
    core, _ = open_core(folder, num_gpu_blocks_override=num_blocks)
    right = life.run(core, disturbed=False)
    core.shutdown()
    core, _ = open_pooling_core(folder, num_gpu_blocks_override=num_blocks)
    mixed, vectors, step, coming = set(), {}, core.step, iter(wanted.items())

    def watched():
        for handle, prompt in itertools.islice(coming, 1):
            core.add_request(pooling(handle, prompt))
        out = step()
        vectors.update((one.handle, one.values) for one in of_kind(PooledOutput, out))
        mixed.add(bool(out.token_ids and of_kind(PooledOutput, out)))
        return out

    core.step = watched
    found = life.run(core, disturbed=True)
    core.shutdown()
    assert True in mixed, "no step had rows of both kinds"
    assert found.tokens == right.tokens and found.logprobs == right.logprobs
    assert {h: end for h, end in found.ends.items() if h < 100} == right.ends
    alone = pooled_alone(folder, wanted)
    assert vectors.keys() == alone.keys()
    for handle, vector in vectors.items():
        assert np.array_equal(vector, alone[handle]), "the same bits alone and in a batch"


@depths
def test_every_prompt_gets_one_vector_whatever_is_in_flight(folder, late_seed):
    wanted = dict(enumerate(prompts(9, 3)))
    right = pooled_alone(folder, wanted)
    core, _ = open_pooling_core(folder, late_seed=late_seed)
    for handle, prompt in wanted.items():
        core.add_request(pooling(handle, prompt))
    vectors, ends, _ = drain(core)
    core.shutdown()
    assert {end.reason for end in ends.values()} == {FinishReason.STOP}
    for handle in wanted:
        assert np.allclose(vectors[handle], right[handle], atol=1e-5)


@depths
@pytest.mark.parametrize("how", ["fails", "breaks"])
def test_a_prompt_that_cannot_be_pooled_fails_alone(folder, late_seed, how):
    core, head = open_pooling_core(folder, late_seed=late_seed)
    getattr(head, how).add(1)
    for handle in range(3):
        core.add_request(pooling(handle, [20 + handle, 21, 22]))
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    core.add_request(EngineCoreRequest(7, [30, 31], params, 0, 0.0))
    vectors, ends, _ = drain(core)
    core.shutdown()
    assert vectors.keys() == {0, 2}
    assert ends[1].reason is FinishReason.ERROR and "0x" not in ends[1].message
    assert ends[7].reason is FinishReason.LENGTH


def test_a_model_without_a_pooler_refuses_by_name(folder):
    core, _ = open_core(folder)
    core.add_request(pooling(0, [20, 21]))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    core.add_request(EngineCoreRequest(1, [20, 21], params, 0, 0.0))
    _, ends, _ = drain(core)
    assert ends[0].reason is FinishReason.ERROR and "no head for such requests" in ends[0].message
    assert ends[1].reason is FinishReason.LENGTH
    core.shutdown()


def test_a_vector_travels_with_its_request_s_end(folder):
    core, _ = open_pooling_core(folder)
    core.add_request(pooling(5, [20, 21, 22]))
    out = core.step()
    frames = [bytes(frame) for frame in MessageEncoder().encode(out)]
    arrived = MessageDecoder(EngineCoreOutputs).decode(frames)
    [view] = arrived.outputs
    assert view.finished and view.new_token_ids == []
    assert np.array_equal(view.pooling_output, out.parts[0].values)
    core.shutdown()


class Guesses:
    """Drafts that are wrong half of the time, for rows of one or two of these."""

    def __init__(self, answers):
        self.answers = answers

    def propose(self, rows, sampled):
        return [self.guess(rows, row) for row in sampled]

    def guess(self, rows, row):
        answer = self.answers.get(int(rows.handles[row]), [])
        done = int(rows.num_tokens[row] - rows.num_prompt[row])
        drafts = [t if (done + i) % 2 else 250 for i, t in enumerate(answer[done : done + 2])]
        rows.write_drafts(row, drafts)
        return len(drafts)


def test_rows_that_pool_move_on_with_rows_whose_drafts_are_verified(folder):
    wanted = dict(enumerate(prompts(6, 7), 100))
    right = pooled_alone(folder, wanted)
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    asked = [EngineCoreRequest(handle, [30 + handle, 31], params, 0, 0.0) for handle in range(2)]
    plain, _ = open_core(folder)
    tokens = {}
    for request in asked:
        plain.add_request(request)
        tokens[request.handle] = [t for out in iter_steps(plain) for t in out.token_ids]
    plain.shutdown()
    pooling_core, _ = open_pooling_core(folder)
    config = msgspec.structs.replace(pooling_core.scheduler.config, num_drafts=2)
    runner = pooling_core.executor.worker.model_runner
    runner.heads.of(params).drafter = Guesses(tokens)
    core = EngineCore(Scheduler(config), pooling_core.executor)
    for request in [*asked, *(pooling(handle, prompt) for handle, prompt in wanted.items())]:
        core.add_request(request)
    found, vectors = {}, {}
    for out in iter_steps(core):
        ids = iter(out.token_ids)
        for handle, count in zip(out.handles, out.counts or [1] * len(out.handles), strict=True):
            found.setdefault(handle, []).extend(itertools.islice(ids, count))
        vectors |= {one.handle: one.values for one in of_kind(PooledOutput, out)}
    core.shutdown()
    assert found == tokens and vectors.keys() == right.keys()
    for handle, vector in vectors.items():
        assert np.allclose(vector, right[handle], atol=1e-5)


def iter_steps(core):
    while core.has_work:
        yield core.step()
