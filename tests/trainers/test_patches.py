"""Patches of a few values, step after step: the engine is to the bit one whose weights were sent
whole.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.errors import InvalidParameter, LoadError, WeightMismatch, WeightUpdateError
from quire.testing import make_checkpoint
from quire.trainers.clients import LocalWeightSyncClient
from quire.trainers.patches import SparseNCCLTrainerInitInfo, SparseWeightPatch
from quire.trainers.senders import IPCTrainerInitInfo, WeightTransferTrainerFactory
from quire.trainers.sources import ModuleSource
from tests.trainers.test_senders import SHAPE, check, free_port, opened


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "gemma2"])
def folder(request, tmp_path_factory):
    base = tmp_path_factory.mktemp(request.param)
    return make_checkpoint(base, SHAPE, request.param, dtype="float32")


def patched(module, seed):
    """Change some values of some parameters; returns the patches."""
    draw = torch.Generator().manual_seed(seed)
    patches = []
    with torch.no_grad():
        for name, parameter in list(module.named_parameters())[seed::3]:
            places = torch.randperm(parameter.numel(), generator=draw)[:7]
            values = torch.randn(7, generator=draw) * 0.1
            parameter.view(-1)[places] = values
            patches.append(SparseWeightPatch(name, places, values, parameter.shape))
    return patches


def joined(llm, num_workers=1):
    return WeightTransferTrainerFactory.trainer_init(
        SparseNCCLTrainerInitInfo("127.0.0.1", free_port(), 1 + num_workers),
        client=LocalWeightSyncClient(llm),
    )


def test_patches_give_the_bits_of_whole_weights(folder):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm, whole = opened(folder, "sparse_nccl"), opened(folder, "ipc")
    sender = joined(llm)
    other = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(), client=LocalWeightSyncClient(whole), source=ModuleSource(module)
    )
    for step in range(3):
        sender.send_weights(patched(module, step), f"step {step}")
        other.send_weights()
        assert llm.compute_weight_checksums() == whole.compute_weight_checksums()
    assert check(llm, module).weight_versions == [(0, 6, "step 2")]
    # several for one tensor, in an update of the caller's
    llm.start_weight_update()
    for _ in range(2):
        sender.send_weight_chunk(patched(module, 1))
    sender.send_weight_chunk([])
    llm.finish_weight_update()
    check(llm, module)
    sender.shutdown()
    other.shutdown()


def test_patches_that_do_not_fit_change_nothing(folder):
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm = opened(folder, "sparse_nccl")
    sender, before = joined(llm), llm.compute_weight_checksums()
    name, shape = "model.norm.weight", module.model.norm.weight.shape
    place, value = torch.tensor([3]), torch.tensor([1.0])
    for error, patch in (
        (InvalidParameter, SparseWeightPatch(name, torch.tensor([-1]), value, shape)),
        (InvalidParameter, SparseWeightPatch(name, torch.tensor([shape[0]]), value, shape)),
        (InvalidParameter, SparseWeightPatch(name, place, torch.ones(2), shape)),
        (WeightMismatch, SparseWeightPatch(name, place, value, (2, *shape))),
        (WeightMismatch, SparseWeightPatch("model.other", place, value, shape)),
        (ValueError, SparseWeightPatch(name, place, value * torch.nan, shape)),
    ):
        with pytest.raises((error, ValueError)):
            sender.send_weights([patch])
        if llm._is_updating_weights():
            llm._abandon_weight_update("the trainer has seen its mistake")
    described = {"names": [name], "dtype_names": ["float32"], "shapes": [list(shape)]}
    for counts in (1, [True], [-1], [1, 1]):
        llm.start_weight_update()
        with pytest.raises(InvalidParameter, match="num_updates_list"):
            llm.update_weights({"update_info": described | {"num_updates_list": counts}})
        llm._abandon_weight_update("the trainer has seen its mistake")
    assert llm.compute_weight_checksums() == before
    check(llm, module)
    with pytest.raises(InvalidParameter, match="source"):
        WeightTransferTrainerFactory.trainer_init(
            SparseNCCLTrainerInitInfo("127.0.0.1", free_port(), 2),
            client=LocalWeightSyncClient(llm),
            source=ModuleSource(module),
        )


FORMS = [
    {"quantization": "int8"},
    *(
        pytest.param(wishes, marks=pytest.mark.full)
        for wishes in (
            {"tensor_parallel_size": 2},
            {"quantization": "int4", "tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2},
        )
    ),
]


@pytest.fixture
def plain(tmp_path):
    return make_checkpoint(tmp_path, SHAPE, "qwen3", dtype="float32")


@pytest.mark.parametrize("wishes", FORMS, ids=str)
def test_weights_in_another_form_are_patched_in_those_of_the_files(plain, wishes):
    module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    llm, whole = opened(plain, "sparse_nccl", **wishes), opened(plain, "ipc", **wishes)
    workers = wishes.get("tensor_parallel_size", 1) * wishes.get("pipeline_parallel_size", 1)
    sender = joined(llm, workers)
    other = WeightTransferTrainerFactory.trainer_init(
        IPCTrainerInitInfo(), client=LocalWeightSyncClient(whole), source=ModuleSource(module)
    )
    start = llm.compute_weight_checksums()
    for step in (0, 1, 0):  # some tensors again, in other places
        sender.send_weights(patched(module, step))
        other.send_weights()
        assert llm.compute_weight_checksums() == whole.compute_weight_checksums() != start
    llm.collective_rpc("reload_weights")
    assert llm.compute_weight_checksums() == start
    # the patches of before are gone with the weights that had them
    fresh = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    sender.send_weights(patched(fresh, 1))
    with torch.no_grad():
        for mine, its in zip(module.parameters(), fresh.parameters(), strict=True):
            mine.copy_(its)
    other.send_weights()
    assert llm.compute_weight_checksums() == whole.compute_weight_checksums()
    if "pipeline_parallel_size" in wishes:
        return  # values are read back
    before = llm.compute_weight_checksums()
    name, tensor = next(iter(module.named_parameters()))
    patch = SparseWeightPatch(name, torch.tensor([3]), torch.ones(1).half(), tensor.shape)
    with pytest.raises(LoadError, match="came as F16, and the files"):
        sender.send_weights([patch])
    assert llm.compute_weight_checksums() == before


def test_values_between_patches_have_to_be_known(plain):
    """Weights that came without files, or whose files have changed, are refused."""
    module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    llm = opened(plain, "sparse_nccl", quantization="int8")
    sender = joined(llm)
    model = llm.llm_engine.model_executor.driver_worker.model_runner.model
    model.load_weights([(name, tensor + 0.01) for name, tensor in module.named_parameters()])
    before = llm.compute_weight_checksums()
    with pytest.raises(WeightUpdateError, match="these weights are of none"):
        sender.send_weights(patched(module, 1))
    assert llm.compute_weight_checksums() == before
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(plain)})
    sender.send_weights(patched(module, 2))
    llm.start_weight_update()
    model.load_weights([(name, tensor + 0.01) for name, tensor in module.named_parameters()])
    llm.finish_weight_update()
    with pytest.raises(WeightUpdateError, match="these weights are of none"):
        sender.send_weights(patched(module, 1))
    llm.collective_rpc("reload_weights")
    sender.send_weights(patched(module, 2))
    before = llm.compute_weight_checksums()
    file = plain / "model.safetensors"
    (plain / "new").write_bytes(file.read_bytes())
    (plain / "new").rename(file)  # a trainer saves into the folder
    with pytest.raises(WeightUpdateError, match="has changed since"):
        sender.send_weights(patched(module, 0))
    assert llm.compute_weight_checksums() == before


def test_a_place_that_comes_twice_has_the_last_value(plain):
    module = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    llm = opened(plain, "sparse_nccl")
    sender = joined(llm)
    weight = module.model.norm.weight
    with torch.no_grad():
        weight[3] = 2.5
    places, values = torch.tensor([3, 5, 3]), torch.tensor([9.0, weight[5].item(), 2.5])
    sender.send_weights([SparseWeightPatch("model.norm.weight", places, values, weight.shape)])
    check(llm, module)
