"""Checkpoints of AutoRound."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import UnsupportedConfigValue, WeightMismatch
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.formats.storage import CodeLayout
from quire.models.loading.codes.code_layouts import coded_weight
from quire.models.loading.weights import load_model
from quire.ops import select
from tests.models.hostile.models import HOSTILE, Library, oracle
from tests.models.paged_driver import TOLERANCE, PagedRun, relative_error
from tests.quantization.coded_checkpoints import awq, gptq, write

WORDS = json.loads((Path(__file__).parent / "auto_round_words.json").read_text())
"""Small weights packed by the modules of auto-round 0.16.1, and what these compute from them."""
OPS = select(device="cpu", dtype=torch.float32, providers=["torch"])
CONFIG = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": True}
CONFIG |= {"data_type": "int", "autoround_version": "0.16.1", "iters": 200}
WAYS = {
    "auto_round:auto_gptq": gptq(1),
    "auto_round": gptq(2),
    "auto_round:auto_awq": awq(),
}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("plain"))


def written(source, target, packing, **keys):
    config = CONFIG | {"packing_format": packing} | keys
    return write(source, target, dataclasses.replace(WAYS[packing], config=config))


def load(folder):
    spec = read_spec(read_config(folder))
    return load_model(folder, spec, OPS, dtype=torch.float32, max_model_len=64)


@pytest.mark.parametrize("given", WORDS, ids=lambda g: f"{g['packing_format']}-{g['bits']}")
def test_words_are_those_of_auto_round(given):
    config = CONFIG | {"packing_format": given["packing_format"], "bits": given["bits"]}
    layout = read_storage({"quantization_config": config}).layout_of("m")
    parts = {name: torch.tensor(given[name], dtype=torch.int32) for name in ("qweight", "qzeros")}
    parts["scales"] = torch.tensor(given["scales"]).half()
    found = coded_weight(layout, "m", parts, 32).widened()
    torch.testing.assert_close(found, torch.tensor(given["plain"]), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("packing", WAYS)
def test_logits_are_those_of_the_plain_numbers(library, tmp_path, packing):
    made = library["llama"]
    plain = written(made.folder, tmp_path / "model", packing)
    run = PagedRun(load(tmp_path / "model"), made.prompts, ops=OPS)
    found = list(run.step([len(p) for p in made.prompts]).values())
    expected = [oracle(HOSTILE["llama"], plain)(p) for p in made.prompts]
    assert relative_error(found, expected) < TOLERANCE


def test_entries_count_by_name_and_then_by_expression():
    extra = {
        "a.layers.0.q_proj": {"bits": 8, "group_size": 32},
        r".*layers\.0\..*": {"bits": 16, "act_bits": 16},
        r"layers\.[01]\.": {"group_size": -1},
    }
    config = CONFIG | {"extra_config": extra, "packing_format": "auto_round:auto_gptq"}
    layout_of = read_storage({"quantization_config": config}).layout_of
    usual = CodeLayout("gptq", 4, 16, has_zeros=True, is_one_less=True)
    assert layout_of("a.layers.0.q_proj") == dataclasses.replace(usual, bits=8, group=32)
    assert layout_of("a.layers.0.k_proj") is None
    assert layout_of("a.layers.1.q_proj") == dataclasses.replace(usual, group=None)
    assert layout_of("a.layers.2.q_proj") == usual


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bits": 3}, "quantization_config.bits=3"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "quantization_config.bits=8"),
        ({"bits": 16}, "quantization_config.bits=16"),
        ({"act_bits": 8}, "quantization_config.act_bits=8"),
        ({"data_type": "mx_fp"}, "quantization_config.data_type='mx_fp'"),
        ({"packing_format": "auto_round:fp8"}, "packing_format='auto_round:fp8'"),
        ({"extra_config": {"a.b": {"bits": 5}}}, "extra_config.a.b.bits=5"),
        ({"extra_config": {"(a": {"bits": 4}}}, "extra_config"),
    ],
)
def test_other_values_are_refused_by_name(keys, message):
    with pytest.raises(UnsupportedConfigValue, match=message):
        read_storage({"quantization_config": CONFIG | keys})


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_missing_tensors_are_refused_by_name(library, tmp_path, part):
    written(library["llama"].folder, tmp_path / "model", "auto_round:auto_gptq")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.0.self_attn.q_proj.{part}"
    del tensors[name]
    save_file(tensors, file)
    with pytest.raises(WeightMismatch, match=f"missing {name}"):
        load(tmp_path / "model")
