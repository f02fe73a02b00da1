"""Rotary tables against transformers, on both sides of the lengths at which they change."""

import pytest
import torch

from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.rotary_tables import frequencies, rotary_table
from tests.models.hostile.form import LONG, Hostile, rope
from tests.models.hostile.models import FIRST, make, random_model
from tests.models.paged_driver import TOLERANCE, load, relative_error, run_full

CPU = torch.device("cpu")
TYPICAL = [
    name
    for name, hostile in FIRST.items()
    if hostile.kind not in ("gpt2", "gemma3_text") and name != "phi3-long"
]


@pytest.mark.parametrize("name", TYPICAL)
def test_frequencies_are_those_of_transformers(checkpoints, name):
    made = checkpoints[name]
    spec = read_spec(read_config(made.folder))
    theirs = random_model(FIRST[name]).model.rotary_emb
    ours, factor = frequencies(spec.blocks[0].mixer.rope, made.max_model_len)
    assert torch.equal(ours, theirs.inv_freq)
    assert factor == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_a_table_holds_cosines_then_sines_times_the_factor(checkpoints):
    rope_spec = read_spec(read_config(checkpoints["llama-yarn"].folder)).blocks[0].mixer.rope
    inverse, factor = frequencies(rope_spec, 2100)
    table = rotary_table(rope_spec, 2100, CPU)
    assert table.dim == 24 and table.cos_sin.shape == (2100, 24)
    assert table.cos_sin.dtype == torch.float32 and factor != 1.0
    angles = torch.arange(2100.0)[:, None] * inverse
    assert torch.equal(table.cos_sin[:, :12], angles.cos() * factor)
    assert torch.equal(table.cos_sin[:, 12:], angles.sin() * factor)


def served(tmp_path, hostile, length):
    """Logits of transformers and of a model served with `length`, for the 23-token prompt."""
    made = make(hostile, tmp_path / "model")
    model = load(made.folder, read_spec(read_config(made.folder)), max_model_len=length)
    return relative_error(run_full(model, made.prompts[:1]), made.logits[:1])


DYNAMIC = Hostile("llama", {**rope("dynamic", factor=4.0), "max_position_embeddings": 12})


def test_dynamic_scaling_is_that_of_a_sequence_as_long_as_the_limit(tmp_path):
    """transformers recomputes the base for each longer sequence; we fix it for max_model_len."""
    assert served(tmp_path, DYNAMIC, 23) < TOLERANCE
    assert served(tmp_path, DYNAMIC, 48) > 1e-3  # frequencies for 48 tokens from the start


def test_dynamic_scaling_is_none_up_to_the_original_length(checkpoints):
    rope_spec = read_spec(read_config(checkpoints["llama-dynamic"].folder)).blocks[0].mixer.rope
    plain = frequencies(type(rope_spec)(rope_spec.theta, rope_spec.dim), 64)[0]
    assert torch.equal(frequencies(rope_spec, 64)[0], plain)
    assert not torch.equal(frequencies(rope_spec, 65)[0], plain)


@pytest.mark.parametrize(("length", "equal"), [(23, True), (32, False)])
def test_longrope_takes_the_side_that_the_limit_is_on(tmp_path, length, equal):
    """23 tokens use transformers' short factors; serving more than `original` the long ones."""
    keys = {**rope("longrope", **LONG), "head_dim": None, "original_max_position_embeddings": 23}
    error = served(tmp_path, Hostile("phi3", keys), length)
    assert (error < TOLERANCE) == equal
