"""Checkpoints of random codes, which `benchmarks/stored_start.py` starts, are read."""

import pytest
import torch

from benchmarks.stored_start import FORMATS, write
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.weights import load_model
from quire.ops import select
from quire.testing import make_checkpoint


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("name", FORMATS)
def test_random_codes_are_a_checkpoint(plain, tmp_path, name):
    write(plain, tmp_path / "model", FORMATS[name])
    ops = select(device="cpu", dtype=torch.bfloat16, providers=["torch"])

    def load(folder):
        return load_model(folder, read_spec(read_config(folder)), ops, dtype=torch.bfloat16)

    sizes = [load(folder).weight_bytes for folder in (tmp_path / "model", plain)]
    assert sizes[0] < sizes[1]
