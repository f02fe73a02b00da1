"""A model that was updated in place is, to the last bit, one that was loaded with these weights."""

import random

import pytest
import torch
from safetensors.torch import load_file

from quire.errors import NotBuiltYet
from quire.hardware.native import find_native
from quire.kernels.cpu.runtime import CpuRuntime
from quire.kernels.cpu.weight_writer import CpuWeightWriter
from quire.models import find_family, read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.loading.model_parts import tensors_within
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.models.updates.plan import UpdatePlan
from quire.models.updates.update import WeightUpdate
from quire.ops.select import select
from quire.quantization import RECIPES, UNQUANTIZED
from tests.models.hostile.models import cases
from tests.models.paged_driver import load, run_full

OPS = select(device="cpu", dtype=torch.float32, providers=["torch"])


def tensors_of(folder):
    return {
        n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()
    }


def update_of(model, made, ops, writer=None, **options):
    config = read_config(made.folder)
    plan = UpdatePlan(
        *(model, made.folder, read_spec(config), ops),
        dtype=torch.float32,
        max_model_len=made.max_model_len,
        family=find_family(config),
        storage=read_storage(config),
        options=ModelOptions(**options),
        writer=writer,
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


class WatchedWriter(CpuWeightWriter):
    """Counts the weights that were packed into the memory of others."""

    num_packed = 0

    def replacing(self, parts):
        self.num_packed += 1
        return super().replacing(parts)


@pytest.mark.skipif(find_native()[0] is None, reason=find_native()[1])
@pytest.mark.parametrize("recipe", [UNQUANTIZED, RECIPES["int8"], RECIPES["int4"]], ids=str)
@pytest.mark.parametrize("name", cases())
@pytest.mark.full
def test_native_weights_are_packed_into_those_of_every_family(checkpoints, name, recipe):
    made = checkpoints[name]
    spec = read_spec(read_config(made.folder))
    runtime = CpuRuntime(num_threads=2)
    ops = select(device="cpu", dtype=torch.float32, runtime=runtime)

    def loaded(**keywords):
        return load_model(
            made.folder, spec, ops, dtype=torch.float32, max_model_len=made.max_model_len,
            options=ModelOptions(recipe=recipe), **keywords,
        )  # fmt: skip

    try:
        right, model = loaded(), loaded(load_format="dummy")
    except NotBuiltYet as error:
        pytest.skip(str(error))
    places = [tensor.data_ptr() for tensor in model.weight_tensors()]
    writer = WatchedWriter(runtime)
    update = update_of(model, made, ops, writer, recipe=recipe)
    pairs = list(tensors_of(made.folder).items())
    random.Random(name).shuffle(pairs)
    for pair in pairs:
        update.add(*pair)
    update.finish()
    assert [tensor.data_ptr() for tensor in model.weight_tensors()] == places
    assert writer.num_packed
    for (part, mine), (_, its) in zip(model.named_parts(), right.named_parts(), strict=True):
        pairs = (tensors_within(each, with_addresses=False) for each in (mine, its))
        for a, b in zip(*pairs, strict=True):
            assert torch.equal(a, b), part
    found = zip(model.named_parameters(), right.named_parameters(), strict=True)
    for (mine, a), (its, b) in found:
        assert mine == its and torch.equal(a, b)
