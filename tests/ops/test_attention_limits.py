"""Cutting work into pieces does not show: attention under tiny limits equals the oracle too."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from quire.ops import AttentionArgs, Facts, bind, select
from tests.support import op_contracts
from tests.support.op_cases import CASES
from tests.support.op_cases.costs import counted
from tests.support.op_conformance import check_error, results_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
ATTEND = [c for c in CASES if c.op == "attend" and not c.is_bench and "long" not in c.name]
attention = importlib.import_module("quire.ops.attention")
plan_module = importlib.import_module("quire.ops.attention_plan")
PLAIN = select(device="cpu", dtype=torch.float64, providers=["torch"])
ORACLE = bind(Facts(torch.device("cpu"), torch.float64), op_contracts.ORACLE, ["oracle"])


@pytest.mark.parametrize(
    ("module", "limit", "value"),
    [
        (attention, "GATHER_BYTES", 1),
        (attention, "GATHER_BYTES", 4000),
        (attention, "MAX_SCORES", 1),
        (attention, "MAX_SCORES", 70),
        (plan_module, "TILE", 1),
        (plan_module, "TILE", 3),
        (plan_module, "SMALL_LANES", 0),
    ],
    ids=lambda value: None if isinstance(value, int | str) else value.__name__.rsplit(".")[-1],
)
def test_limits_do_not_show(module, limit, value, monkeypatch):
    monkeypatch.setattr(module, limit, value)
    for case in ATTEND:
        check_error(case, torch.float64, results_of(case, torch.float64, PLAIN))


def plan(ops, seed, window):
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 12)
    num_new = rng.choice([0, 1, 1, 1, 2, 9], rows)
    facts = {
        "query_start": np.cumsum([0, *num_new], dtype=np.int32),
        "seq_lens": (num_new + rng.integers(0, 40, rows)).astype(np.int32),
        "block_table": torch.from_numpy(rng.permutation(rows * 13).reshape(rows, 13)).int(),
        "block_size": 4,
        "window": window,
    }
    return ops.plan_attention(**facts)


@pytest.mark.parametrize("window", [None, 1, 7, 100])
def test_plans_count_keys_and_pairs(window):
    for seed in range(40):
        mine, truth = plan(PLAIN, seed, window), plan(ORACLE, seed, window)
        assert counted(mine) == (truth.num_keys, truth.num_pairs), seed


def test_a_plan_does_not_follow_its_inputs():
    query_start, seq_lens = np.array([0, 1, 3], np.int32), np.array([5, 6], np.int32)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    kv = PLAIN.allocate_kv(4, 4, 1, 8, torch.float64)
    PLAIN.import_kv(kv, range(4), torch.randn(4, 2, 4, 1, 8))
    q, args = torch.randn(3, 2, 8, dtype=torch.float64), AttentionArgs(0.3)
    made = PLAIN.plan_attention(
        query_start=query_start, seq_lens=seq_lens, block_table=table, block_size=4, window=None
    )
    before = PLAIN.attend(q, kv, made, args)
    for values in (query_start, seq_lens, table):
        values[...] = 0
    assert torch.equal(PLAIN.attend(q, kv, made, args), before)


def test_length_outliers_do_not_pad_everybody():
    """One row of 8,000 tokens beside 31 of 100 must not cost 32 rows of 8,000."""
    lengths = np.array([100] * 31 + [8000], dtype=np.int32)
    made = PLAIN.plan_attention(
        query_start=np.arange(33, dtype=np.int32),
        seq_lens=lengths,
        block_table=torch.zeros(32, 500, dtype=torch.int32),
        block_size=16,
        window=None,
    )
    assert sum(len(rows.lanes) for rows in made.decode) <= 2 * lengths.sum()
