"""Every router with its experts on two cores: the logits of one core."""

from __future__ import annotations

import threading

import pytest
import torch

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.inproc_group import InprocExchange
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.spec import Moe
from tests.distributed.test_expert_exchange import Board, ThreadGroup, together
from tests.models.hostile.models import HOSTILE, make
from tests.models.paged_driver import load, run_full

ROUTERS = {
    "glm4_moe": "sigmoid",
    "ernie4_5_moe": "softmax",
    "qwen2_moe": "softmax",
    "phimoe": "sparsemixer",
    "llama4": "sigmoid_topk",
    "gpt_oss": "softmax_topk",
}


@pytest.mark.parametrize("name", ROUTERS)
def test_two_cores_give_the_logits_of_one(name, tmp_path):
    made = make(HOSTILE[name], tmp_path)
    spec = read_spec(read_config(made.folder))
    mixtures = [block.mlp for block in spec.blocks if isinstance(block.mlp, Moe)]
    assert {moe.score for moe in mixtures} == {ROUTERS[name]}
    expected = run_full(load(made.folder, spec, max_model_len=made.max_model_len), made.prompts)
    lock = threading.Lock()

    def task(prompts):
        def run(group):
            exchange = ExpertExchange(
                group,
                num_experts=mixtures[0].experts,
                num_layers=len(mixtures),
                width=spec.dim,
                dtype=torch.float32,
            )
            with lock:
                model = load(made.folder, spec, max_model_len=made.max_model_len, spread=exchange)
            exchange.begin(True)
            try:
                return run_full(model, prompts)
            finally:
                exchange.finish()

        return run

    first, second = together(2, task(made.prompts[:2]), task(made.prompts[2:]))
    for found, right in zip([*first, *second], expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == "glm4_moe" else [pytest.mark.full]) for n in ROUTERS]
)
def test_two_cores_of_two_workers_give_the_logits_of_one(name, tmp_path):
    """Each worker has whole experts, and its share of everything else."""
    made = make(HOSTILE[name], tmp_path)
    spec = read_spec(read_config(made.folder))
    mixtures = [block.mlp for block in spec.blocks if isinstance(block.mlp, Moe)]
    expected = run_full(load(made.folder, spec, max_model_len=made.max_model_len), made.prompts)
    lock, exchanges = threading.Lock(), [InprocExchange(2), InprocExchange(2)]
    groups = [exchange.groups() for exchange in exchanges]
    boards = [Board(2), Board(2)]
    experts = []

    def task(core, worker, prompts):
        def run(_):
            exchange = ExpertExchange(
                ThreadGroup(boards[worker], core),
                num_experts=mixtures[0].experts,
                num_layers=len(mixtures),
                width=spec.dim,
                dtype=torch.float32,
                worker=worker,
                num_workers=2,
            )
            experts.append(exchange.experts)
            with lock:
                model = load(
                    *(made.folder, spec),
                    max_model_len=made.max_model_len,
                    spread=exchange,
                    group=groups[core][worker],
                )
            exchange.begin(True)
            try:
                return run_full(model, prompts)
            finally:
                exchange.finish()

        return run

    tasks = [
        task(core, worker, made.prompts[2 * core : 2 * core + 2])
        for core in (0, 1)
        for worker in (0, 1)
    ]
    found = together(4, *tasks, groups=[None] * 4)
    assert sorted(e for share in experts for e in share) == list(range(mixtures[0].experts))
    for worker in (0, 1):
        for own, right in zip([*found[worker], *found[2 + worker]], expected, strict=True):
            torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-5)
