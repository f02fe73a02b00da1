"""Checkpoints that other packages have written (`make.py`), against their own numbers."""

import json
import shutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import LoadError
from quire.models import find_family, read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.loading.weights import load_model
from quire.models.rules import tensor_map
from quire.ops import CodedWeight, select
from quire.ops.formats.row_rounding import RowRounding
from tests.models.paged_driver import PagedRun, relative_error

MADE = Path(__file__).parent
OPS = select(device="cpu", dtype=torch.float32, providers=["torch"])
NATIVE = select(device="cpu", dtype=torch.float32)
EXACT = 2e-5
LLAMA = "LlamaForCausalLM"
NEAR = {"quark-fp8": 0.2, "quark-fp8_channel": 0.2, "quark-int8": 0.1, "quark-mixed": 0.2}
NEAR |= {"modelopt-fp8": 0.2, "modelopt-mixed": 0.2, "torchao-int8_rows": 0.05}
"""Checkpoints whose activations are rounded -> how far that may move logits."""


def names():
    return sorted(path.name for path in MADE.iterdir() if (path / "expected.json").exists())


def expected_of(name):
    expected = json.loads((MADE / name / "expected.json").read_text())
    return torch.tensor(expected["prompt"]), torch.tensor(expected["logits"])


def logits(folder, prompt, ops=OPS):
    model = load_model(folder, read_spec(read_config(folder)), ops, dtype=torch.float32)
    run = PagedRun(model, [prompt], ops=ops)
    return list(run.step([len(prompt)]).values())[0]


@pytest.mark.parametrize("name", names())
def test_logits_are_those_of_the_packages_own_numbers(name, monkeypatch):
    """Without the rounding of activations, which the packages' weights do not show."""
    monkeypatch.setattr(RowRounding, "rounded", lambda self, x, peaks=None: x.float())
    monkeypatch.setattr(CodedWeight, "is_of_integers", property(lambda self: False))
    prompt, expected = expected_of(name)
    assert relative_error([logits(MADE / name, prompt)], [expected]) < EXACT


@pytest.mark.parametrize("name", names())
def test_native_logits_are_near_them(name):
    prompt, expected = expected_of(name)
    found = logits(MADE / name, prompt, NATIVE)
    assert relative_error([found], [expected]) < NEAR.get(name, EXACT)
    if name in NEAR:
        assert relative_error([found], [expected]) > 10 * EXACT


@pytest.mark.parametrize("name", names())
def test_the_plan_says_how_a_checkpoint_is_stored(name):
    method = name.partition("-")[0]
    args = EngineArgs(model=str(MADE / name), skip_tokenizer_init=True, quantization=method)
    plan = make_plan(args)
    assert f"the checkpoint is quantised with {method}" in plan.reasons["quantization"]
    is_widened = method == "hqq" or name == "torchao-int4"
    assert ("widened at load" in plan.reasons["quantization"]) == is_widened


def changed(name, target, change=lambda tensors: None, **keys):
    """A copy with other tensors, and other values in its `quantization_config`."""
    shutil.copytree(MADE / name, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= keys
    (target / "config.json").write_text(json.dumps(config))
    return target


def torchao_type(kind, **data):
    return {"default": {"_type": kind, "_version": 2, "_data": data}}


@pytest.mark.parametrize("granularity", [None, [{"_type": "PerRow", "_data": {"dim": -1}}] * 2])
def test_torchao_with_rows_in_e4m3(tmp_path, granularity):
    """torchao quantises so on GPUs alone; the tensors are those of weights only."""
    kind = "Float8DynamicActivationFloat8WeightConfig"
    quant_type = torchao_type(kind, granularity=granularity, packing_format="plain")
    folder = changed("torchao-fp8", tmp_path / "model", quant_type=quant_type)
    prompt, expected = expected_of("torchao-fp8")
    assert EXACT * 10 < relative_error([logits(folder, prompt)], [expected]) < 0.2


PROJECTION = "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("torchao-int8", {"quant_type": "int8_weight_only"}, "quant_type='int8_weight_only'"),
        (
            "torchao-int8",
            {"quant_type": torchao_type("Int8StaticActivationInt8WeightConfig")},
            "_type='Int8StaticActivationInt8WeightConfig' is not implemented; supported: 'Float8",
        ),
        (
            "torchao-int4",
            {"quant_type": torchao_type("Int4WeightOnlyConfig", int4_packing_format="opaque")},
            "int4_packing_format='opaque' is not implemented; supported: 'plain'",
        ),
        (
            "torchao-int8",
            {"quant_type": torchao_type("Int8WeightOnlyConfig", unheard_of=1)},
            "unheard_of",
        ),
        (
            "torchao-int8",
            {
                "quant_type": torchao_type(
                    "Int8WeightOnlyConfig", granularity={"_type": "PerBlock", "_data": {}}
                )
            },
            "granularity=.*PerRow, PerTensor",
        ),
        ("torchao-int8", {"include_input_output_embeddings": True}, "include_input_output"),
        ("hqq-4bit", {"quant_config": {}}, "quant_config={}"),
        (
            "hqq-4bit",
            {"quant_config": {"weight_quant_params": {"nbits": 5, "group_size": 32}}},
            "nbits=5",
        ),
        ("quark-fp8", {"layer_type_quant_config": {"Linear": {}}}, "layer_type_quant_config"),
        ("quark-fp8", {"exclude": ["re:(.*.*)*c"]}, "exclude='"),
        ("quark-fp8", {"softmax_quant_spec": {"dtype": "int8"}}, "softmax_quant_spec"),
        ("modelopt-mixed", {"quantized_layers": {}}, "quantized_layers={}"),
        (
            "modelopt-mixed",
            {"quantized_layers": {PROJECTION: {"quant_algo": "W4A8_AWQ"}}},
            "quant_algo='W4A8_AWQ'",
        ),
    ],
)
def test_other_values_are_refused_by_name(tmp_path, name, keys, message):
    folder = changed(name, tmp_path / "model", **keys)
    with pytest.raises(LoadError, match=message):
        read_storage(read_config(folder))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "torchao-intx4",
            lambda t: t[f"{PROJECTION}._weight_qdata"].fill_(9),
            f"{PROJECTION}._weight_qdata has a number that is not of -8..7",
        ),
        (
            "torchao-int8",
            lambda t: t[f"{PROJECTION}._weight_scale"].fill_(torch.inf),
            f"{PROJECTION} has a scale that is not a finite number",
        ),
        (
            "torchao-int4",
            lambda t: t[f"{PROJECTION}._weight_zero_point"].fill_(torch.nan),
            f"{PROJECTION}._weight_zero_point has a number that is not finite",
        ),
        ("torchao-int4", lambda t: t.pop(f"{PROJECTION}._weight_scale"), "missing.*_weight_scale"),
        (
            "hqq-4bit",
            lambda t: t[f"{PROJECTION}.nbits"].fill_(8),
            f"{PROJECTION}.nbits is 8, and config.json says 4",
        ),
        (
            "hqq-4bit",
            lambda t: t[f"{PROJECTION}.shape"].fill_(64),
            f"{PROJECTION}.shape is .64, 64., but its codes are of .32, 64.",
        ),
        (
            "quark-int8",
            lambda t: t[f"{PROJECTION}.input_zero_point"].fill_(3),
            f"{PROJECTION}.input_zero_point is not 0",
        ),
    ],
)
def test_hostile_files_are_refused_by_name(tmp_path, name, change, message):
    folder = changed(name, tmp_path / "model", change)
    with pytest.raises(LoadError, match=message):
        logits(folder, torch.tensor([1, 2]))


def test_pickled_tensors_of_torchao_are_refused_with_what_to_do(tmp_path, monkeypatch):
    module = types.ModuleType("torchao.quantization")
    module.Int4Tensor = type("Int4Tensor", (), {"__module__": module.__name__})
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    folder = shutil.copytree(MADE / "torchao-int4", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": module.Int4Tensor()}, folder / "pytorch_model.bin")
    message = "pytorch_model.bin has tensors of a class of torchao's.*Save the model again"
    with pytest.raises(LoadError, match=message):
        load_model(
            folder, read_spec(read_config(folder)), OPS, dtype=torch.float32, load_format="pt"
        )


def test_names_and_expressions_of_torchao_count_in_its_order():
    one, two = ({"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 2} for _ in range(2))
    two = {"_type": "Float8WeightOnlyConfig", "_data": {}, "_version": 2}
    table = {"re:a\\..*": two, "a.b": one, "re:.*\\.d": None, "_default": one}
    quant_type = torchao_type("FqnToConfig", fqn_to_config=table)
    config = {"quant_method": "torchao", "quant_type": quant_type}
    layout_of = read_storage({"quantization_config": config}).layout_of
    packings = {name: layout_of(name) for name in ("a.b", "a.c", "c.d", "c.e")}
    assert packings["c.d"] is None
    del packings["c.d"]
    found = {name: layout.packing for name, layout in packings.items()}
    assert found == {"a.b": "torchao", "a.c": "torchao-fp8", "c.e": "torchao"}


def test_a_list_of_quantised_layers_has_either_name():
    own = "model.layers.0.mlp.down_proj"
    for listed in (own, f"language_model.{own}"):
        layers = {listed: {"quant_algo": "NVFP4", "group_size": 16}}
        config = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        storage = read_storage({"quantization_config": config})
        decoder = read_spec(read_config(MADE / "modelopt-mixed"))
        named = {s.name: s for s in tensor_map(find_family({"architectures": [LLAMA]}), decoder)}
        for module, has_codes in ((own, True), ("model.layers.0.mlp.up_proj", False)):
            plain = named[f"{module}.weight"]
            within = replace(plain, name=f"language_model.{plain.name}", own_name=plain.name)
            assert (within.in_codes(storage).layout is not None) == has_codes


def test_tags_of_hqq_name_modules_of_all_layers():
    of_four, of_two = (
        {"weight_quant_params": {"nbits": bits, "group_size": 16, "axis": 1}} for bits in (4, 2)
    )
    tags = {"self_attn.q_proj": of_four, "mlp.up_proj": of_two}
    config = {"quant_method": "hqq", "quant_config": tags, "skip_modules": ["lm_head"]}
    layout_of = read_storage({"quantization_config": config}).layout_of
    assert layout_of("model.layers.3.self_attn.q_proj").bits == 4
    assert layout_of("model.layers.11.mlp.up_proj").bits == 2
    assert layout_of("model.layers.3.mlp.down_proj") is layout_of("lm_head") is None


def test_there_are_checkpoints_of_every_package():
    assert {name.partition("-")[0] for name in names()} == {"torchao", "hqq", "quark", "modelopt"}
