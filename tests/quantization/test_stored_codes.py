"""Quantised checkpoints: each layout has transformers' logits of the same plain numbers."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import WeightMismatch
from quire.kernels.cpu.runtime import CpuRuntime, find_native
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.loading.weights import load_model
from quire.ops import select
from tests.models.hostile.models import HOSTILE, Library, make, oracle, theirs
from tests.models.paged_driver import TOLERANCE, PagedRun, relative_error
from tests.quantization.bitsandbytes_checkpoints import BLOCK_FORMATS, PEAK_FORMATS
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS, LAYERS, write
from tests.quantization.four_bit_checkpoints import FOUR_BIT_FORMATS, WIDE_EXPERTS, write_experts

NATIVE, REASON = find_native()
PROVIDERS = ["torch", pytest.param("cpu", marks=pytest.mark.skipif(NATIVE is None, reason=REASON))]
OTHERS = {
    "qwen2": "gptq-v1",
    "phi3": "compressed-w4a16",
    "mixtral": "awq",
    "deepseek_v3": "compressed-float-w8a16",
}
"""Families with biases, fused projections, experts and latents (whose matrices are absorbed, and
whose routers are not linear modules), in one layout each.
"""
OF_BYTES = BYTE_FORMATS | PEAK_FORMATS
FIRST_BYTES = (
    "fp8-blocks-of-exponents",
    "compressed-int",
    "compressed-float-w8a16",
    "bitsandbytes-int8-rows",
)
"""Layouts of bytes that are tested by default."""
PACKED = FORMATS | FOUR_BIT_FORMATS | BLOCK_FORMATS
"""Layouts whose products are with activations as they are."""
FIRST = (
    *("awq", "gptq-v1-symmetric-act_order", "compressed-w8a16-channel-asymmetric", "nvfp4"),
    "bitsandbytes-nf4-nested",
)
"""Those that are tested by default, one of each kind."""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("plain"))


def ops_of(provider):
    runtime = CpuRuntime() if provider == "cpu" else None
    return select(device="cpu", dtype=torch.float32, providers=[provider, "torch"], runtime=runtime)


def load(folder, ops, max_model_len):
    spec = read_spec(read_config(folder))
    return load_model(folder, spec, ops, dtype=torch.float32, max_model_len=max_model_len)


def logits(model, prompts, ops):
    run = PagedRun(model, prompts, ops=ops)
    return list(run.step([len(p) for p in prompts]).values())


@torch.no_grad()
def logits_with(plain, prompts, rounded=None):
    """Those of transformers with the weights `plain`, rows `rounded` before each product."""
    model = theirs(HOSTILE["llama"], plain)
    for name, module in model.named_modules():
        if rounded is not None and LAYERS.fullmatch(name + ".weight"):
            module.register_forward_pre_hook(lambda _, given: rounded(given[0]))
    return [model(ids[None], use_cache=False).logits[0] for ids in prompts]


def by_token(found, expected):
    """The largest difference in each token's logits over the largest of all."""
    size = max(e.abs().max() for e in expected)
    pairs = zip(found, expected, strict=True)
    return torch.cat([(f - e).abs().amax(-1) / size for f, e in pairs])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FIRST else [pytest.mark.full]) for n in PACKED]
)
def test_logits_are_those_of_the_plain_numbers(library, tmp_path, name, provider):
    made = library["llama"]
    plain = write(made.folder, tmp_path / "model", PACKED[name])
    ops = ops_of(provider)
    model = load(tmp_path / "model", ops, made.max_model_len)
    expected = [oracle(HOSTILE["llama"], plain)(p) for p in made.prompts]
    assert relative_error(logits(model, made.prompts, ops), expected) < TOLERANCE
    assert model.weight_bytes < load(plain, ops, made.max_model_len).weight_bytes


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FIRST_BYTES else [pytest.mark.full]) for n in OF_BYTES],
)
def test_logits_of_bytes_are_those_of_the_plain_numbers(library, tmp_path, name, provider):
    made, how = library["llama"], OF_BYTES[name]
    plain = write(made.folder, tmp_path / "model", how)
    ops = ops_of(provider)
    model = load(tmp_path / "model", ops, made.max_model_len)
    prompts = [part for ids in made.prompts for part in ids.split(4)]
    found, exact = logits(model, prompts, ops), logits_with(plain, prompts)
    if how.is_exact:
        assert relative_error(found, exact) < TOLERANCE
    else:
        # What differs in the last bit may fall on the other side of a tie, one in 1e5: from there
        # on a prompt's logits differ. The prompts are short, so that this happens in few of them.
        assert by_token(found, logits_with(plain, prompts, how.rounded)).median() < TOLERANCE
        assert by_token(found, exact).median() > 100 * TOLERANCE
    assert model.weight_bytes < load(plain, ops, made.max_model_len).weight_bytes


@pytest.mark.parametrize("provider", PROVIDERS)
def test_experts_of_gpt_oss_are_read_as_they_are_published(tmp_path, provider):
    hostile = HOSTILE["gpt_oss"]
    hostile = dataclasses.replace(hostile, keys=hostile.keys | WIDE_EXPERTS)
    made = make(hostile, tmp_path / "source")
    plain = write_experts(made.folder, tmp_path / "model")
    ops = ops_of(provider)
    model = load(tmp_path / "model", ops, made.max_model_len)
    expected = [oracle(hostile, plain)(p) for p in made.prompts]
    assert relative_error(logits(model, made.prompts, ops), expected) < TOLERANCE
    assert model.weight_bytes < load(plain, ops, made.max_model_len).weight_bytes


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("name", ["compressed-w4a16", "compressed-float-w8a16"])
def test_the_head_may_be_stored_in_codes(library, tmp_path, name, provider):
    made, how = library["llama"], (FORMATS | BYTE_FORMATS)[name]
    how = dataclasses.replace(how, config=how.config | {"ignore": []})
    names = re.compile(LAYERS.pattern + r"|lm_head\.weight")
    plain = write(made.folder, tmp_path / "model", how, names)
    ops = ops_of(provider)
    model = load(tmp_path / "model", ops, made.max_model_len)
    expected = [oracle(HOSTILE["llama"], plain)(p) for p in made.prompts]
    assert relative_error(logits(model, made.prompts, ops), expected) < TOLERANCE
    table = load_file(plain / "model.safetensors")["lm_head.weight"]
    assert (
        model.weight_bytes < load(plain, ops, made.max_model_len).weight_bytes - 2 * table.numel()
    )


@pytest.mark.parametrize("family", OTHERS)
def test_families_with_other_modules(library, tmp_path, family):
    made = library[family]
    how = (FORMATS | BYTE_FORMATS)[OTHERS[family]]
    names = re.compile(LAYERS.pattern + r"|.*_with_mqa\.weight")
    plain = write(made.folder, tmp_path / "model", how, names)
    ops = ops_of("torch")
    model = load(tmp_path / "model", ops, made.max_model_len)
    expected = [oracle(HOSTILE[family], plain)(p) for p in made.prompts]
    assert relative_error(logits(model, made.prompts, ops), expected) < TOLERANCE
    assert model.weight_bytes < load(plain, ops, made.max_model_len).weight_bytes


def test_convolutions_are_not_linear_modules(library, tmp_path):
    made = library["lfm2"]
    names = re.compile(r".*\.(w[123]|\w*_proj)\.weight")
    plain = write(made.folder, tmp_path / "model", BYTE_FORMATS["compressed-float-w8a16"], names)
    ops = ops_of("torch")
    model = load(tmp_path / "model", ops, made.max_model_len)
    expected = [oracle(HOSTILE["lfm2"], plain)(p) for p in made.prompts]
    assert relative_error(logits(model, made.prompts, ops), expected) < TOLERANCE


def test_modules_on_a_list_are_stored_as_they_are(library, tmp_path):
    made = library["llama"]
    config = FORMATS["gptq-v1"].config | {"dynamic": {r"-:.*layers\.1\.": {}}}
    how = dataclasses.replace(FORMATS["gptq-v1"], config=config)
    write(made.folder, tmp_path / "model", how)
    with pytest.raises(WeightMismatch, match=r"missing model\.layers\.1\..*weight"):
        load(tmp_path / "model", ops_of("torch"), made.max_model_len)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    source = load_file(made.folder / "model.safetensors")
    for name in [n for n in tensors if ".layers.1." in n]:
        del tensors[name]
    tensors |= {name: t for name, t in source.items() if ".layers.1." in name}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    load(tmp_path / "model", ops_of("torch"), made.max_model_len)


SCHEMES = {
    "model.layers.0.mlp.up_proj": 8,
    "model.layers.0.mlp.down_proj": 4,
    "model.layers.1.mlp.up_proj": None,
    "lm_head": None,
}


def test_groups_of_modules_have_schemes_of_their_own():
    config = json.loads(json.dumps(FORMATS["compressed-w4a16"].config))
    own = json.loads(json.dumps(config["config_groups"]["group_0"]))
    own |= {"targets": ["re:.*up_proj"]}
    own["weights"]["num_bits"] = 8
    config["config_groups"] |= {"group_1": own}
    config["ignore"] = ["lm_head", "model.layers.1.mlp.up_proj"]
    storage = read_storage({"quantization_config": config})
    for module, bits in SCHEMES.items():
        layout = storage.layout_of(module)
        assert (layout and layout.bits) == bits


def test_rules_of_gptq_override_bits_and_groups():
    rules = {r"-:.*layers\.1\.": {}, r"+:.*down_proj": {"bits": 8, "group_size": 32}}
    config = FORMATS["gptq-v1"].config | {"dynamic": rules}
    storage = read_storage({"quantization_config": config})
    found = storage.layout_of("model.layers.0.mlp.down_proj")
    assert (found.bits, found.group) == (8, 32)
    assert storage.layout_of("model.layers.0.mlp.up_proj").bits == 4
    assert storage.layout_of("model.layers.1.mlp.down_proj") is None
    assert storage.group == 32
