"""A model that was updated in place is, to the last bit, one that was loaded with these weights."""

import random

import pytest
import torch
from safetensors.torch import load_file

from quire.models import find_family, read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.loading.model_parts import tensors_within
from quire.models.loading.options import ModelOptions
from quire.models.updates.plan import UpdatePlan
from quire.models.updates.update import WeightUpdate
from quire.ops.select import select
from tests.models.hostile.models import cases
from tests.models.paged_driver import load, run_full

OPS = select(device="cpu", dtype=torch.float32, providers=["torch"])


def tensors_of(folder):
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def update_of(model, made, ops, **options):
    config = read_config(made.folder)
    plan = UpdatePlan(
        *(model, made.folder, read_spec(config), ops),
        dtype=torch.float32,
        max_model_len=made.max_model_len,
        family=find_family(config),
        storage=read_storage(config),
        options=ModelOptions(**options),
    )
    return WeightUpdate(plan)


@pytest.mark.parametrize("name", cases())
def test_every_family_can_be_updated_in_any_order(checkpoints, name):
    made = checkpoints[name]
    spec = read_spec(read_config(made.folder))
    model = load(None, spec, max_model_len=made.max_model_len, load_format="dummy")
    right = load(made.folder, spec, max_model_len=made.max_model_len)
    places = [tensor.data_ptr() for tensor in model.weight_tensors()]
    pairs = list(tensors_of(made.folder).items())
    random.Random(name).shuffle(pairs)
    update = update_of(model, made, OPS)
    for pair in pairs:
        update.add(*pair)
    report = update.finish()
    assert not report.unchanged and 0 < report.num_tensors <= len(pairs)
    assert [tensor.data_ptr() for tensor in model.weight_tensors()] == places
    for (part, mine), (_, its) in zip(model.named_parts(), right.named_parts(), strict=True):
        for a, b in zip(tensors_within(mine), tensors_within(its), strict=True):
            assert torch.equal(a, b), part
    for a, b in zip(run_full(model, made.prompts), run_full(right, made.prompts), strict=True):
        assert torch.equal(a, b)
