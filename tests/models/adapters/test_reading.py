"""Adapters of every family: their products added to the leaves give transformers' merged logits."""

import pytest
import torch

from quire.models import find_family, read_spec
from quire.models.adapters.reading import read_adapter
from quire.models.adapters.targets import AdapterTargets, leaf_of
from quire.models.config_reader import read_config
from quire.models.loading.leaves import StoredLeaves
from tests.models.adapters.made import adapted
from tests.models.hostile.models import HOSTILE, cases, theirs
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full

OF_TRANSFORMERS = [n for n, h in HOSTILE.items() if h.reference is None and h.part_of is None]


def targets_of(folder, allowed=None):
    config = read_config(folder)
    return AdapterTargets(find_family(config), read_spec(config), allowed)


def read(folder, model, max_rank=16, dtype=torch.float32):
    return read_adapter(folder, model, max_rank=max_rank, dtype=dtype)


def merge(monkeypatch, adapter):
    """Let checkpoints be read with the adapter's changes; returns the leaves that had some."""
    plain, changed = StoredLeaves.__call__, set()

    def read_changed(self, leaf):
        low = adapter.products.get(leaf_of(leaf))
        if low is None:
            return plain(self, leaf)
        changed.add(leaf_of(leaf))
        return plain(self, leaf) + low.b @ low.a / leaf.scale

    monkeypatch.setattr(StoredLeaves, "__call__", read_changed)
    return changed


@pytest.mark.parametrize("name", cases(OF_TRANSFORMERS))
def test_products_give_the_logits_of_merged_weights(checkpoints, monkeypatch, tmp_path, name):
    made = checkpoints[name]
    model = theirs(HOSTILE[name], made.folder)
    adapter = read(adapted(model).save(tmp_path), targets_of(made.folder))
    with torch.no_grad():
        expected = [model(p[None], use_cache=False).logits[0].float() for p in made.prompts]
    changed = merge(monkeypatch, adapter)
    ours = load(made.folder, read_spec(read_config(made.folder)), max_model_len=made.max_model_len)
    assert changed == set(adapter.products)
    found = run_full(ours, made.prompts)
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(found, made.logits) > 1e-3, "the adapter changes nothing"
