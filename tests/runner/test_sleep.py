"""Sleep on a device with memory of its own, on CPU tensors: what goes, and what comes back."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.models.loading.model_parts import tensors_within
from tests.runner.late_engines import late_target, plan_of, tokens


@pytest.fixture
def core(folder):
    target, _ = late_target(0)
    target = dataclasses.replace(target, is_host=False)
    core = build_core(plan_of(folder, async_scheduling=True), target)
    yield core
    core.shutdown()


def sizes(core):
    model = core.executor.worker.get_model()
    return [t.untyped_storage().nbytes() for t in model.weight_tensors()]


def sleep(core, level):
    perform(core, "sleep", (level,)).result(timeout=0)


def change(core):
    """Another embedding, as somebody trains it."""
    model = core.executor.worker.get_model()
    with torch.no_grad():
        next(model.weight_tensors()).mul_(-1)


@pytest.mark.parametrize("tags", [[None], [["weights"], ["kv_cache"]], [["kv_cache"], ["weights"]]])
@pytest.mark.parametrize("level", [1, 2])
def test_weights_and_kv_memory_go_and_come_back(core, level, tags):
    right = tokens(core)
    before = sizes(core)
    assert sum(before) > 1 << 16
    sleep(core, level)
    worker = core.executor.worker
    assert worker.kv_cache_bytes() == 0 and sum(sizes(core)) == 0
    for count, some in enumerate(tags, 1):
        assert perform(core, "wake_up", (some,)) is (count == len(tags))
    assert sizes(core) == before and tokens(core) == right


@pytest.mark.parametrize(("levels", "is_kept"), [([1], True), ([2], False), ([1, 2], False)])
def test_only_light_sleep_keeps_what_was_changed(core, levels, is_kept):
    original = tokens(core)
    change(core)
    perform(core, "reset_prefix_cache", ())
    changed = tokens(core)
    assert changed != original
    for level in levels:
        sleep(core, level)
    assert perform(core, "wake_up", ()) is True
    assert tokens(core) == (changed if is_kept else original)


def test_reloading_after_light_sleep_reads_the_checkpoint(core):
    original = tokens(core)
    change(core)
    sleep(core, 1)
    core.executor.worker.reload_weights()
    assert perform(core, "wake_up", ()) is True
    perform(core, "reset_prefix_cache", ())
    assert tokens(core) == original


def test_shared_memory_is_kept_once_and_forms_of_providers_are_seen_through():
    @dataclasses.dataclass
    class Form:
        weight: torch.Tensor
        others: tuple
        name: str = "x"
        bias: torch.Tensor | None = None

    base = torch.arange(10.0)
    form = Form(base[:5], (base[5:], [torch.ones(2)]))
    assert [t.tolist() for t in tensors_within(form)] == [
        [0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [1, 1]
    ]  # fmt: skip
    from quire.runner.residence import _keep

    kept = _keep(tensors_within(form))
    assert [k.values.nbytes for k in kept] == [40, 8] and base.untyped_storage().nbytes() == 0
