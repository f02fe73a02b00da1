"""Adapters of every family: their products added to the leaves give transformers' merged logits."""

import pytest
import torch

from quire.models import find_family, read_spec
from quire.models.adapters.reading import read_adapter
from quire.models.adapters.targets import AdapterTargets, leaf_of
from quire.models.config_reader import read_config
from quire.models.loading.leaves import StoredLeaves
from quire.models.loading.transforms import to_leaves
from quire.models.rules import tensor_map
from tests.models.adapters.made import ALPHA, PREFIX, RANK, HandMade, adapted, pair
from tests.models.hostile.models import HOSTILE, cases, config_of, theirs
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full

OTHER_NAMES = ("deepseek_v4", "mistral_large4")
"""Models whose files have other names than transformers' modules, which adapters go by."""
OF_TRANSFORMERS = [
    name
    for name, hostile in HOSTILE.items()
    if hostile.reference is None and hostile.part_of is None and name not in OTHER_NAMES
]


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


def stored_changes(name, targets):
    """An adapter of every module by its name in checkpoints, and what it adds to each leaf."""
    config = config_of(HOSTILE[name])
    made, draw, changes = HandMade(), torch.Generator().manual_seed(0), {}
    for stored in tensor_map(find_family(config), read_spec(config)):
        module, is_transposed = stored.name.removesuffix(".weight"), "transpose" in stored.steps
        if targets.module(module) is None or leaf_of(stored.leaves[0]) == "embed":
            continue
        a, b = pair(draw, *(stored.shape[::-1] if is_transposed else stored.shape))
        made.tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        made.tensors[f"{PREFIX}{module}.lora_B.weight"] = b
        change = ALPHA / RANK * (b @ a)
        parts = to_leaves(stored, change.T if is_transposed else change)
        for leaf, part in zip(stored.leaves, parts, strict=True):
            changes[leaf_of(leaf)] = part * leaf.scale
    return made, changes


WHOLE_CONFIGS = [name for name in HOSTILE if name != "llama4"]
"""Those that need none of transformers' defaults."""


@pytest.mark.parametrize("name", WHOLE_CONFIGS)
@pytest.mark.sharp(when=lambda name: name in ("mixtral", "dbrx") or HOSTILE[name].reference)
def test_modules_have_their_names_in_checkpoints(tmp_path, name):
    """Also those that transformers calls otherwise, and experts that it has in one tensor."""
    config = config_of(HOSTILE[name])
    targets = AdapterTargets(find_family(config), read_spec(config))
    made, changes = stored_changes(name, targets)
    found = read(made.save(tmp_path), targets).products
    assert found.keys() == changes.keys()
    for leaf, low in found.items():
        torch.testing.assert_close(low.b @ low.a, changes[leaf])


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")])
def test_experts_of_one_tensor_may_be_adapted_one_by_one(tmp_path, names):
    config = config_of(HOSTILE["gpt_oss"])
    targets = AdapterTargets(find_family(config), read_spec(config))
    made, draw = HandMade(), torch.Generator().manual_seed(0)
    for name in names:
        module = f"model.layers.1.mlp.experts.2.{name}"
        a, b = pair(draw, *targets.module(module).shape)
        made.tensors[f"{PREFIX}{module}.lora_A.weight"] = a
        made.tensors[f"{PREFIX}{module}.lora_B.weight"] = b
    found = read(made.save(tmp_path), targets).products
    assert set(found) == {f"layers.1.mlp.experts.2.{part}" for part in ("gate", "up", "down")}
    a = made.tensors[f"{PREFIX}model.layers.1.mlp.experts.2.{names[1]}.lora_A.weight"]
    assert torch.equal(found["layers.1.mlp.experts.2.up"].a, a)
