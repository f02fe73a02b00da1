"""Custom logits processors in changing batches, against requests that are edited by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import InvalidParameter
from quire.params import SamplingParams
from quire.runner.sampling import (
    AdapterLogitsProcessor,
    LogitsProcessor,
    MoveDirectionality,
    find_logits_processors,
    make_logits_processors,
    process_dict_updates,
)
from quire.step.faults import ProcessorFailure
from tests.sampling.sampling_oracle import INF, Bench, Request

VOCAB = 40
PLAN = object()


def make(cls):
    [processor] = make_logits_processors([cls], plan=PLAN, device=torch.device("cpu"))
    return processor


class Shift(LogitsProcessor):
    """Adds `shift` to the token that follows the last output id; keeps a dict the way users do."""

    invariant = False

    def __init__(self, vllm_config, device, is_pin_memory):
        assert vllm_config is PLAN and not is_pin_memory
        self.entries = {}
        self.batch_size = 0
        self.updates = []

    def is_argmax_invariant(self):
        return self.invariant

    def update_state(self, batch_update):
        self.updates.append(batch_update)
        if batch_update is not None:
            self.batch_size = batch_update.batch_size
            assert len({*batch_update.removed} & {index for index, *_ in batch_update.added}) == 0
        process_dict_updates(
            self.entries,
            batch_update,
            lambda params, prompt, output: (
                (params.extra_args["shift"], prompt, output) if params.extra_args else None
            ),
        )

    def apply(self, logits):
        assert logits.shape[0] == self.batch_size
        for index, (shift, prompt, output) in self.entries.items():
            logits[index, (output or prompt)[-1] + 1] += shift
        return logits


class ByHand(Shift):
    """The same with a list of slots, and moves carried out one by one."""

    def update_state(self, batch_update):
        if batch_update is None:
            return
        self.batch_size = batch_update.batch_size
        for index in batch_update.removed:
            assert self.entries.pop(index, "never there") != "never there"
        for index, params, prompt, output in batch_update.added:
            self.entries[index] = (
                params.extra_args["shift"] if params.extra_args else 0.0,
                prompt,
                output,
            )
        for origin, target, directionality in batch_update.moved:
            if directionality is MoveDirectionality.SWAP:
                self.entries[origin], self.entries[target] = (
                    self.entries[target],
                    self.entries[origin],
                )
            else:
                assert target not in self.entries
                self.entries[target] = self.entries.pop(origin)
        assert sorted(self.entries) == list(range(batch_update.batch_size))


class PerRequest(AdapterLogitsProcessor):
    """A callable of two or three arguments; `extra_args` says which, and whether it fails."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        args = params.extra_args or {}
        if args.get("fail") == "new":
            raise RuntimeError("cannot be made")
        if not args:
            return None

        def three(prompt_ids, output_ids, logits):
            if args.get("fail") == "call":
                raise ValueError("boom")
            if args.get("fail") == "shape":
                return logits[:2]
            if args.get("fail") == "none":
                return None
            changed = logits.clone()
            changed[(output_ids or prompt_ids)[-1] + 1] += args["shift"]
            return changed

        def two(output_ids, logits):
            if output_ids:
                logits[output_ids[-1] + 1] += args["shift"]
            return logits

        return three if args.get("arguments", 3) == 3 else two


def request(rng, **more):
    args = {"shift": float(rng.choice([5.0, 50.0]))} if rng.random() < 0.7 else None
    params = SamplingParams(
        temperature=float(rng.choice([0.0, 1.0])), max_tokens=99, extra_args=args, **more
    )
    prompt = [int(i) for i in rng.integers(0, VOCAB - 1, 3)]
    output = [int(i) for i in rng.integers(0, VOCAB - 1, rng.integers(0, 3))]
    return Request(params, prompt, output, int(rng.integers(2**32)))


def expected_token(request, logits):
    """The request sampled alone, its shift made by hand before."""
    changed = logits.copy()
    args = request.params.extra_args
    if args:
        changed[(request.output or request.prompt)[-1] + 1] += np.float32(args["shift"])
    bench = Bench(VOCAB)
    bench.add(0, request)
    return bench.sample([0], changed[None]).token_ids.item()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([Shift, ByHand, PerRequest]))
def test_changing_batches(seed, cls):
    """Requests come, go, pause, change places; each row is edited as if it were alone."""
    rng = np.random.default_rng(seed)
    processor = make(cls)
    bench = Bench(VOCAB, num_rows=10, processors=[processor])
    for _ in range(8):
        for row in list(bench.requests):
            if rng.random() < 0.25:
                bench.remove(row)
        for row in range(10):
            if row not in bench.requests and rng.random() < 0.3:
                bench.add(row, request(rng))
        rows = [row for row in bench.requests if rng.random() < 0.8]
        if rng.random() < 0.5:
            rng.shuffle(rows)
        if not rows:
            continue
        logits = rng.standard_normal((len(rows), VOCAB)).astype(np.float32)
        logits[:, -1] = -INF  # the next shift must stay within the vocabulary
        logits[:, -2] = -INF
        expected = [expected_token(bench.requests[r], x) for r, x in zip(rows, logits, strict=True)]
        for _ in range(2):  # a step that failed is sampled again
            assert bench.sample(rows, logits).token_ids.tolist() == expected
        assert bench.step(rows, logits).token_ids.tolist() == expected
        for row in rows:  # keep ids in range for the shift
            bench.requests[row].output = list(bench.requests[row].output)
            if bench.requests[row].output[-1] >= VOCAB - 2:
                bench.remove(row)


def test_unchanged_batches_get_no_update():
    processor = make(Shift)
    bench = Bench(VOCAB, processors=[processor])
    for row in (3, 5):
        bench.add(row, Request(SamplingParams(), [1], [], row))
    logits = np.zeros((2, VOCAB), np.float32)
    for rows in ([3, 5], [3, 5], [5, 3]):
        bench.step(rows, logits)
    first, second, third = processor.updates
    assert first.batch_size == 2 and [index for index, *_ in first.added] == [0, 1]
    assert second is None
    assert (third.removed, third.added) == ([], [])
    assert third.moved == [(1, 0, MoveDirectionality.SWAP)]


def test_output_list_is_alive():
    processor = make(Shift)
    bench = Bench(VOCAB, processors=[processor])
    bench.add(0, Request(SamplingParams(temperature=0.0, extra_args={"shift": 0.0}), [1, 2], [9]))
    logits = np.eye(VOCAB, dtype=np.float32)[4:5]
    bench.step([0], logits)
    _, prompt, output = processor.entries[0]
    bench.step([0], logits)
    assert prompt == [1, 2] and output == [9, 4, 4]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_update_is_told_anew(when):
    class Stumbling(Shift):
        stumble = False

        def update_state(self, batch_update):
            if not self.stumble or when == "after":
                super().update_state(batch_update)
            if self.stumble:
                raise RuntimeError("once")

    processor = make(Stumbling)
    bench = Bench(VOCAB, processors=[processor])
    for row in range(4):
        bench.add(row, Request(SamplingParams(extra_args={"shift": 1.0}), [row], [], row))
    logits = np.zeros((4, VOCAB), np.float32)
    bench.sample([0, 1, 2, 3], logits)
    processor.stumble = True
    with pytest.raises(ProcessorFailure, match="RuntimeError: once"):
        bench.sample([3, 1], logits[:2])
    processor.stumble = False
    bench.sample([2, 3], logits[:2])
    assert {index: prompt for index, (_, prompt, _) in processor.entries.items()} == {
        0: [2],
        1: [3],
    }


def test_argmax_invariant_processors_are_spared_for_greedy_rows():
    class Invariant(Shift):
        invariant = True

    for cls, num_calls in ((Invariant, 0), (Shift, 1)):
        processor = make(cls)
        bench = Bench(VOCAB, processors=[processor])
        bench.add(0, Request(SamplingParams(temperature=0.0), [1], []))
        bench.sample([0], np.zeros((1, VOCAB), np.float32))
        assert len(processor.updates) == num_calls
        bench.add(1, Request(SamplingParams(), [1], []))
        bench.sample([0, 1], np.zeros((2, VOCAB), np.float32))
        assert len(processor.updates) == num_calls + 1
    for mode, num_calls in (("raw_logits", 0), ("processed_logits", 1)):
        processor = make(Invariant)
        bench = Bench(VOCAB, processors=[processor], mode=mode)
        bench.add(0, Request(SamplingParams(temperature=0.0, logprobs=1), [1], []))
        bench.sample([0], np.zeros((1, VOCAB), np.float32))
        assert len(processor.updates) == num_calls


@pytest.mark.parametrize("failure", ["new", "call", "shape", "none"])
def test_one_failing_callable_fails_its_row_alone(failure):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, VOCAB)).astype(np.float32)
    results = []
    for bad in (False, True):
        bench = Bench(VOCAB, processors=[make(PerRequest)])
        for row in range(5):
            args = {"shift": 3.0}
            if bad and row == 2:
                args["fail"] = failure
            bench.add(row, Request(SamplingParams(extra_args=args, logprobs=1), [row], [], row))
        results.append(bench.sample([4, 3, 2, 1, 0], logits))
    healthy, broken = results
    assert not healthy.errors and list(broken.errors) == [2]
    words = {
        "new": "RuntimeError: cannot be made",
        "call": "ValueError: boom",
        "shape": "TypeError: it must return logits of shape",
        "none": "TypeError: it must return logits of shape",
    }
    assert words[failure] in broken.errors[2]
    assert broken.logprobs.index == [0, 1, 3, 4]
    for i in (0, 1, 3, 4):
        assert broken.token_ids[i] == healthy.token_ids[i]


def test_two_argument_callables_get_the_output():
    bench = Bench(VOCAB, processors=[make(PerRequest)])
    params = SamplingParams(temperature=0.0, extra_args={"shift": 9.0, "arguments": 2})
    bench.add(0, Request(params, [1], [7]))
    result = bench.sample([0], np.zeros((1, VOCAB), np.float32))
    assert result.token_ids.tolist() == [8]


def test_needs_host_ids():
    plain, special = SamplingParams(), SamplingParams(extra_args={"shift": 1.0})
    failing = SamplingParams(extra_args={"fail": "new"})
    assert not Bench(VOCAB).sampler.needs_host_ids(special)
    adapted = Bench(VOCAB, processors=[make(PerRequest)]).sampler
    assert [adapted.needs_host_ids(p) for p in (plain, special, failing)] == [False, True, True]
    assert Bench(VOCAB, processors=[make(Shift)]).sampler.needs_host_ids(plain)


def test_processors_see_penalties_and_raw_logprobs_do_not_see_them():
    seen = []

    class Watching(Shift):
        def apply(self, logits):
            seen.append(logits.clone())
            return logits - 1e6 * (torch.arange(VOCAB) != 5)

    bench = Bench(VOCAB, processors=[make(Watching)])
    params = SamplingParams(temperature=0.5, presence_penalty=2.0, logprobs=0)
    bench.add(0, Request(params, [1], [7]))
    result = bench.sample([0], np.zeros((1, VOCAB), np.float32))
    assert seen[0][0, 7] == -2.0 and seen[0][0].count_nonzero() == 1
    assert result.token_ids.tolist() == [5]
    assert result.logprobs.values[0, 0].item() == pytest.approx(-math.log(VOCAB))


def test_a_wrong_result_of_a_batch_processor_is_named():
    class Forgetful(Shift):
        def apply(self, logits):
            return None

    bench = Bench(VOCAB, processors=[make(Forgetful)])
    bench.add(0, Request(SamplingParams(), [1], []))
    with pytest.raises(
        ProcessorFailure, match=r"Forgetful.apply must return logits of shape \(1, 40\)"
    ):
        bench.sample([0], np.zeros((1, VOCAB), np.float32))


NAME = "quire.runner.sampling.logits_processor:AdapterLogitsProcessor"


def test_finding_processors():
    assert find_logits_processors([NAME]) == [AdapterLogitsProcessor]
    assert find_logits_processors([Shift, NAME, Shift]) == [Shift, AdapterLogitsProcessor]


@pytest.mark.parametrize(
    ("given_item", "words"),
    [
        ("no_such_module:X", "cannot be imported"),
        ("quire.errors:NoSuchClass", "cannot be imported"),
        ("quire.errors", "'module:Class'"),
        ("quire.errors:EngineError", "subclass of quire.LogitsProcessor"),
        (int, "subclass of quire.LogitsProcessor"),
        (3, "subclass of quire.LogitsProcessor"),
    ],
)
def test_anything_but_a_processor_is_refused(given_item, words):
    with pytest.raises(InvalidParameter, match=words) as caught:
        find_logits_processors([given_item])
    assert caught.value.parameter == "logits_processors"


def test_a_failed_row_gets_no_token_in_its_list():
    processor = make(Shift)
    bench = Bench(VOCAB, processors=[processor])
    for row in range(2):
        bench.add(row, Request(SamplingParams(extra_args={"shift": 1.0}), [1], [4], row))
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0] = math.nan
    bench.step([0, 1], logits)
    lengths = [len(output) for _, _, output in processor.entries.values()]
    assert lengths == [1, 2]
