"""Log-probabilities: the four modes, order, ranks with ties, chosen ids, prompt positions."""

import math

import numpy as np
import pytest
import torch

from quire.params import SamplingParams
from tests.sampling import sampling_oracle as oracle
from tests.sampling.sampling_oracle import INF, Bench, Request, make_params

MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
VOCAB = 1000


def columns_of(params_list, logits, mode, prompt=(1, 2, 2), output=(3,)):
    bench = Bench(logits.shape[1], mode=mode)
    for row, params in enumerate(params_list):
        bench.add(row, Request(params, list(prompt), list(output), row))
    result = bench.sample(list(range(len(params_list))), logits)
    return result.token_ids.tolist(), result.logprobs


def random_logits(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    return (np.round(rng.standard_normal((num_rows, VOCAB)) * 16) / 8).astype(np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_modes_equal_the_oracle(mode):
    """Values of every column; penalties, bias and filters show in the processed modes only."""
    fields = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.001}
    params = [
        make_params(
            logprobs=k,
            logit_bias={5: 9.0},
            allowed_token_ids=list(range(500)),
            presence_penalty=1.0,
            **fields,
        )
        for k in (0, 1, 5, 60)
    ]
    logits = random_logits(4)
    token_ids, columns = columns_of(params, logits, mode)
    assert columns.index == [0, 1, 2, 3] and columns.counts == [1, 2, 6, 61]
    assert columns.token_ids.dtype == columns.ranks.dtype == np.int32
    for i in range(4):
        source = logits[i]
        if mode.startswith("processed"):
            request = Request(params[i], [1, 2, 2], [3])
            source = oracle.filtered(oracle.edited(source, request), params[i])
        values = oracle.log_softmax(source) if mode.endswith("probs") else source
        order = sorted(range(VOCAB), key=lambda j: (-source[j], j))
        ids = [token_ids[i], *order[: columns.counts[i] - 1]]
        found = columns.token_ids[i].tolist()
        assert found == ids + [-1] * (61 - len(ids))
        assert columns.values[i, : len(ids)] == pytest.approx(values[ids], abs=2e-5)
        assert columns.ranks[i] == (source >= source[token_ids[i]]).sum()


def test_whole_vocabulary():
    logits = random_logits(1)
    [token_id], columns = columns_of([SamplingParams(logprobs=-1, seed=3)], logits, "raw_logprobs")
    assert columns.counts == [VOCAB + 1] and columns.token_ids[0, 0] == token_id
    assert sorted(columns.token_ids[0, 1:].tolist()) == list(range(VOCAB))
    assert np.exp(columns.values[0, 1:].astype(np.float64)).sum() == pytest.approx(1.0, abs=1e-5)


def test_chosen_ids_keep_their_order():
    params = SamplingParams(temperature=0.0, logprob_token_ids=[7, 3, 900])
    logits = random_logits(1)
    [token_id], columns = columns_of([params], logits, "raw_logprobs")
    assert columns.token_ids.tolist() == [[token_id, 7, 3, 900]] and columns.counts == [4]
    assert columns.ranks.tolist() == [(logits[0] >= logits[0].max()).sum()]
    expected = oracle.log_softmax(logits[0])[[token_id, 7, 3, 900]]
    assert columns.values[0] == pytest.approx(expected, abs=1e-5)


def test_ties_push_the_rank_up():
    logits = np.array([[1.0, 3.0, 3.0, 3.0, 2.0]], np.float32)
    params = SamplingParams(temperature=0.0, logprobs=2)
    [token_id], columns = columns_of([params], logits, "raw_logits")
    assert token_id == 1 and columns.ranks.tolist() == [3]
    assert columns.token_ids.tolist() == [[1, 1, 2]]


def test_only_asking_rows_have_entries():
    params = [SamplingParams(temperature=0.0, logprobs=k) for k in (None, 2, None, 0)]
    _, columns = columns_of(params, random_logits(4), "raw_logprobs")
    assert columns.index == [1, 3] and columns.counts == [3, 1]
    assert columns.token_ids[1].tolist()[1:] == [-1, -1]
    assert columns.values[1].tolist()[1:] == [-INF, -INF]


def test_asking_changes_no_token():
    """Rows with logprobs are computed alone, the others together: the ids are the same."""
    logits = random_logits(8) * 0.3
    for mode in MODES:
        silent = [SamplingParams(temperature=0.3 + 0.2 * i) for i in range(8)]
        asking = [SamplingParams(temperature=0.3 + 0.2 * i, logprobs=1) for i in range(8)]
        assert columns_of(silent, logits, mode)[0] == columns_of(asking, logits, mode)[0]


def test_greedy_rows_report_undivided_logits():
    logits = random_logits(1)
    params = SamplingParams(temperature=0.0, logprobs=1)
    [token_id], columns = columns_of([params], logits, "processed_logits")
    assert columns.values[0, 0] == logits[0, token_id]


@pytest.mark.parametrize("k", [0, 3, -1])
@pytest.mark.parametrize("mode", MODES)
def test_prompt_logprobs(mode, k):
    """Nothing edits a prompt, so that a raw mode is as a processed one; entry i is the given target
    among the logits of row i.
    """
    logits = random_logits(5)
    targets = torch.tensor([4, 999, 0, 17, 17])
    columns = Bench(VOCAB, mode=mode).sampler.prompt_logprobs(torch.from_numpy(logits), targets, k)
    width = VOCAB if k == -1 else k
    assert columns.index == [0, 1, 2, 3, 4] and columns.counts == [width + 1] * 5
    for i, target in enumerate(targets.tolist()):
        order = sorted(range(VOCAB), key=lambda j: (-logits[i, j], j))[:width]
        assert columns.token_ids[i].tolist() == [target, *order]
        values = oracle.log_softmax(logits[i]) if mode.endswith("logprobs") else logits[i]
        expected = values[[target, *order]]
        assert columns.values[i].numpy() == pytest.approx(expected, abs=2e-5)
        assert columns.ranks[i] == (logits[i] >= logits[i, target]).sum()


def test_prompt_logprobs_in_chunks_are_the_same():
    logits = torch.from_numpy(random_logits(7))
    targets = torch.arange(7)
    sampler = Bench(VOCAB).sampler
    whole = sampler.prompt_logprobs(logits, targets, 4)
    for start, end in ((0, 1), (1, 4), (4, 7)):
        part = sampler.prompt_logprobs(logits[start:end], targets[start:end], 4)
        assert torch.equal(part.values, whole.values[start:end])
        assert torch.equal(part.token_ids, whole.token_ids[start:end])


def test_prompt_logprobs_of_broken_logits_are_not_numbers():
    logits = torch.from_numpy(random_logits(2))
    logits[1, 5] = math.nan
    columns = Bench(VOCAB).sampler.prompt_logprobs(logits, torch.tensor([1, 2]), 2)
    assert columns.values[0].isfinite().all() and columns.values[1].isnan().all()
