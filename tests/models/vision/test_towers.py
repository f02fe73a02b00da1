"""Vision encoders without an engine: pixels in, the rows of transformers out."""

import pytest
import torch

from quire.models.config_reader import read_config
from quire.models.vision.families import read_vision
from quire.models.vision.loading import load_encoder
from quire.ops import select
from tests.models.vision.wholes import WHOLES, WIDTH, expected_rows, write_whole

TOLERANCE = 1e-5


def load(folder, provider="torch", dtype=torch.float32):
    model, foreign = read_vision(read_config(folder), WIDTH)
    assert not foreign
    ops = select(device="cpu", dtype=dtype, providers=[provider])
    return load_encoder(folder, model, None, ops, dtype=dtype)


@pytest.mark.parametrize("name", WHOLES)
def test_rows_are_those_of_transformers(name, tmp_path):
    whole = WHOLES[name]
    reference = write_whole(name, tmp_path)
    pictures = whole.pictures()
    expected = expected_rows(reference, whole, pictures)
    for provider in ("torch", "cpu"):
        encoder = load(tmp_path, provider)
        found = encoder.encode(pictures)
        together = torch.cat(expected)
        assert torch.cat(found).shape == together.shape
        error = (torch.cat(found) - together).abs().max() / together.abs().max()
        assert error < TOLERANCE, (provider, error)
        if provider == "cpu":
            for picture, rows in zip(pictures, found, strict=True):
                [alone] = encoder.encode([picture])
                assert torch.equal(alone, rows)
