"""Quantised checkpoints through transformers: products of codes, logits of plain numbers."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import LoadError, UnsupportedConfigValue, WeightMismatch
from quire.hardware.native import find_native
from quire.kernels.cpu.runtime import CpuRuntime
from quire.models.config_reader import read_config
from quire.models.foreign.library import foreign_storage
from quire.models.foreign.load import load_foreign_model
from quire.ops import select
from quire.runner.devices.device import CpuDevice
from tests.models.causal_mapping.comparing import prompts
from tests.models.causal_mapping.tiny import asker
from tests.models.foreign.tiny_models import LENGTH, write
from tests.models.paged_driver import TOLERANCE, relative_error, run_chunked
from tests.quantization import coded_checkpoints
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS
from tests.support.crowded_engine import engine

NATIVE, REASON = find_native()
PROVIDERS = ["torch", pytest.param("cpu", marks=pytest.mark.skipif(NATIVE is None, reason=REASON))]
NAME = "NanoChatForCausalLM"
LAYERS = re.compile(r".*\.layers\.\d+\..*(_proj|fc1|fc2)\.weight")
DENSE = {"intermediate_size": 160}
FIRST = ("gptq-v1-symmetric-act_order", "compressed-w4a16", "fp8-blocks", "compressed-int")
# the short names of scales are DeepSeek-V4's own, which has a family
LAYOUTS = {n: how for n, how in (FORMATS | BYTE_FORMATS).items() if "deepseek_v4" not in n}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(NAME, tmp_path_factory.mktemp("source"), **DENSE)


def ops_of(provider):
    runtime = CpuRuntime() if provider == "cpu" else None
    return select(device="cpu", dtype=torch.float32, providers=[provider, "torch"], runtime=runtime)


def load(folder, provider="torch"):
    ops = ops_of(provider)
    config = read_config(folder)
    return load_foreign_model(folder, config, ops, dtype=torch.float32, device=CpuDevice()), ops


def written(source, folder, layout):
    """The folder with the plain numbers of a checkpoint that is written to `folder`."""
    return coded_checkpoints.write(source, folder, LAYOUTS[layout], LAYERS)


def oracle(plain, rounded=None):
    """What transformers makes of ids, with the inputs of projections `rounded`."""
    return asker(NAME, plain, lambda name: rounded if LAYERS.fullmatch(name + ".weight") else None)


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.full]) for n in LAYOUTS]
)
def test_logits_are_those_of_the_plain_numbers(source, tmp_path, layout, provider):
    plain, how = written(source, tmp_path, layout), LAYOUTS[layout]
    model, ops = load(tmp_path, provider)
    texts = [part for text in prompts() for part in text.split(4)]
    found = run_chunked(model, texts, ops=ops)
    exact = [oracle(plain)(text) for text in texts]
    if getattr(how, "is_exact", True):
        assert relative_error(found, exact) < TOLERANCE
    else:  # what differs in the last bit may be rounded to the other side of a tie
        rounded = [oracle(plain, how.rounded)(text) for text in texts]
        assert by_token(found, rounded).median() < TOLERANCE
        assert by_token(found, exact).median() > 100 * TOLERANCE
    assert model.weight_bytes < load(plain, provider)[0].weight_bytes


def by_token(found, expected):
    """The largest difference in each token's logits over the largest of all."""
    size = max(e.abs().max() for e in expected)
    pairs = zip(found, expected, strict=True)
    return torch.cat([(f - e).abs().amax(-1) / size for f, e in pairs])


def test_the_plan_knows_that_weights_are_codes(source, tmp_path):
    written(source, tmp_path, "fp8-tensor")
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, quantization="fp8")
    plan = make_plan(args)
    assert plan.model.model_impl == "transformers"
    assert plan.model.quantization is None  # nothing is rounded
    core = engine(tmp_path, max_model_len=LENGTH)
    assert core is not None


def test_codes_must_fit(source, tmp_path):
    written(source, tmp_path, "compressed-w4a16")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("q_proj.weight_scale"))
    save_file({n: t for n, t in tensors.items() if n != name}, file, metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match=f"missing {name}"):
        load(tmp_path)
    wrong = {**tensors, name: tensors[name][:1].clone()}
    save_file(wrong, file, metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match=f"wrong shape {name}"):
        load(tmp_path)
    save_file({**tensors, "model.more": torch.ones(3)}, file, metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match=r"unknown model\.more"):
        load(tmp_path)


def test_8_bit_floats_without_scales_are_refused(source, tmp_path):
    """transformers would take them for the weights."""
    tensors = load_file(source / "model.safetensors")
    name = next(n for n in tensors if n.endswith("q_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    with pytest.raises(LoadError, match=f"{name}: stored in 8-bit floats, but not a linear"):
        load(tmp_path)


@pytest.mark.parametrize(
    "config", [{"quantization": {"group_size": 64, "bits": 4}}, {"quant_method": "mxfp4"}]
)
def test_formats_with_more_than_linear_layers_are_refused(source, tmp_path, config):
    whole = json.loads((source / "config.json").read_text())
    key = {"quantization_config": config} if "quant_method" in config else config
    with pytest.raises(UnsupportedConfigValue, match="store more than linear layers in codes"):
        foreign_storage(whole | key)
