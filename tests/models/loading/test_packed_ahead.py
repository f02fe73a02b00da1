"""Weights that threads pack while torch is imported: those of the loader, bit for bit, or none."""

import os
import shutil
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from quire.executor.packed_file import preparation
from quire.hardware import packed_ahead
from quire.hardware.native import find_native
from quire.hardware.prepared_memory import Preparation, end_preparation, prepare
from quire.kernels.cpu import expert_ops, linear_ops
from quire.models.loading.ahead import packing_plan
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, plan_of, same_bits, serve

pytestmark = pytest.mark.skipif(
    find_native()[0] is None or sys.platform != "linux", reason="packs natively"
)
SHAPE = {"num_hidden_layers": 2, "vocab_size": 300}


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(packing_plan, "_LEAST_VALUES", 1)
    yield
    end_preparation()


@pytest.fixture
def taken(monkeypatch):
    """Whether each weight that the loader asked for had been packed."""
    found = []

    def note(keys, num_bytes, take=linear_ops.packed_block):
        block = take(keys, num_bytes)
        if keys != [None] or block is not None:
            found.append(block is not None)
        return block

    monkeypatch.setattr(linear_ops, "packed_block", note)
    monkeypatch.setattr(expert_ops, "packed_block", note)
    return found


def model(folder, family, dtype="bfloat16", **changed):
    return make_checkpoint(folder, SHAPE | changed, family, dtype=dtype)


def answers(folder):
    core = open_core(folder, 1, dtype="bfloat16", packed_weights_gib=0)
    found = serve(core)
    core.shutdown()
    return found


def packing_of(folder):
    plan = plan_of(folder, dtype="bfloat16", packed_weights_gib=0)
    return preparation(plan.model, plan.parallel)


def all_are_packed(before):
    """Wait until every block is packed, none of which is taken yet."""
    prepare(before)
    [packing] = packed_ahead._packings
    packing._packer.wait()


@pytest.mark.parametrize(
    ("family", "changed", "num_blocks"),
    [("qwen2", {"tie_word_embeddings": True}, 9), ("llama", {"tie_word_embeddings": False}, 9),
     ("qwen3_moe", {"tie_word_embeddings": False}, 7)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_all_products_of_a_model_are_taken(tmp_path, taken, family, changed, num_blocks):
    folder = model(tmp_path / "model", family, **changed)
    right = answers(folder)
    assert not any(taken)
    taken.clear()
    before = packing_of(folder)
    assert before.packing is not None and len(before.packing.blocks) == num_blocks
    all_are_packed(before)
    assert same_bits(answers(folder), right)
    assert sum(taken) == num_blocks and not packed_ahead._packings


def test_what_was_not_begun_is_packed_by_the_loader(tmp_path, taken, monkeypatch):
    """A loader that asks before the threads have begun packs by itself, and they end."""
    folder = model(tmp_path / "model", "llama")
    right = answers(folder)
    taken.clear()
    before = packing_of(folder)
    [*_, last] = before.packing.blocks
    alone = msgspec.structs.replace(before.packing, blocks=[last])
    all_are_packed(Preparation(packing=alone))
    assert same_bits(answers(folder), right)
    assert sum(taken) == 1


def test_another_file_of_the_name_is_not_taken_for_it(tmp_path, taken):
    folder = model(tmp_path / "model", "llama")
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    all_are_packed(packing_of(other))
    (old,) = folder.glob("*.safetensors")
    os.replace(shutil.copy(old, tmp_path / "new"), other / old.name)
    right = answers(folder)
    taken.clear()
    assert same_bits(answers(other), right)
    assert not any(taken)


@pytest.mark.parametrize(
    "args",
    [{"dtype": "float32"}, {"dtype": "bfloat16", "quantization": "int8"}],
    ids=str,
)
def test_what_is_converted_is_not_packed_ahead(tmp_path, args):
    """Threads copy; a loader that rounds or widens rows does that itself."""
    plan = plan_of(model(tmp_path / "model", "llama"), packed_weights_gib=0, **args)
    assert preparation(plan.model, plan.parallel) == Preparation(num_bytes=plan.model.weight_bytes)


@pytest.mark.parametrize("end", [b"", b"{", b'{"a": {"dtype": "BF16"}}'])
def test_files_that_cannot_be_read_are_left_to_the_loader(tmp_path, end):
    folder = model(tmp_path / "model", "llama")
    plan = plan_of(folder, dtype="bfloat16", packed_weights_gib=0)
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(len(end).to_bytes(8, "little") + end)
    assert preparation(plan.model, plan.parallel).packing is None


def test_a_file_that_is_too_short_is_not_read_beyond_its_end(tmp_path):
    folder = model(tmp_path / "model", "llama")
    before = packing_of(folder)
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 4096)
    all_are_packed(before)
    [packing] = packed_ahead._packings
    assert 0 < len(packing._numbers) < len(before.packing.blocks)


def not_started(before):
    """The packing of a plan, whose threads never begin."""
    packing = packed_ahead._Packing(find_native()[0], before.packing)
    packed_ahead._packings.append(packing)
    return packing


def test_a_loader_that_has_caught_up_packs_by_itself(tmp_path, taken):
    """All that comes after a weight that was not ready is its own, with all threads, where somebody
    may write to the files.
    """
    folder = model(tmp_path / "model", "llama")
    right = answers(folder)
    taken.clear()
    before = packing_of(folder)
    (file,) = folder.glob("*.safetensors")
    with file.open("r+b"):  # so that there is no lease
        packing = not_started(before)
        first = before.packing.blocks[0]
        assert packing.take(tuple(part.key for part in first.parts)) is None
        packing.start()
        assert same_bits(answers(folder), right)
    assert taken and not any(taken)


@pytest.mark.parametrize(
    ("family", "dtype", "changed"),
    [("qwen2", "bfloat16", {"tie_word_embeddings": True}),
     ("llama", "float32", {"tie_word_embeddings": False, "intermediate_size": 100}),
     ("llama", "bfloat16", {"intermediate_size": 100, "hidden_size": 60, "head_dim": 14})],
    ids=str,
)  # fmt: skip
def test_products_read_the_files_until_weights_are_packed(tmp_path, taken, family, dtype, changed):
    """With the bits of packed weights; only what is looked up in panels waits for them."""
    folder = model(tmp_path / "model", family, dtype, **changed)

    def found():
        core = open_core(folder, 1, dtype=dtype, packed_weights_gib=0)
        answer = serve(core)
        core.shutdown()
        return answer

    right = found()
    taken.clear()
    plan = plan_of(folder, dtype=dtype, packed_weights_gib=0)
    not_started(preparation(plan.model, plan.parallel))
    assert same_bits(found(), right)
    assert taken and all(taken)


def test_a_file_is_not_written_to_until_its_weights_are_packed(tmp_path):
    folder = model(tmp_path / "model", "llama")
    (file,) = folder.glob("*.safetensors")
    packing = not_started(packing_of(folder))
    with pytest.raises(BlockingIOError):
        os.open(file, os.O_WRONLY | os.O_NONBLOCK)
    os.replace(shutil.copy(file, tmp_path / "new"), file)  # another file of the name is free
    packing.start()
    packing.wait_for_end()
    with file.open("r+b"):
        pass


def test_a_process_that_was_forked_meanwhile_does_not_keep_others_from_writing(tmp_path):
    folder = model(tmp_path / "model", "llama")
    (file,) = folder.glob("*.safetensors")
    packing = not_started(packing_of(folder))
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        packing.start()
        packing.wait_for_end()
        os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_memory_of_a_weight_is_packed_when_somebody_looks_at_it(tmp_path, taken):
    """Tensors that are updated, or that a file keeps, are those of the checkpoint."""
    folder = model(tmp_path / "model", "llama")
    right = weights_of(folder)
    taken.clear()
    not_started(packing_of(folder))
    early = weights_of(folder)
    assert taken and all(taken)
    assert early.keys() == right.keys()
    assert all(torch.equal(early[name], values) for name, values in right.items())


def weights_of(folder):
    core = open_core(folder, 1, dtype="bfloat16", packed_weights_gib=0)
    found = dict(core.executor.workers[0].model_runner.model.named_parameters())
    core.shutdown()
    return found
