"""The sampler against the written-out oracle; its promises on batches, seeds and failures."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.params import SamplingParams, StructuredOutputsParams
from quire.runner.devices.stream_device import StreamDevice
from quire.runner.sampling.sampler import SamplerOutput
from tests.sampling import sampling_oracle as oracle
from tests.sampling.sampling_oracle import INF, Bench, Request, make_params
from tests.support.late_driver import LateDriver


def few(rng, vocab_size, most):
    return [int(i) for i in rng.integers(0, vocab_size, rng.integers(0, most + 1))]


def random_bad_words(rng, vocab_size, output):
    words = [[int(i)] for i in rng.integers(0, vocab_size, 2)]
    for length in (1, 2, 3):
        if len(output) >= length:
            words.append([*output[-length:], int(rng.integers(vocab_size))])
            words.append([(output[-length] + 1) % vocab_size, *output[-length + 1 :][: length - 1]])
    return words


def random_request(rng, vocab_size):
    """A request in which each feature is on with probability one half."""

    def maybe(value, default):
        return value if rng.random() < 0.5 else default

    output = few(rng, vocab_size, 12)
    prompt = [int(i) for i in rng.integers(0, vocab_size, rng.integers(1, 12))]
    params = make_params(
        temperature=maybe(float(rng.choice([0.0, 0.01, 0.5, 1.3])), 1.0),
        top_k=maybe(int(rng.integers(1, vocab_size + 2)), 0),
        top_p=maybe(float(rng.choice([1e-6, 0.3, 0.7, 0.999])), 1.0),
        min_p=maybe(float(rng.choice([1e-3, 0.05, 0.4])), 0.0),
        repetition_penalty=maybe(float(rng.choice([0.7, 1.4])), 1.0),
        frequency_penalty=maybe(float(rng.choice([-1.5, 0.6])), 0.0),
        presence_penalty=maybe(float(rng.choice([-0.7, 1.1])), 0.0),
        logit_bias=maybe({i: float(rng.normal()) * 4 for i in few(rng, vocab_size, 4)}, None),
        allowed_token_ids=maybe(sorted({0, *few(rng, vocab_size, 20)}), None),
        min_tokens=maybe(int(rng.integers(0, 12)), 0),
        max_tokens=50,
        stops=few(rng, vocab_size, 2),
        bad_words=maybe(random_bad_words(rng, vocab_size, output), None),
    )
    return Request(params, prompt, output, int(rng.integers(0, 2**64, dtype=np.uint64)))


def random_batch(seed, *, most=6):
    """(requests, logits [R, V], mask or None); coarse logits, so that ties are common."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([5, 37, 64, 200, 700]))
    requests = [random_request(rng, vocab_size) for _ in range(rng.integers(1, most + 1))]
    logits = np.round(rng.standard_normal((len(requests), vocab_size)) * 24) / 8
    mask = None
    if rng.random() < 0.3:
        shape = (len(requests), -(-vocab_size // 32))
        words = rng.integers(0, 2**32, shape, dtype=np.uint32) | np.uint32(1)
        words[rng.random(len(requests)) < 0.5] = 2**32 - 1
        mask = torch.from_numpy(words.view(np.int32))
    return requests, logits.astype(np.float32), mask


def bench_with(requests, vocab_size, **options):
    bench = Bench(vocab_size, **options)
    rows = [15 - 2 * i for i in range(len(requests))]
    for row, request in zip(rows, requests, strict=True):
        bench.add(row, copy.deepcopy(request))
    return bench, rows


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_pipeline_equals_the_oracle(seed):
    """All features mixed in one batch: every processed logit, and the drawn token."""
    requests, logits, mask = random_batch(seed)
    for request in requests:
        request.params.logprobs = -1
    bench, rows = bench_with(requests, logits.shape[1], mode="processed_logits")
    result = bench.sample(rows, logits, None if mask is None else mask.clone())
    found = {} if result.logprobs is None else dict(enumerate(result.logprobs.index))
    found = {index: m for m, index in found.items()}
    for i, request in enumerate(requests):
        raw = logits[i] if mask is None else oracle.masked(logits[i], mask[i].tolist())
        before = oracle.edited(raw, request)
        if before.max() == -INF:
            assert "forbid every one" in result.errors[i] and i not in found
            continue
        try:
            kept = oracle.filtered(before, request.params)
        except oracle.Ambiguous:
            continue
        ids, values = result.logprobs.token_ids[found[i]], result.logprobs.values[found[i]]
        assert result.logprobs.counts[found[i]] == len(kept) + 1
        assert np.array_equal(values[1:], np.sort(kept)[::-1])
        assert np.array_equal(kept[ids[1:]], values[1:])
        token_id = int(result.token_ids[i])
        assert ids[0] == token_id and values[0] == kept[token_id]
        if request.params.temperature == 0:
            assert token_id == kept.argmax()
        else:
            score = oracle.scores(kept, request.seed, len(request.prompt + request.output))
            assert score[token_id] >= score.max() - 1e-4


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_row_alone_equals_row_in_batch(seed):
    requests, logits, mask = random_batch(seed)
    for request in requests[::2]:
        request.params.logprobs = 3
    for mode in ("raw_logprobs", "processed_logprobs"):
        bench, rows = bench_with(requests, logits.shape[1], mode=mode)
        together = bench.sample(rows, logits, mask)
        for i, row in enumerate(rows):
            alone = bench.sample(
                [row], logits[i : i + 1], None if mask is None else mask[i : i + 1]
            )
            assert (0 in alone.errors) == (i in together.errors)
            assert alone.token_ids[0] == together.token_ids[i]
            if alone.logprobs is not None:
                m = together.logprobs.index.index(i)
                width = alone.logprobs.counts[0]
                assert together.logprobs.counts[m] == width
                for name in ("token_ids", "values"):
                    one, many = getattr(alone.logprobs, name), getattr(together.logprobs, name)
                    assert one[0].tobytes() == many[m, :width].tobytes()
                assert alone.logprobs.ranks[0] == together.logprobs.ranks[m]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_sampling_again_gives_the_same_and_leaves_the_logits(seed):
    requests, logits, _ = random_batch(seed)
    bench, rows = bench_with(requests, logits.shape[1])
    given_logits = torch.from_numpy(logits.copy())
    first = bench.sample(rows, given_logits.numpy())
    again = bench.sample(rows, given_logits.numpy())
    assert torch.equal(first.token_ids, again.token_ids) and first.errors == again.errors
    assert given_logits.numpy().tobytes() == logits.tobytes()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_resuming_goes_on_as_if_nothing_happened(seed):
    """Preempted at every step, into another row: the same ids as undisturbed."""
    requests, logits, _ = random_batch(seed, most=3)
    rng = np.random.default_rng(seed)
    calm, rows = bench_with(requests, logits.shape[1])
    restless, _ = bench_with(requests, logits.shape[1])
    where = list(rows)
    for _ in range(8):
        logits = rng.permuted(logits, axis=1)
        expected = calm.step(rows, logits)
        moving = int(rng.integers(len(where)))
        free = [row for row in range(16) if row not in where]
        request = restless.remove(where[moving])
        where[moving] = int(rng.choice(free))
        restless.add(where[moving], request)
        found = restless.step(where, logits)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert set(found.errors) == set(expected.errors)


def draws(params, logits, *, num_draws, seed=0, num_rows=40):
    """Counts of the tokens drawn by requests of neighbouring seeds, at many positions each."""
    bench = Bench(len(logits), num_rows=num_rows)
    for row in range(num_rows):
        bench.add(row, Request(params, [0], [], seed + row))
    batch = torch.tensor([logits] * num_rows)
    drawn = [
        bench.sampler.sample(batch, np.arange(num_rows), np.full(num_rows, position)).token_ids
        for position in range(1, num_draws // num_rows + 1)
    ]
    return np.bincount(torch.cat(drawn).numpy(), minlength=len(logits))


DISTRIBUTIONS = {
    "plain": {},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
}


@pytest.mark.parametrize("fields", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_draws_follow_the_distribution(fields):
    logits = np.random.default_rng(3).standard_normal(30).astype(np.float32) * 1.5
    params = SamplingParams(**fields)
    expected = np.exp(oracle.log_softmax(oracle.filtered(logits, params)))
    num_draws = 1200
    counts = draws(params, logits.tolist(), num_draws=num_draws, seed=11)
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    chi_square = (
        (counts - num_draws * expected)[likely] ** 2 / (num_draws * expected[likely])
    ).sum()
    freedom = likely.sum() - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_draws_of_neighbouring_seeds_are_independent():
    """n = 4 gives seeds s..s+3: pairs of their draws fill the square evenly."""
    logits = [0.0] * 8
    table = [np.zeros((8, 8)) for _ in range(3)]
    batch = torch.tensor([logits] * 4)
    bench = Bench(8, num_rows=4)
    for row in range(4):
        bench.add(row, Request(SamplingParams(), [0], [], 1000 + row))
    for position in range(1, 2001):
        ids = bench.sampler.sample(batch, np.arange(4), np.full(4, position)).token_ids.tolist()
        for other in range(3):
            table[other][ids[0], ids[other + 1]] += 1
    for counts in table:
        chi_square = ((counts - 2000 / 64) ** 2 / (2000 / 64)).sum()
        assert chi_square < 63 + 4 * math.sqrt(2 * 63)


def test_top_k_1_is_greedy_without_ties():
    logits = np.random.default_rng(0).standard_normal((1, 500)).astype(np.float32)
    for seed in range(30):
        bench, rows = bench_with([Request(SamplingParams(top_k=1), [1], [], seed)], 500)
        assert bench.sample(rows, logits).token_ids.tolist() == logits.argmax(1).tolist()


def test_top_k_1_draws_among_ties():
    counts = draws(SamplingParams(top_k=1), [0.0, 2.0, 2.0, 1.0], num_draws=400)
    assert counts[0] == counts[3] == 0
    assert 150 < counts[1] < 250


def test_seed_decides_and_the_row_does_not():
    logits = np.zeros((2, 5000), np.float32)
    requests = [Request(SamplingParams(), [1, 2], [], seed) for seed in (5, 5)]
    bench, rows = bench_with(requests, 5000)
    first, second = bench.sample(rows, logits).token_ids.tolist()
    assert first == second
    others = {
        bench_with([Request(SamplingParams(), [1, 2], [], s)], 5000)[0]
        .sample([15], logits[:1])
        .token_ids.item()
        for s in (6, 5 + 2**32, 2**64 - 5)
    }
    assert first not in others and len(others) == 3


def test_min_tokens_beats_a_biased_eos():
    params = make_params(temperature=0.0, min_tokens=3, logit_bias={4: 100.0}, stops=[4])
    bench, rows = bench_with([Request(params, [1], [])], 8)
    ids = [bench.step(rows, np.zeros((1, 8), np.float32)).token_ids.item() for _ in range(4)]
    assert 4 not in ids[:3] and ids[3] == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_minus_infinity_forbids_a_token_and_changes_no_other(temperature):
    logits = np.random.default_rng(3).normal(size=(1, 40)).astype(np.float32)
    logits[0, 4] = 9.0
    forbid, never = (
        make_params(temperature=temperature, logit_bias={4: bias}) for bias in (-np.inf, -1e30)
    )
    drawn = []
    for params in (forbid, never):
        bench, rows = bench_with([Request(params, [1], [], 5)], 40)
        drawn.append([bench.step(rows, logits).token_ids.item() for _ in range(20)])
    assert drawn[0] == drawn[1] and 4 not in drawn[0]


def test_min_tokens_masks_eos_also_when_it_does_not_stop():
    params = make_params(temperature=0.0, min_tokens=1, ignore_eos=True, stops=[4])
    bench, rows = bench_with([Request(params, [1], [])], 8)
    logits = np.eye(8, dtype=np.float32)[4:5]
    ids = [bench.step(rows, logits).token_ids.item() for _ in range(2)]
    assert ids[0] != 4 and ids[1] == 4


@pytest.mark.parametrize("has_grammar", [True, False])
def test_min_tokens_with_a_mask_that_allows_eos_alone(has_grammar):
    structured = StructuredOutputsParams(regex="a") if has_grammar else None
    params = make_params(temperature=0.0, min_tokens=3, structured_outputs=structured, stops=[4])
    bench, rows = bench_with([Request(params, [1], [])], 8)
    mask = torch.tensor([[1 << 4]], dtype=torch.int32)
    result = bench.sample(rows, np.zeros((1, 8), np.float32), mask)
    if has_grammar:
        assert result.token_ids.tolist() == [4] and not result.errors
    else:
        assert list(result.errors) == [0]


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not():
    logits = np.array([[2.0, 1.5, 0.0]], np.float32)
    for fields, expected in (
        ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, 0),
        ({"repetition_penalty": 2.0}, 1),
    ):
        params = SamplingParams(temperature=0.0, **fields)
        bench, rows = bench_with([Request(params, [0, 0, 0], [])], 3)
        assert bench.sample(rows, logits).token_ids.item() == expected


BAD = {"nan": math.nan, "infinite": INF, "nothing left": -INF}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["greedy", "mixed"])
def test_one_bad_row_among_many(bad, kind):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((6, 300)).astype(np.float32)
    fields = [{"temperature": 0.0}] * 6
    if kind == "mixed":
        fields = [{}, {"top_k": 3}, {"top_p": 0.5, "logprobs": 2}, {"temperature": 0.0}] * 2
    requests = [Request(SamplingParams(**fields[i]), [1], [], i) for i in range(6)]
    bench, rows = bench_with(requests, 300)
    healthy = bench.sample(rows, logits)
    for sick in range(6):
        broken = logits.copy()
        broken[sick] = -INF if bad == "nothing left" else broken[sick]
        places = [137, *range(140, 140 + sick)]
        broken[sick, places] = BAD[bad]
        result = bench.sample(rows, broken)
        assert list(result.errors) == [sick]
        assert result.nans == ({sick: len(places)} if bad == "nan" else {})
        assert ("forbid every one" in result.errors[sick]) == (bad == "nothing left")
        assert result.token_ids[sick] == 0
        for i in set(range(6)) - {sick}:
            assert result.token_ids[i] == healthy.token_ids[i]
        if result.logprobs is not None:
            assert sick not in result.logprobs.index


def test_where_nans_are_not_counted_there_is_one_at_least():
    """As on a device whose logits are gone when the host learns of it."""
    peaks = torch.tensor([1.0, math.nan, INF, -INF])
    output = SamplerOutput(torch.zeros(4, dtype=torch.int64), peaks)
    sampled = output.to_host(output.tensors)
    assert list(sampled.errors) == [1, 2, 3] and sampled.nans == {1: 1}
    assert StreamDevice(LateDriver(0), arena_bytes=1 << 16).known(peaks) is None


def test_all_greedy_makes_no_copy():
    """The fast path takes the argmax of the given tensor, and the logits stay as they are."""
    logits = np.random.default_rng(0).standard_normal((3, 1000)).astype(np.float32)
    requests = [Request(SamplingParams(temperature=0.0), [1], []) for _ in range(3)]
    bench, rows = bench_with(requests, 1000)
    result = bench.sample(rows, logits)
    assert result.token_ids.tolist() == logits.argmax(1).tolist()
    assert result.logprobs is None and not result.errors


def test_mask_reaches_raw_logprobs_and_its_padding_bits_are_ignored():
    requests = [Request(SamplingParams(temperature=0.0, logprobs=3), [1], [])]
    bench, rows = bench_with(requests, 35)
    words = torch.tensor([[0b110, 0]], dtype=torch.int32)
    words[0, 1] = -8  # only bits behind the vocabulary
    result = bench.sample(rows, np.zeros((1, 35), np.float32), words)
    assert result.token_ids.tolist() == [1]
    assert result.logprobs.token_ids[0].tolist() == [1, 1, 2, 0]
    expected = [-math.log(2)] * 3
    assert result.logprobs.values[0, :3].tolist() == pytest.approx(expected)
    assert result.logprobs.values[0, 3].item() == -INF


def test_removed_rows_leave_nothing_behind():
    """A row that had every feature serves the next request as a fresh one."""
    rng = np.random.default_rng(5)
    assume_all = random_request(rng, 50)
    assume_all.params.logprobs = 2
    bench, rows = bench_with([assume_all], 50)
    bench.remove(rows[0])
    plain = Request(SamplingParams(temperature=0.0), [1], [])
    bench.add(rows[0], plain)
    logits = rng.standard_normal((1, 50)).astype(np.float32)
    result = bench.sample(rows, logits)
    assert result.token_ids.tolist() == logits.argmax(1).tolist() and result.logprobs is None


def test_a_request_that_cannot_be_added_leaves_its_row_free():
    params = make_params(temperature=0.0, allowed_token_ids=[1], max_tokens=9)
    params.logit_bias = {2**70: 1.0}  # what no front end lets through
    bench = Bench(50)
    with pytest.raises((OverflowError, RuntimeError, TypeError, ValueError)):
        bench.add(3, Request(params, [1], []))
    bench.add(3, Request(SamplingParams(temperature=0.0), [1], []))
    assert bench.sample([3], np.eye(50, dtype=np.float32)[7:8]).token_ids.tolist() == [7]


def test_bad_words_look_at_the_output_alone():
    """[5, 6, 7] is not begun by a prompt's end, nor by a prompt and an output together."""
    logits = np.eye(10, dtype=np.float32)[7:8]
    for prompt, output, expected in (
        ([5, 6], [], 7),
        ([1, 5], [6], 7),
        ([1], [5, 6], 0),
        ([1], [6, 5, 6], 0),
        ([1], [5, 6, 1], 7),
    ):
        params = make_params(temperature=0.0, bad_words=[[5, 6, 7], [9]])
        bench, rows = bench_with([Request(params, prompt, output)], 10)
        assert bench.sample(rows, logits).token_ids.tolist() == [expected]


def test_greedy_rows_need_no_noise_once_the_others_have_left(monkeypatch):
    """Only what is asked for is paid for: the short way is taken again."""
    bench, rows = bench_with([Request(SamplingParams(temperature=0.0), [1], [])], 20)
    bench.add(2, Request(SamplingParams(), [1], []))
    bench.remove(2)

    def fail(*_):
        raise AssertionError("noise for a greedy batch")

    monkeypatch.setattr("quire.runner.sampling.sampler.noise_keys", fail)
    assert bench.sample(rows, np.eye(20, dtype=np.float32)[3:4]).token_ids.tolist() == [3]
