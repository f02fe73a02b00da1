"""A model that was updated in place is, to the last bit, one that was loaded with these weights."""

import itertools
import math
import random
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.distributed.named_tensors import TensorMeta, TensorPatch
from quire.errors import LoadError, NotBuiltYet, WeightMismatch
from quire.hardware.native import find_native
from quire.kernels.cpu import weight_writer
from quire.kernels.cpu.runtime import CpuRuntime
from quire.kernels.cpu.weight_writer import CpuWeightWriter
from quire.models import find_family, read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.loading.load_formats import open_files
from quire.models.loading.model_parts import tensors_within
from quire.models.loading.options import ModelOptions
from quire.models.loading.weights import load_model
from quire.models.updates import plan, row_targets
from quire.models.updates.patched import PatchedWeights
from quire.models.updates.plan import UpdatePlan
from quire.models.updates.update import WeightUpdate
from quire.models.updates.values import Fingerprint
from quire.ops.formats.row_stack import RowStack
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


@pytest.mark.full
@pytest.mark.parametrize("name", cases())
def test_patches_give_every_family_the_bits_of_whole_tensors(checkpoints, name, tmp_path):
    made, draw = checkpoints[name], torch.Generator().manual_seed(len(name))
    spec = read_spec(read_config(made.folder))
    model = load(made.folder, spec, max_model_len=made.max_model_len)
    plan = update_of(model, made, OPS).plan
    weights = PatchedWeights(plan, partial(open_files, "auto", made.folder, spec), math.inf)
    tensors = {n: t.clone() for n, t in tensors_of(made.folder).items()}
    for first in (0, 1, 0):  # some tensors twice
        patches = []
        for key in sorted(tensors)[first::3]:
            tensor = tensors[key]
            if not tensor.is_floating_point():
                continue
            places = torch.randint(tensor.numel(), (5,), generator=draw, dtype=torch.int32)
            values = torch.randn(5, generator=draw).to(tensor.dtype) * 0.1
            for place, value in zip(places.tolist(), values, strict=True):
                tensor.view(-1)[place] = value
            patches.append(
                TensorPatch(TensorMeta(key, tensor.dtype, tuple(tensor.shape)), places, values)
            )
        update = WeightUpdate(plan)
        for each in weights.tensors(patches):
            for pair in each.items():
                update.add(*pair)
            update.keep()
        update.finish()
        weights.commit()
    shutil.copytree(made.folder, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, tmp_path / "model.safetensors")
    right = load(tmp_path, spec, max_model_len=made.max_model_len)
    for (part, mine), (_, its) in zip(model.named_parts(), right.named_parts(), strict=True):
        for a, b in zip(tensors_within(mine), tensors_within(its), strict=True):
            assert torch.equal(a, b), part


class WatchedWriter(CpuWeightWriter):
    """Counts the weights that were packed into the memory of others."""

    num_packed = 0

    def replacing(self, parts):
        self.num_packed += 1
        return super().replacing(parts)

    def open_rows(self, part):
        found = super().open_rows(part)
        self.num_packed += found is not None
        return found


def in_rows(draw, tensor):
    """A matrix as its rows, some at a time in memory that is used again, or whole."""
    if tensor.dim() != 2 or draw.random() < 0.4:
        return tensor

    def read():
        room = torch.empty(9 * tensor.shape[1], dtype=tensor.dtype)
        at = 0
        while at < len(tensor):
            rows = tensor[at : at + draw.randint(1, 9)]
            at += len(rows)
            here = room[: rows.numel()].view(rows.shape)
            yield here.copy_(rows)
            here.fill_(float("inf"))

    return RowStack(tuple(tensor.shape), tensor.dtype, read)


def native_models(made, recipe):
    """Native ops and what writes their weights, a model of the files, and one of other weights."""
    spec = read_spec(read_config(made.folder))
    runtime = CpuRuntime(num_threads=2)
    ops = select(device="cpu", dtype=torch.float32, runtime=runtime)

    def loaded(**keywords):
        return load_model(
            made.folder, spec, ops, dtype=torch.float32, max_model_len=made.max_model_len,
            options=ModelOptions(recipe=recipe), **keywords,
        )  # fmt: skip

    return ops, WatchedWriter(runtime), loaded(), loaded(load_format="dummy")


def assert_same_weights(model, right):
    for (part, mine), (_, its) in zip(model.named_parts(), right.named_parts(), strict=True):
        pairs = (tensors_within(each, with_addresses=False) for each in (mine, its))
        for a, b in zip(*pairs, strict=True):
            assert torch.equal(a, b), part
    found = zip(model.named_parameters(), right.named_parameters(), strict=True)
    for (mine, a), (its, b) in found:
        assert mine == its and torch.equal(a, b)


needs_native = pytest.mark.skipif(find_native()[0] is None, reason=find_native()[1])
ROUNDED = [UNQUANTIZED, RECIPES["int8"], RECIPES["int4"]]


@needs_native
@pytest.mark.parametrize("recipe", ROUNDED, ids=str)
@pytest.mark.parametrize(
    "name",
    [*(pytest.param(n, id=n) for n in ("qwen2", "qwen3_moe"))]
    + [pytest.param(each.values[0], marks=pytest.mark.full) for each in cases()],
)
def test_native_weights_are_written_by_rows_or_packed_into_those_of_before(
    checkpoints, name, recipe, monkeypatch
):
    monkeypatch.setattr(row_targets, "_CACHED_BYTES", 300)
    monkeypatch.setattr(weight_writer, "_SLICE_BYTES", 1)
    made = checkpoints[name]
    try:
        ops, writer, right, model = native_models(made, recipe)
    except NotBuiltYet as error:
        pytest.skip(str(error))
    places = [tensor.data_ptr() for tensor in model.weight_tensors()]
    draw = random.Random(name)
    for _ in range(2):
        update = update_of(model, made, ops, writer, recipe=recipe)
        pairs = list(tensors_of(made.folder).items())
        draw.shuffle(pairs)
        for stored, tensor in pairs:
            update.add(stored, in_rows(draw, tensor))
        update.finish()
        assert [tensor.data_ptr() for tensor in model.weight_tensors()] == places
        assert writer.num_packed
        assert_same_weights(model, right)


def rows_of(tensor, size=3):
    return RowStack(tuple(tensor.shape), tensor.dtype, lambda: iter(tensor.split(size)))


@needs_native
def test_faults_that_show_while_rows_are_written_leave_a_torn_model(checkpoints):
    made = checkpoints["qwen2"]
    ops, writer, right, model = native_models(made, RECIPES["int8"])
    pairs = tensors_of(made.folder)
    gate = next(name for name in pairs if name.endswith("0.mlp.gate_proj.weight"))

    def begun():
        return update_of(model, made, ops, writer, recipe=RECIPES["int8"])

    for place, is_torn in ((0, False), (-1, True)):  # before anything is written, and after it
        spoiled = pairs[gate].clone()
        spoiled[place, 3] = float("nan")
        update = begun()
        with pytest.raises(LoadError, match=f"{gate} has NaN"):
            update.add(gate, rows_of(spoiled))
        assert update.is_torn is is_torn
    update = begun()
    update.add(gate, rows_of(pairs[gate]))
    with pytest.raises(WeightMismatch, match="came twice"):
        update.add(gate, rows_of(pairs[gate]))
    update = begun()
    with pytest.raises(WeightMismatch, match="has the shape"):
        update.add(gate, rows_of(pairs[gate][1:]))
    assert not update.is_torn
    update = begun()
    update.add(gate, rows_of(pairs[gate]))
    with pytest.raises(WeightMismatch, match="did not come, and is one weight with"):
        update.finish()
    assert update.is_torn
    update = begun()
    for name, tensor in pairs.items():
        update.add(name, rows_of(tensor) if tensor.dim() == 2 else tensor)
    update.finish()
    assert_same_weights(model, right)


@needs_native
@pytest.mark.parametrize("recipe", [UNQUANTIZED, RECIPES["int8"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tied_head_has_to_equal_the_embedding(checkpoints, recipe, dtype, monkeypatch):
    """The embedding is read from the model, unless it was converted."""
    monkeypatch.setattr(plan, "_READ_BYTES", 1000)
    made = checkpoints["gemma"]
    ops, writer, _, model = native_models(made, recipe)
    [(name, table)] = [p for p in tensors_of(made.folder).items() if "embed_tokens" in p[0]]
    table = table.to(dtype)
    other = table.clone()
    other[-1, -1] += 1
    for head, by_rows, is_first in itertools.product((table.clone(), other), *[[False, True]] * 2):
        update = update_of(model, made, ops, writer, recipe=recipe)
        pairs = [(name, rows_of(table) if by_rows else table), ("lm_head.weight", head)]
        for pair in reversed(pairs) if is_first else pairs:
            update.add(*pair)
        if head is other:
            with pytest.raises(WeightMismatch, match="tie_word_embeddings"):
                update.finish()
        else:
            update.finish()


@needs_native
@pytest.mark.parametrize("rows", [None, 1, 1000, 4096])
def test_a_fingerprint_does_not_depend_on_how_a_tensor_is_cut(rows):
    writer = CpuWeightWriter(CpuRuntime(num_threads=2))
    tensor = torch.randn(5000, 80, generator=torch.Generator().manual_seed(2))

    def numbers(tensor, parts):
        found = Fingerprint(writer, "it")
        for part in parts:
            found.add(part)
        return found.close()

    right = numbers(tensor, [tensor])
    assert numbers(tensor, [tensor] if rows is None else tensor[:5000].split(rows)) == right
    other = tensor.clone()
    other[4999, 79] += 1
    assert numbers(other, other.split(rows or 5000)) != right
