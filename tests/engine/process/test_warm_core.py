"""Cores of processes run steps before their first request, which leave no trace."""

import logging

import pytest

from quire.engine.core.builder import build_core
from quire.engine.process import core_main
from quire.executor.worker import Worker
from quire.testing import make_checkpoint
from tests.executor.worker_cores import plan_of, same_bits, serve


@pytest.fixture
def launches(monkeypatch):
    """The tokens of each step that a worker runs."""
    found = []
    run = Worker.run_first_steps

    def noted(self):
        launch = self.model_runner.launch
        monkeypatch.setattr(
            self.model_runner, "launch", lambda plan: (found.append(plan), launch(plan))[1]
        )
        run(self)
        monkeypatch.undo()

    monkeypatch.setattr(Worker, "run_first_steps", noted)
    return found


@pytest.mark.parametrize("family", ["llama", "mamba2", "qwen3_moe"])
def test_answers_are_the_same_bits_after_them(tmp_path, launches, family):
    folder = make_checkpoint(tmp_path / "model", {"num_hidden_layers": 2}, family)
    plan = plan_of(folder)
    cold = build_core(plan)
    right = serve(cold)
    cold.shutdown()
    assert not launches
    warm = core_main.build_warm_core(plan, group=None)
    assert [bool(plan.chunks) for plan in launches] == [True, False, False, False]
    assert same_bits(serve(warm), right)
    warm.shutdown()


def test_a_step_that_fails_does_not_keep_a_core_from_serving(tmp_path, monkeypatch, caplog):
    def fail(self):
        raise RuntimeError("a kernel")

    monkeypatch.setattr(Worker, "run_first_steps", fail)
    plan = plan_of(make_checkpoint(tmp_path / "model", {"num_hidden_layers": 1}, "llama"))
    with caplog.at_level(logging.WARNING):
        core = core_main.build_warm_core(plan, group=None)
    assert "before the first request failed" in caplog.text
    assert serve(core).tokens
    core.shutdown()
