"""Scales of keys and values: in 8-bit floats value / scale; elsewhere a warning at start."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CorruptCheckpoint
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.weights import load_model
from quire.ops.kv import numbers_and_scales
from tests.models.hostile.models import Library
from tests.models.paged_driver import PagedRun
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import write
from tests.quantization.test_stored_codes import ops_of

E4M3 = torch.float8_e4m3fn
NAMES = {
    "attention": {"k_scale": 0.01, "v_scale": 0.002},
    "projections": {"k_proj.k_scale": 0.01, "v_proj.v_scale": 0.002},
    "outputs": {"k_proj.output_scale": 0.01, "v_proj.output_scale": 0.002, "q_scale": 9.0}
    | {"prob_scale": 7.0},
    "both": {"kv_scale": 0.01},
    "keys": {"attn.k_scale": 0.01},
}
EXPECTED = {"both": (0.01, 0.01), "keys": (0.01, 0.01)}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint with weights in bytes, and the prompts."""
    made = Library(tmp_path_factory.mktemp("plain"))["llama"]
    folder = tmp_path_factory.mktemp("coded")
    write(made.folder, folder, BYTE_FORMATS["compressed-float-w8a16"])
    return folder, made.prompts


def with_scales(folder, target, scales, config=None):
    """A copy whose layers have these."""
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for name, value in scales.items():
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(value)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    whole["quantization_config"] |= config or {}
    (target / "config.json").write_text(json.dumps(whole))
    return target


def load(folder, kv_dtype):
    spec = read_spec(read_config(folder))
    ops = ops_of("torch")
    return load_model(folder, spec, ops, dtype=torch.float32, kv_dtype=kv_dtype, max_model_len=64)


def cached(model, prompts, kv_dtype):
    """Keys and values of the first layer [n, 2, S, K, D], which depend on no cache."""
    ops = ops_of("torch")
    run = PagedRun(model, prompts, dtype=kv_dtype, ops=ops)
    for memory in run.kv:
        ops.zero_kv(memory, range(memory.num_blocks))
    run.step([len(p) for p in prompts])
    return ops.export_kv(run.kv[0], range(run.kv[0].num_blocks))


@pytest.mark.parametrize("where", NAMES)
def test_numbers_are_values_over_the_checkpoint_s_scale(source, tmp_path, where):
    folder, prompts = source
    target = with_scales(folder, tmp_path / "model", NAMES[where])
    exact = cached(load(target, torch.float32), prompts, torch.float32)
    numbers, scales = numbers_and_scales(cached(load(target, E4M3), prompts, E4M3), E4M3)
    is_written = scales != 0
    assert is_written.sum() > 100
    for part, scale in enumerate(EXPECTED.get(where, (0.01, 0.002))):
        own = is_written[:, part]
        assert (scales[:, part][own] == torch.tensor(scale)).all()
        right = (exact[:, part][own] / scale).clamp(-448, 448).to(E4M3)
        assert torch.equal(numbers[:, part][own].float(), right.float())


def test_larger_values_become_the_largest_number(source, tmp_path):
    folder, prompts = source
    target = with_scales(folder, tmp_path / "model", {"k_scale": 1e-6, "v_scale": 1e-6})
    numbers, _ = numbers_and_scales(cached(load(target, E4M3), prompts, E4M3), E4M3)
    assert (numbers.float().abs() == 448).float().mean() > 0.3


@pytest.mark.parametrize(
    ("kv_dtype", "says"),
    [
        (torch.bfloat16, "because the K/V cache is in bfloat16."),
        (torch.int8, "because the K/V cache is in int8, with a scale for each vector."),
    ],
)
def test_start_up_says_that_they_are_not_used(source, tmp_path, caplog, kv_dtype, says):
    folder, _ = source
    target = with_scales(folder, tmp_path / "model", NAMES["attention"])
    with caplog.at_level(logging.WARNING, logger="quire"):
        load(target, kv_dtype)
    assert [says in record.getMessage() for record in caplog.records] == [True]


def test_scales_of_whole_numbers_are_not_for_floats(source, tmp_path, caplog):
    folder, prompts = source
    config = {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}
    target = with_scales(folder, tmp_path / "model", NAMES["attention"], config)
    model = load(target, E4M3)
    assert "are not used" in caplog.text
    _, scales = numbers_and_scales(cached(model, prompts, E4M3), E4M3)
    assert len(scales.unique()) > 100


def test_without_any_nothing_is_said(source, tmp_path, caplog):
    folder, _ = source
    load(with_scales(folder, tmp_path / "model", {}, {"kv_cache_scheme": None}), torch.bfloat16)
    assert not caplog.records


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_anything_but_a_scale_is_one_clear_error(source, tmp_path, value):
    folder, _ = source
    target = with_scales(folder, tmp_path / "model", {"k_scale": value})
    with pytest.raises(CorruptCheckpoint, match=r"layers\.0\.self_attn\.k_scale is .* not a scale"):
        load(target, E4M3)
