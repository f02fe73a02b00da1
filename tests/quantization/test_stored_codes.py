"""Quantised checkpoints as they are stored: each layout gives the logits of transformers on the
same weights in plain numbers.
"""

import pytest
import torch

from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.loading.weights import load_model
from quire.ops import select
from tests.models.hostile.models import HOSTILE, Library, oracle
from tests.models.paged_driver import TOLERANCE, PagedRun, relative_error
from tests.quantization.coded_checkpoints import FORMATS, write

NATIVE, REASON = find_native()
PROVIDERS = ["torch", pytest.param("cpu", marks=pytest.mark.skipif(NATIVE is None, reason=REASON))]
OTHERS = {"qwen2": "gptq-v1", "phi3": "compressed-w4a16", "mixtral": "awq"}
"""Families with biases, fused projections and experts, in one layout each."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("plain"))


def ops_of(provider):
    runtime = CpuRuntime() if provider == "cpu" else None
    return select(device="cpu", dtype=torch.float32, providers=[provider, "torch"], runtime=runtime)


def load(folder, ops, made):
    spec = read_spec(read_config(folder))
    return load_model(folder, spec, ops, dtype=torch.float32, max_model_len=made.max_model_len)


def logits(model, prompts, ops):
    run = PagedRun(model, prompts, ops=ops)
    return list(run.step([len(p) for p in prompts]).values())


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_plain_numbers(library, tmp_path, name, provider):
    made = library["llama"]
    plain = write(made.folder, tmp_path / "model", FORMATS[name])
    ops = ops_of(provider)
    model = load(tmp_path / "model", ops, made)
    expected = [oracle(HOSTILE["llama"], plain)(p) for p in made.prompts]
    assert relative_error(logits(model, made.prompts, ops), expected) < TOLERANCE
    assert model.weight_bytes < load(plain, ops, made).weight_bytes
