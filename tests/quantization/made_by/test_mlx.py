"""Checkpoints of mlx-lm."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import LoadError, UnsupportedConfigValue, WeightMismatch
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.formats.storage import CodeLayout
from quire.models.loading.codes.widened_codes import widened_weight
from quire.models.loading.weights import load_model
from quire.ops import select
from quire.testing import make_checkpoint
from tests.models.hostile.models import HOSTILE, Library, make, oracle
from tests.models.paged_driver import TOLERANCE, PagedRun, relative_error
from tests.quantization.coded_checkpoints import write
from tests.quantization.made_by.mlx_checkpoints import MATRICES, Floats, Mlx

WORDS = json.loads((Path(__file__).parent / "mlx_words.json").read_text())
"""Small weights in numbers of each size, quantised and dequantised by MLX 0.32.4 on a CPU."""
OPS = select(device="cpu", dtype=torch.float32, providers=["torch"])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("plain"))


def written(source, target, how):
    """Write the checkpoint, and return the folder of the same weights in plain numbers."""
    plain = write(source, target, how, MATRICES)
    set_config(target, quantization=how.config)
    return plain


def set_config(folder, **keys):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def load(folder):
    spec = read_spec(read_config(folder))
    return load_model(folder, spec, OPS, dtype=torch.float32, max_model_len=64)


@pytest.mark.parametrize(
    "given", WORDS, ids=lambda given: given.get("mode", f"{given['bits']}-bit")
)
def test_words_are_those_of_mlx(given):
    if "mode" in given:
        keys = {"mode": given["mode"], "bits": given["bits"], "group_size": given["group"]}
        layout = read_storage({"quantization": keys}).layout_of("m")
        parts = {"scales": torch.tensor(given["scales"], dtype=torch.uint8)}
    else:
        layout = CodeLayout("mlx", given["bits"], given["group"], has_zeros=False)
        parts = {name: torch.tensor(given[name]) for name in ("scales", "biases")}
    parts["weight"] = torch.tensor(given["weight"], dtype=torch.uint32)
    found = widened_weight(layout, "m", parts, 64)
    torch.testing.assert_close(found, torch.tensor(given["plain"]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["llama", "qwen2", "ernie4_5"])
@pytest.mark.parametrize("bits", [4, 8, pytest.param(3, marks=pytest.mark.full)])
def test_logits_are_those_of_the_plain_numbers(library, tmp_path, caplog, name, bits):
    made = library[name]
    overrides = {
        "model.layers.0.self_attn.v_proj": {"group_size": 16, "bits": 6},
        "model.layers.1.mlp.down_proj": False,
    }
    how = Mlx(bits, 16, overrides)
    plain = written(made.folder, tmp_path / "model", how)
    requantise(tmp_path / "model", plain, made.folder)
    with caplog.at_level(logging.WARNING):
        model = load(tmp_path / "model")
    assert "quantised with mlx, are widened to float32" in caplog.text
    run = PagedRun(model, made.prompts, ops=OPS)
    found = list(run.step([len(p) for p in made.prompts]).values())
    expected = [oracle(HOSTILE[name], plain)(p) for p in made.prompts]
    assert relative_error(found, expected) < TOLERANCE
    original = [oracle(HOSTILE[name], made.folder)(p) for p in made.prompts]
    assert relative_error(found, original) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "module"),
    [("qwen3_moe", "model.layers.2.mlp"), ("mixtral", "model.layers.1.block_sparse_moe")],
)
def test_experts_in_one_module_are_those_of_the_plain_numbers(library, tmp_path, name, module):
    made = library[name]
    own = {f"{module}.switch_mlp.down_proj": False}
    how = Mlx(4, 16, own)
    plain = write(made.folder, tmp_path / "model", how, OF_EXPERTS)
    set_config(tmp_path / "model", quantization=how.config)
    keep_experts(tmp_path / "model", plain, made.folder, f"{module}.")
    stack_experts(tmp_path / "model")
    model = load(tmp_path / "model")
    run = PagedRun(model, made.prompts, ops=OPS)
    found = list(run.step([len(p) for p in made.prompts]).values())
    expected = [oracle(HOSTILE[name], plain)(p) for p in made.prompts]
    assert relative_error(found, expected) < TOLERANCE


OF_EXPERTS = re.compile(
    MATRICES.pattern + r"|.*\.experts\.\d+\.w\d\.weight|.*(mlp|block_sparse_moe)\.gate\.weight"
)
"""With the routers, as mlx-lm has them."""
DOWN = re.compile(r"experts\.\d+\.(down_proj|w2)\.")
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)\.(\w+)")
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def keep_experts(folder, plain, source, at):
    """Put the down projections of one layer back as they were."""
    coded, values, original = (load_file(f / "model.safetensors") for f in (folder, plain, source))
    of_layer = [name for name in coded if name.startswith(at) and DOWN.search(name)]
    assert of_layer
    for name in of_layer:
        del coded[name]
        if name.endswith(".weight"):
            coded[name] = values[name] = original[name]
    save_file(coded, folder / "model.safetensors")
    save_file(values, plain / "model.safetensors")


def stack_experts(folder):
    """Put the experts of a layer into one module for each projection, as mlx-lm does."""
    tensors, of_experts = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if found := EXPERT.fullmatch(name):
            at, expert, projection, leaf = found.groups()
            key = f"{at}.switch_mlp.{PROJECTIONS.get(projection, projection)}.{leaf}"
            of_experts.setdefault(key, {})[int(expert)] = tensor
        else:
            tensors[name] = tensor
    for name, parts in of_experts.items():
        tensors[name] = torch.stack([parts[i] for i in range(len(parts))])
    save_file(tensors, folder / "model.safetensors")


def requantise(folder, plain, source):
    """Give the modules with entries of their own what these say."""
    coded, values = (load_file(at / "model.safetensors") for at in (folder, plain))
    weights = load_file(source / "model.safetensors")
    module = "model.layers.0.self_attn.v_proj"
    parts, values[f"{module}.weight"] = Mlx(6, 16).made(weights[f"{module}.weight"])
    coded |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    module = "model.layers.1.mlp.down_proj"
    for part in parts:
        coded.pop(f"{module}.{part}")
    values[f"{module}.weight"] = coded[f"{module}.weight"] = weights[f"{module}.weight"]
    save_file(coded, folder / "model.safetensors")
    save_file(values, plain / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.biases"), WeightMismatch, "missing"),
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.scales"), WeightMismatch, "q_proj"),
        (
            lambda t: t.update({"lm_head.scales": t["lm_head.scales"][:, :1].contiguous()}),
            WeightMismatch,
            "wrong shape lm_head.scales",
        ),
        (
            lambda t: t["model.embed_tokens.biases"].fill_(torch.inf),
            LoadError,
            "model.embed_tokens.biases has a number that is not finite",
        ),
        (
            lambda t: t.update(
                {"lm_head.weight": t["lm_head.weight"].view(torch.int32).contiguous()}
            ),
            LoadError,
            "lm_head.weight is stored as I32",
        ),
    ],
)
def test_hostile_files_are_refused_by_name(library, tmp_path, change, error, message):
    written(library["llama"].folder, tmp_path / "model", Mlx(4, 16))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    with pytest.raises(error, match=message):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"bits": 7}, "quantization.bits=7 is not implemented"),
        ({"group_size": -1}, "quantization.group_size=-1"),
        ({"group_size": 12}, "quantization.group_size=12"),
        ({"mode": "nvfp8"}, "quantization.mode='nvfp8'"),
        ({"mode": "nvfp4", "group_size": 32}, "quantization.group_size=32"),
        ({"mode": "mxfp8", "bits": 4, "group_size": 32}, "quantization.bits=4"),
        ({"quantize_input": True}, "quantization.quantize_input=True"),
        ({"model.layers.0.x": 3}, r"quantization.model.layers.0.x=3.*true, false, or an object"),
        ({"model.layers.0.x": {"bits": 9}}, "quantization.model.layers.0.x.bits=9"),
    ],
)
def test_other_values_are_refused_by_name(keys, message):
    config = {"quantization": Mlx().config | keys}
    with pytest.raises(UnsupportedConfigValue, match=message):
        read_storage(config)


def test_a_different_quantization_config_is_refused():
    config = {"quantization": Mlx().config, "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(UnsupportedConfigValue, match="null next to quantization_config"):
        read_storage(config)


def test_an_entry_counts_for_its_module_alone():
    own = {"a.b": {"bits": 8}, "a.c": False, "a.d": True}
    layout_of = read_storage({"quantization": Mlx(4, 64, own).config}).layout_of
    assert (layout_of("a.b").bits, layout_of("a.b").group) == (8, 64)
    assert layout_of("a.c") is None
    assert layout_of("a.d") == layout_of("a.bb") == CodeLayout("mlx", 4, 64, has_zeros=False)


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_floats_of_every_matrix_are_the_plain_numbers(tmp_path, mode):
    hostile = HOSTILE["llama"]
    hostile = replace(hostile, keys={**hostile.keys, "intermediate_size": 96})
    made = make(hostile, tmp_path / "source")
    how = Floats(mode)
    plain = written(made.folder, tmp_path / "model", how)
    model = load(tmp_path / "model")
    found = list(
        PagedRun(model, made.prompts, ops=OPS).step([len(p) for p in made.prompts]).values()
    )
    expected = [oracle(hostile, plain)(p) for p in made.prompts]
    assert relative_error(found, expected) < TOLERANCE
    assert relative_error(found, made.logits) > 100 * TOLERANCE


def test_an_entry_has_the_defaults_of_its_own_mode():
    own = {"a.b": {"mode": "mxfp8"}, "a.c": {"bits": 8}, "a.d": True}
    keys = {"mode": "mxfp4", "group_size": 32, "bits": 4, **own}
    layout_of = read_storage({"quantization": keys}).layout_of
    found = {name: (layout_of(name).packing, layout_of(name).group) for name in own}
    assert found == {"a.b": ("mlx-mxfp8", 32), "a.c": ("mlx", 64), "a.d": ("mlx-mxfp4", 32)}


def test_the_plan_says_that_weights_are_widened(tmp_path):
    source = make_checkpoint(tmp_path / "source", "tiny", dtype="float32")
    plain = written(source, tmp_path / "model", Mlx(4, 16))
    folder = str(tmp_path / "model")
    plan = make_plan(EngineArgs(model=folder, skip_tokenizer_init=True, quantization="mlx"))
    of_plain = make_plan(EngineArgs(model=str(plain), skip_tokenizer_init=True))
    reason = plan.reasons["quantization"]
    assert "quantised with mlx; its weights are widened at load" in reason
    assert plan.model.weight_bytes == of_plain.model.weight_bytes
