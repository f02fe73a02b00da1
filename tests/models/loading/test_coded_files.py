"""Quantised checkpoints: the same bits from every load format that has them, or a sentence."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quire.errors import NotBuiltYet
from quire.hardware import weight_file
from quire.hardware.native import find_native
from quire.testing import make_checkpoint
from tests.executor.worker_cores import open_core, plan_of, same_bits, serve
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS, write

KINDS = ("awq", "gptq-v1-symmetric-act_order", "compressed-int", "fp8-blocks")
"""A layout of each kind: codes in words of outputs and of inputs, whole numbers, 8-bit floats."""


@pytest.fixture(scope="module")
def coded(tmp_path_factory):
    """Folders with a dense model, by how it is quantised."""
    shape = {"num_hidden_layers": 2, "vocab_size": 300}
    plain = make_checkpoint(tmp_path_factory.mktemp("plain"), shape, "qwen3", dtype="float32")
    folders = {}
    for name in KINDS:
        folders[name] = tmp_path_factory.mktemp("coded") / name
        write(plain, folders[name], (FORMATS | BYTE_FORMATS)[name])
    return folders


def answers(folder, **args):
    core = open_core(folder, 1, **args)
    found = serve(core)
    core.shutdown()
    return found


def mapped_ranges(folder):
    """The addresses at which files of `folder` are mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split()[0].split("-") for line in lines if f"{folder}/" in line]
    return [(int(begin, 16), int(end, 16)) for begin, end in found]


@pytest.mark.skipif(find_native()[0] is None or sys.platform != "linux", reason="packs natively")
@pytest.mark.parametrize("name", KINDS)
def test_mapped_codes_give_the_same_bits(coded, tmp_path, monkeypatch, name):
    right = answers(coded[name])
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(weight_file, "LEAST_BYTES", 0)
    core = open_core(coded[name], 1, load_format="mmap")
    ranges = mapped_ranges(tmp_path)
    weights = core.executor.workers[0].model_runner.model.weight_tensors()
    panels = [tensor for tensor in weights if tensor.dtype is torch.uint8]
    assert len(panels) == 8, "four in each of two layers"
    for tensor in panels:
        assert any(begin <= tensor.data_ptr() < end for begin, end in ranges)
    assert same_bits(serve(core), right)
    core.shutdown()


@pytest.mark.parametrize("name", KINDS)
def test_codes_are_unpickled(coded, tmp_path, name):
    shutil.copy(coded[name] / "config.json", tmp_path)
    tensors = load_file(coded[name] / "model.safetensors")
    aslant = {n: t.t().contiguous().t() if t.dim() == 2 else t for n, t in tensors.items()}
    torch.save(aslant, tmp_path / "pytorch_model.bin")
    assert same_bits(answers(tmp_path), answers(coded[name]))


def test_codes_are_not_a_sharded_state(coded, tmp_path):
    core = open_core(coded["awq"], 1)
    with pytest.raises(NotBuiltYet, match=r"save_sharded_state of a quant.* Keep the checkpoint"):
        core.save_sharded_state(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()
    core.shutdown()
    with pytest.raises(NotBuiltYet, match=r"sharded_state weights of .* awq.* Use 'auto'"):
        plan_of(coded["awq"], load_format="sharded_state")
