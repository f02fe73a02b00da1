"""`quantization_config` as tools write it: all keys known, and the layout of their files."""

import pytest

from quire.errors import LoadError
from quire.models.formats import read_storage

MODULE = "model.layers.0.mlp.up_proj"
GPTQMODEL = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "format": "gptq",
    "group_size": 128,
    "lm_head": False,
    "meta": {"damp_percent": 0.05, "quantizer": ["gptqmodel:7.7.0"], "true_sequential": True},
    "method": "gptq",
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}
AUTO_ROUND = {
    "autoround_version": "0.16.1",
    "bits": 4,
    "data_type": "int",
    "enable_quanted_input": False,
    "group_size": 128,
    "provider": "auto-round",
    "sym": True,
}
CONFIGS = {
    "GPTQModel": (GPTQMODEL, ("gptq", True)),
    "GPTQModel, second version": (
        GPTQMODEL | {"format": "gptq_v2", "checkpoint_format": "gptq_v2"},
        ("gptq", False),
    ),
    "GPTQModel, AWQ": (
        GPTQMODEL
        | dict.fromkeys(("format", "checkpoint_format", "version"), "gemm")
        | dict.fromkeys(("method", "quant_method"), "awq")
        | {"zero_point": False},
        ("awq", False),
    ),
    "AutoRound, GPTQ": (
        AUTO_ROUND
        | {"quant_method": "gptq", "desc_act": False, "damp_percent": 0.01, "lm_head": False}
        | {"true_sequential": False},
        ("gptq", True),
    ),
    "AutoRound, AWQ": (
        AUTO_ROUND
        | {"quant_method": "awq", "version": "gemm", "zero_point": False}
        | {"modules_to_not_convert": ["lm_head"], "to_quant_block_names": "model.layers"},
        ("awq", False),
    ),
}


@pytest.mark.parametrize("tool", CONFIGS)
def test_every_key_of_a_tool_is_known(tool):
    config, (packing, is_one_less) = CONFIGS[tool]
    storage = read_storage({"quantization_config": config})
    layout = storage.layout_of(MODULE)
    assert (layout.packing, layout.is_one_less) == (packing, is_one_less)
    assert (layout.bits, layout.group, layout.has_zeros) == (4, 128, True)


@pytest.mark.parametrize(
    ("tool", "key", "value"),
    [
        ("GPTQModel", "method", "gptaq"),
        ("GPTQModel, AWQ", "method", "gptq"),
        ("AutoRound, GPTQ", "data_type", "mx_fp"),
        ("AutoRound, AWQ", "data_type", "fp"),
        ("GPTQModel", "activation", {"mode": "w4afp8"}),
    ],
)
def test_other_values_of_these_keys_are_refused(tool, key, value):
    with pytest.raises(LoadError, match=rf"quantization_config\.{key}\b"):
        read_storage({"quantization_config": CONFIGS[tool][0] | {key: value}})


FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
PRODUCER = {"producer": {"name": "modelopt", "version": "0.23.0"}}
OF_CACHES = {
    "AutoFP8": FP8 | {"kv_cache_scheme": "static"},
    "ModelOpt": PRODUCER | MODELOPT | {"quant_method": "modelopt"},
    "ModelOpt, in its own file": PRODUCER | {"quantization": MODELOPT},
    "ModelOpt, without the method": PRODUCER | MODELOPT,
    "compressed-tensors": FP8
    | {
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}
        | {"symmetric": True, "dynamic": False, "observer": "minmax", "observer_kwargs": {}}
        | dict.fromkeys(("group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype"))
    },
    "ModelOpt, a scheme": PRODUCER
    | {"quant_algo": "FP8", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
}


@pytest.mark.parametrize("tool", OF_CACHES)
def test_tools_say_in_their_ways_that_caches_have_scales(tool):
    storage = read_storage({"quantization_config": OF_CACHES[tool]})
    assert storage.cache == "float"
    assert storage.layout_of(MODULE).rows.is_static


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "channel"),
        ("symmetric", False),
        ("dynamic", True),
        ("group_size", 64),
        ("block_structure", [128, 128]),
        ("actorder", "group"),
        ("scale_dtype", "torch.uint8"),
        ("zp_dtype", "torch.int32"),
        ("wish", 7),
    ],
)
def test_other_scales_of_caches_are_refused_by_their_key(key, value):
    scheme = {"num_bits": 8, "type": "float", key: value}
    with pytest.raises(LoadError, match=rf"kv_cache_scheme\.{key}\b"):
        read_storage({"quantization_config": FP8 | {"kv_cache_scheme": scheme}})


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        (FP8 | {"kv_cache_scheme": "dynamic"}, r"kv_cache_scheme='dynamic'"),
        (PRODUCER | {"quantization": MODELOPT | {"wish": 1}}, r"quantization\.wish"),
        (
            PRODUCER | MODELOPT | {"kv_cache_scheme": {"num_bits": 4}},
            r"kv_cache_scheme\.num_bits=4",
        ),
        (PRODUCER, "lacks quantization_config.quant_method"),
    ],
    ids=str,
)
def test_other_ways_are_refused(tool, says):
    with pytest.raises(LoadError, match=says):
        read_storage({"quantization_config": tool})


def test_an_older_name_of_an_order():
    weights = {"num_bits": 4, "group_size": 128, "strategy": "group", "actorder": "dynamic"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    assert read_storage({"quantization_config": config}).layout_of(MODULE).is_reordered


def test_the_first_rule_of_gptq_that_matches_counts():
    rules = {r"+:.*up_proj": {"bits": 8}, r"-:.*layers\.0\.": {}}
    storage = read_storage({"quantization_config": GPTQMODEL | {"dynamic": rules}})
    assert storage.layout_of(MODULE).bits == 8
    assert storage.layout_of("model.layers.0.mlp.down_proj") is None
