"""Patches of a few values, step after step: the engine is to the bit one whose weights were sent
whole.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire.errors import InvalidParameter, WeightMismatch, WeightUpdateError
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


def joined(llm):
    return WeightTransferTrainerFactory.trainer_init(
        SparseNCCLTrainerInitInfo("127.0.0.1", free_port(), 2), client=LocalWeightSyncClient(llm)
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


@pytest.mark.parametrize("wishes", [{"quantization": "int8"}, {"tensor_parallel_size": 2}], ids=str)
def test_weights_in_another_form_take_no_patches(tmp_path, wishes):
    folder = make_checkpoint(tmp_path, SHAPE, "qwen3", dtype="float32")
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm = opened(folder, "sparse_nccl", **wishes)
    workers = wishes.get("tensor_parallel_size", 1)
    sender = WeightTransferTrainerFactory.trainer_init(
        SparseNCCLTrainerInitInfo("127.0.0.1", free_port(), 1 + workers),
        client=LocalWeightSyncClient(llm),
    )
    before = llm.compute_weight_checksums()
    with pytest.raises(WeightUpdateError, match="by another backend"):
        sender.send_weights(patched(module, 1))
    assert llm.compute_weight_checksums() == before
