"""Workers that share a model's heads and feed-forward width: the tokens of one, the same bits every
time, and a failure of one that is a failure of the step.
"""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future

import numpy as np
import pytest

from quire import SamplingParams
from quire.distributed.inproc_group import InprocGroup
from quire.engine.control_verbs import perform
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.errors import EngineDeadError, LoadError
from quire.hardware.native import find_native
from quire.runner.forward.forward import RecordedForward
from quire.step.faults import RowFailures
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, requests, same_bits, serve
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS, write
from tests.support.op_cases.costs import nbytes

FAMILIES = ("llama", "qwen3", "gemma2", "starcoder2", "phi3", "minicpm3")
IS_NATIVE = find_native()[0] is not None
SIX_AND_THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
NINE_HEADS = {
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 144,
    "intermediate_size": 384,
}
THREE_EXPERTS = {
    "num_hidden_layers": 1,
    "num_local_experts": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_size": 128,
}
FOUR_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "vocab_size": 384}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen3", dtype="float32")


@pytest.fixture(scope="module")
def right(folder):
    core = open_core(folder, 1)
    found = serve(core)
    core.shutdown()
    return found


def assert_close(found, right):
    assert found.tokens == right.tokens
    for mine, theirs in ((found.logprobs, right.logprobs), (found.prompts, right.prompts)):
        assert mine.keys() == theirs.keys()
        for handle in mine:
            assert np.allclose(mine[handle], theirs[handle], atol=1e-4)


def answers(folder, sizes, given=None, **wishes):
    found = []
    for num_workers in sizes:
        core = open_core(folder, num_workers, **wishes)
        found.append(serve(core, given))
        core.shutdown()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_two_workers_answer_as_one(tmp_path, family):
    folder = make_checkpoint(tmp_path, "tiny", family, dtype="float32")
    one, two = answers(folder, (1, 2), requests(5))
    assert_close(one, two)
    assert same_bits(one, two) or not IS_NATIVE


KINDS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int8-weight-only": {"dtype": "bfloat16", "quantization": "int8_weight_only"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}


@pytest.mark.skipif(not IS_NATIVE, reason="plain torch adds in an order of its own")
@pytest.mark.parametrize("kind", KINDS)
def test_one_two_and_four_workers_have_the_same_bits(tmp_path, kind):
    shape = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 384}
    folder = make_checkpoint(tmp_path, shape, "llama", dtype="float32")
    one, *others = answers(folder, (1, 2, 4), requests(5), **KINDS[kind])
    assert one.logprobs and one.prompts
    assert all(same_bits(one, other) for other in others)


@pytest.mark.skipif(not IS_NATIVE, reason="plain torch adds in an order of its own")
@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", pytest.param("int8", marks=pytest.mark.full)]
)
def test_workers_have_whole_experts_and_the_bits_of_one(tmp_path, kind):
    shape = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 7}
    folder = make_checkpoint(tmp_path, shape, "mixtral", dtype="float32")
    one, *others = answers(folder, (1, 2, 4), requests(5), **KINDS[kind])
    assert one.logprobs and one.prompts
    assert all(same_bits(one, other) for other in others)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_three_workers_answer_as_one_and_have_bits_of_their_own(tmp_path, kind, caplog):
    """Nine heads form no equal segments: the parts are added in the order of the ranks."""
    folder = make_checkpoint(tmp_path, NINE_HEADS, "llama", dtype="float32")
    with caplog.at_level("INFO", logger="quire.models.loading.weights"):
        one, three, again = answers(folder, (1, 3, 3), requests(5), **KINDS[kind])
    assert caplog.text.count("3 workers add up this model's products") == 2
    assert three.tokens == one.tokens
    assert same_bits(three, again)
    if kind == "float32":
        assert_close(three, one)


def test_a_worker_reads_only_its_experts(tmp_path):
    shape = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 96, "num_local_experts": 8}
    folder = make_checkpoint(tmp_path, shape, "mixtral", dtype="float32")
    one, four = open_core(folder, 1), open_core(folder, 4)
    whole = one.executor.worker.get_model().weight_bytes
    missing = 2 * 6 * 3 * 128 * 96 * 4  # of two layers, six experts of three matrices
    for worker in four.executor.workers:
        assert whole - worker.get_model().weight_bytes >= missing
    for core in (one, four):
        core.shutdown()


@pytest.mark.skipif(not IS_NATIVE, reason="plain torch adds in an order of its own")
@pytest.mark.parametrize("family", ["qwen2", "olmo2"])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_workers_have_the_same_head_where_keys_and_values_have_fewer(tmp_path, kv_heads, family):
    """Also with norms of all keys at once."""
    shape = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 384}
    shape["num_key_value_heads"] = kv_heads
    folder = make_checkpoint(tmp_path, shape, family, dtype="float32")
    one, *others = answers(folder, (1, 2, 4), requests(5))
    assert one.logprobs and one.prompts
    assert all(same_bits(one, other) for other in others)


@pytest.mark.skipif(not IS_NATIVE, reason="plain torch adds in an order of its own")
@pytest.mark.parametrize(
    "layout", ["awq", "gptq-v2-act_order", "compressed-int", "modelopt-channel"]
)
def test_workers_share_weights_in_codes_by_whole_groups(tmp_path, layout):
    shape = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 384}
    plain = make_checkpoint(tmp_path / "plain", shape, "llama", dtype="float32")
    shutil.copytree(plain, tmp_path / "codes")
    write(plain, tmp_path / "codes", (FORMATS | BYTE_FORMATS)[layout])
    if layout.endswith("act_order"):
        with pytest.raises(LoadError, match="groups of inputs with one scale are not whole"):
            open_core(tmp_path / "codes", 2)
        return
    one, *others = answers(tmp_path / "codes", (1, 2, 4), requests(5))
    assert one.logprobs and one.prompts
    assert all(same_bits(one, other) for other in others)


@pytest.mark.skipif(not IS_NATIVE, reason="plain torch adds in an order of its own")
def test_products_whose_scales_cannot_be_cut_are_whole(tmp_path, caplog):
    """Groups of 128 inputs, of which each of two workers would have one and a half."""
    shape = FOUR_HEADS | {"hidden_size": 128, "intermediate_size": 384}
    folder = make_checkpoint(tmp_path, shape, "llama", dtype="float32")
    with caplog.at_level("INFO", logger="quire.models.loading.weights"):
        one, two = answers(folder, (1, 2), requests(5), quantization="int4_g128", dtype="bfloat16")
    assert "a scale for every 128 of the 384 inputs of a feed-forward layer" in caplog.text
    assert same_bits(one, two)


@pytest.mark.skipif(not IS_NATIVE, reason="plain torch records nothing")
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_steps_are_recorded_and_have_the_bits_of_eager_ones(folder, kind):
    eager = open_core(folder, 2, enforce_eager=True, **KINDS[kind])
    recorded = open_core(folder, 2, **KINDS[kind])
    forwards = [worker.model_runner._forward for worker in recorded.executor.workers]
    assert all(isinstance(forward, RecordedForward) for forward in forwards)
    assert all(forward._plain.sampling is not None for forward in forwards), "each has a part"
    assert same_bits(serve(eager), serve(recorded))
    for core in (eager, recorded):
        core.shutdown()


@pytest.mark.parametrize("wishes", [{}, {"async_scheduling": True}], ids=["depth-1", "depth-2"])
def test_every_run_has_the_same_bits(folder, right, wishes):
    runs = []
    for _ in range(2):
        core = open_core(folder, 2, **wishes)
        runs.append(serve(core))
        core.shutdown()
    assert same_bits(*runs)
    assert_close(runs[0], right)


def test_each_worker_has_its_part_and_no_more(folder):
    one, two = open_core(folder, 1), open_core(folder, 2)
    whole, parts = one.executor.worker, two.executor.workers
    assert [part.kv_cache_bytes() for part in parts] == [whole.kv_cache_bytes() // 2] * 2
    model = whole.get_model()
    replicated = nbytes(model.head.weight) + 4 * num_norm_values(model.spec)
    cut = model.weight_bytes - replicated
    assert [part.get_model().weight_bytes for part in parts] == [replicated + cut // 2] * 2
    for core in (one, two):
        core.shutdown()


def num_norm_values(spec):
    layers = len(spec.blocks)
    return (2 * layers + 1) * spec.dim + 2 * layers * spec.blocks[0].mixer.head_dim


def test_workers_end_with_their_threads(folder):
    core = open_core(folder, 2)
    assert any(thread.name.startswith("worker1") for thread in threading.enumerate())
    core.shutdown()
    assert not any(thread.name.startswith("worker") for thread in threading.enumerate())
    with pytest.raises(EngineDeadError, match="closed"):
        core.executor.worker  # noqa: B018


def test_workers_load_their_weights_again_together(folder):
    """Rows that are rounded by their largest weight, wherever that is."""
    core = open_core(folder, 2, **KINDS["int8"])
    before = serve(core)
    perform(core, "sleep", (2,))
    assert perform(core, "wake_up", ()) is True
    assert same_bits(before, serve(core))
    core.shutdown()


def test_control_reaches_every_worker(folder, right):
    core = open_core(folder, 2)
    assert core.executor.collective_rpc("get_supported_tasks", (), {}) == [("generate",)] * 2
    assert core.executor.collective_rpc(lambda worker: worker.rank, (), {}) == [0, 1]
    for level in (1, 2):
        answer = perform(core, "sleep", (level,))
        assert isinstance(answer, Future) and answer.done()
        assert [worker.kv_cache_bytes() for worker in core.executor.workers] == [0, 0]
        assert perform(core, "wake_up", ()) is True
    assert_close(serve(core), right)
    core.shutdown()


@pytest.mark.parametrize(
    ("shape", "family", "num_workers", "wishes", "why"),
    [
        ("tiny", "llama", 3, {}, "heads, which 3 workers cannot share equally"),
        (SIX_AND_THREE, "llama", 2, {}, "3 key/value heads, which 2 workers cannot share"),
        (THREE_EXPERTS, "mixtral", 4, {}, "has 3 experts, fewer than 4 workers"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path, shape, family, num_workers, wishes, why):
    folder = make_checkpoint(tmp_path, shape, family, dtype="float32")
    with pytest.raises(LoadError, match=why):
        open_core(folder, num_workers, **wishes)
    assert not any(thread.name.startswith("worker") for thread in threading.enumerate())


# failures


def rows_of(plan):
    return [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]


def break_worker(worker, handle, kind, when, at_output=3):
    """Steps with this request fail on one worker from some token on: before the model runs, where
    the others wait for it, behind it, before results are computed, or when they have been.
    """
    runner = worker.model_runner
    launch = worker.launch

    def check(plan):
        rows = runner.rows
        held = set(rows_of(plan)) - {new.row for new in plan.added if new.handle != handle}
        bad = [row for row in held if rows.handles[row] == handle]
        if bad and rows.num_tokens[bad[0]] >= rows.num_prompt[bad[0]] + at_output:
            raise RowFailures({bad[0]: "named"}) if kind == "named" else RuntimeError("unnamed")

    def failing(plan, **given):
        if when == "before":
            check(plan)
        launched = launch(plan, **given)
        if when == "behind":
            check(plan)
        if when in ("results", "end") and plan.num_tokens:
            compute = launched.compute

            def failing_compute(mask=None):
                if when == "results":
                    check(plan)
                compute(mask)
                check(plan)

            launched.compute = failing_compute
        return launched

    worker.launch = failing


def assert_rows_agree(core):
    first, second = (worker.model_runner.rows for worker in core.executor.workers)
    assert np.array_equal(first.num_computed, second.num_computed)
    assert np.array_equal(first.num_tokens, second.num_tokens)
    assert np.array_equal(first.handles, second.handles)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("when", ["before", "behind", "results", "end"])
@pytest.mark.parametrize("kind", ["named", "unnamed"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_on_one_worker_costs_its_request_alone(folder, right, rank, kind, when, depth):
    core = open_core(folder, 2, async_scheduling=depth == 2)
    break_worker(core.executor.workers[rank], 2, kind, when)
    step = core.step

    def watched():
        out = step()
        if depth == 1:
            assert_rows_agree(core)
        return out

    core.step = watched
    found = serve(core)
    core.shutdown()
    failed = {h for h, end in found.ends.items() if end.reason is FinishReason.ERROR}
    assert failed == {2} and found.tokens[2] == right.tokens[2][: len(found.tokens[2])]
    assert "0x" not in found.ends[2].message
    del found.tokens[2]
    assert found.tokens == {handle: right.tokens[handle] for handle in found.tokens}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [1, 4, 5, 18, 35])
def test_an_exchange_that_fails_once_costs_nobody(folder, rank, number, monkeypatch):
    """Whichever exchange it is, the step is run again in halves on both workers."""
    calls, real = [], InprocGroup.gather

    def flaky(self, x, out=None):
        if self.rank == rank:
            calls.append(x)
            if len(calls) == number:
                raise OSError("once")
        return real(self, x, out)

    monkeypatch.setattr(InprocGroup, "gather", flaky)
    answers = []
    for num_workers in (1, 2):
        core = open_core(folder, num_workers)
        for request in together():
            core.add_request(request)
        answers.append(serve(core, []))
        core.shutdown()
    assert len(calls) > number
    assert {end.reason for end in answers[1].ends.values()} == {FinishReason.LENGTH}
    assert answers[1].tokens == answers[0].tokens


def together():
    """Requests that are in all steps of each other."""
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    prompts = ([20, 21, 22], [30, 31, 32, 33], [40, 41])
    return [EngineCoreRequest(h, prompt, params, h, 0.0) for h, prompt in enumerate(prompts)]


def test_a_dead_worker_is_a_dead_engine(folder):
    core = open_core(folder, 2)
    for request in requests()[:3]:
        core.add_request(request)
    core.step()

    def dead(plan, **given):
        raise EngineDeadError("The GPU of this worker failed")

    core.executor.workers[1].launch = dead
    with pytest.raises(EngineDeadError, match="GPU of this worker"):
        core.step()
    core.shutdown()
