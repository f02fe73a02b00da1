"""Quantised checkpoints that lie, or hold what is not known here: one clear error each."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CorruptCheckpoint, LoadError, UnknownConfigKey, WeightMismatch
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from tests.models.hostile.models import HOSTILE, Library, make
from tests.models.paged_driver import load
from tests.quantization.bitsandbytes_checkpoints import BLOCK_FORMATS, PEAK_FORMATS
from tests.quantization.byte_checkpoints import BYTE_FORMATS
from tests.quantization.coded_checkpoints import FORMATS as PACKED_FORMATS
from tests.quantization.coded_checkpoints import write
from tests.quantization.four_bit_checkpoints import FOUR_BIT_FORMATS, WIDE_EXPERTS, write_experts

NASTY = [
    *(None, True, False, 0, -1, 3, 12, 10**12, 1.5, float("nan"), "", "x", "re:(", [], [None]),
    *(["re:("], ["re:" + "a" * 500], {}, {"a": 1}, {"a": {}}, {"a": {"weights": {}}}),
    *({"-:(": {}}, {"+:.*": {"bits": 3}}, {"+:.*": 7}),
]
FORMATS = PACKED_FORMATS | BYTE_FORMATS | FOUR_BIT_FORMATS | BLOCK_FORMATS | PEAK_FORMATS
AT = "model.layers.1.self_attn.q_proj."


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each kind, written once."""
    root = tmp_path_factory.mktemp("codes")
    source = Library(root)["llama"].folder
    made = {}

    def folder(name):
        if name not in made:
            write(source, root / name, FORMATS[name])
            made[name] = root / name
        return made[name]

    return folder


def spoilt(folder, target, config=None, edit=None):
    """A copy with other keys in `quantization_config` and other tensors."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("plain"))
    whole = json.loads((target / "config.json").read_text())
    whole["quantization_config"] |= config or {}
    (target / "config.json").write_text(json.dumps(whole))
    if edit is not None:
        tensors = load_file(target / "model.safetensors")
        edit(tensors)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return load(target, read_spec(read_config(target)))


@pytest.mark.parametrize(
    "name",
    [
        *("awq", "gptq-v1", "compressed-w4a16", "fp8-blocks", "modelopt", "compressed-int"),
        *("nvfp4", "bitsandbytes-nf4", "bitsandbytes-int8"),
    ],
)
def test_every_value_of_every_key_is_taken_or_refused(name):
    config = FORMATS[name].config
    extra = ("dynamic", "desc_act", "ignore", "config_groups", "kv_cache_scheme", "format")
    for key in dict.fromkeys([*config, *extra, "modules_to_not_convert"]):
        for value in NASTY:
            try:
                storage = read_storage({"quantization_config": {**config, key: value}})
                assert storage is not None
                storage.layout_of("model.layers.0.mlp.up_proj")
            except LoadError as error:
                assert len(str(error)) < 1000
                assert "quantization_config" in str(error)


CONFIGS = {
    "no group": ("gptq-v1", {"group_size": 0}, r"group_size=0 .* -1 or a multiple of 8"),
    "odd group": ("awq", {"group_size": 12}, "group_size=12"),
    "two names": ("awq", {"q_group_size": 32}, "group_size=16.*q_group_size=32"),
    "bits": ("gptq-v1", {"bits": 3}, "bits=3 .*4 or 8"),
    "AWQ of another order": ("awq", {"version": "gemv"}, "version='gemv'"),
    "Marlin": ("gptq-v1", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
    "format": ("compressed-w4a16", {"format": "marlin-24"}, "format='marlin-24'"),
    "sparsity": (
        "compressed-w4a16",
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config",
    ),
    "no groups": ("compressed-w4a16", {"config_groups": {}}, "config_groups"),
    "method": ("awq", {"quant_method": "aqlm"}, "quant_method='aqlm'.*awq"),
    "block": ("fp8-blocks", {"weight_block_size": [128, 4]}, r"block_size=\[128, 4\]"),
    "blocks with static rows": (
        "fp8-blocks",
        {"activation_scheme": "static"},
        "activation_scheme='static'",
    ),
    "four bits and eight": (
        "bitsandbytes-nf4",
        {"load_in_8bit": True, "_load_in_8bit": True},
        "load_in_4bit=True .*false where that is true",
    ),
    "other numbers of four bits": (
        "bitsandbytes-nf4",
        {"bnb_4bit_quant_type": "int4"},
        "bnb_4bit_quant_type='int4' .*'nf4', 'fp4'",
    ),
    "bytes in other types": (
        "bitsandbytes-nf4",
        {"bnb_4bit_quant_storage": "bfloat16"},
        "bnb_4bit_quant_storage='bfloat16' .*'uint8'",
    ),
    "weights of 16 bits": (
        "bitsandbytes-int8",
        {"llm_int8_has_fp16_weight": True},
        "llm_int8_has_fp16_weight=True",
    ),
    "threshold": ("bitsandbytes-int8", {"llm_int8_threshold": -1.0}, "llm_int8_threshold=-1"),
    "other floats": ("fp8-blocks", {"fmt": "e5m2"}, "fmt='e5m2'"),
    "other algorithm": ("modelopt", {"quant_algo": "W4A8_AWQ"}, "quant_algo='W4A8_AWQ'"),
    "keys and values of 4 bits": (
        "modelopt-nvfp4",
        {"kv_cache_quant_algo": "NVFP4"},
        "kv_cache_quant_algo='NVFP4'.*'FP8'",
    ),
    "scales of keys and values": (
        "compressed-float",
        {"kv_cache_scheme": {"num_bits": 4, "type": "float"}},
        r"kv_cache_scheme\.num_bits=4 .*supported: 8\. Take a checkpoint .* or the unquantised one",
    ),
    "floats of 8 bits in small blocks": (
        "mxfp4",
        {"format": "mxfp8-quantized"},
        "weights.num_bits=4 .*supported: 8",
    ),
    "other type": ("compressed-int", {"format": "float-quantized"}, "weights.type='int'"),
    "expression": ("compressed-w4a16", {"ignore": ["re:("]}, "ignore='.*regular expression"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_what_is_not_known_is_refused_by_its_key(case):
    name, keys, says = CONFIGS[case]
    with pytest.raises(LoadError, match=says):
        read_storage({"quantization_config": {**FORMATS[name].config, **keys}})


SLOW = {
    "repeats of repeats": r"(([a-z_.0-9])+)+$!",
    "five of anything": ".*.*.*.*.*x",
    "optional letters": "a?" * 40 + "a" * 40,
    "alternatives that are alike": "(ab|ab)" * 40,
    "alternatives of any": r"(\w|.)" * 22 + "!",
    "lists of classes": r"([^\]]*\.)*x",
    "bounded repeats of a group": "(a|aa){40}x",
    "repeats behind a space": r"(?x)(\w|.) +!",
    "repeats behind a remark": "(?x)(\\w|.)#\n+!",
    "a remark with a bracket": r"(?#[)(\w|.)+!]",
    "any character or none": ".?" * 26 + "!",
    "nothing, many times": "((){9999}){9999}!",
    "repeats in what looks ahead": r"(?!(\w|.)+!)",
    "four of anything": ".*.*.*.*!",
    "four of anything before the end": ".*.*.*[a-z.]*$",
    "four of anything, lazily": ".*?.*?.*?.{0,9}$",
    "ranges that take long to compile": r"[a-\uffff]b",
    "letters of both cases": "(?i)[\0-\U0010ffff]",
    "letters of both cases in a group": "(?i:[\0-\U0010ffff])",
    "nested groups": "(" * 199 + ")" * 199 + "*",
}


@pytest.mark.parametrize("case", SLOW)
def test_expressions_that_could_search_without_end_are_refused(case):
    for name, keys in (
        ("gptq-v1", {"dynamic": {f"-:{SLOW[case]}": {}}}),
        ("compressed-w4a16", {"ignore": ["lm_head", f"re:{SLOW[case]}"]}),
    ):
        with pytest.raises(LoadError, match="regular expressions of at most 400 characters with"):
            read_storage({"quantization_config": {**FORMATS[name].config, **keys}})


@pytest.mark.parametrize(
    ("expression", "is_meant"),
    [
        (r".*\.(up|gate)_proj", True),
        (r"model\.layers\.\d{1,2}\.(mlp|attn)\..*", True),
        (r"model\.layers\.([0-3]|1\d)\.(?:mlp\.)?up_proj$", True),
        (r"^(?!.*mlp)(?!.*head).*", False),
        (r".*layers.*mlp.*up.*proj", True),
        (r"(?:.*\.)?mlp\.(?:gate|up)_proj", True),
        (r"model\.(?:layers\.)+\d+.*", True),
        (r".*\.(?:[0-9]|1[0-8])\..*(?:gate|up|down).*", True),
        (r"^((?!mlp).)*$", False),
        (r"[)*+]+up|\)*model", True),
        ("model.layers.(" + "|".join(map(str, range(1, 100))) + r")\..*", False),
    ],
)
def test_expressions_as_tools_write_them_are_taken(expression, is_meant):
    config = FORMATS["compressed-w4a16"].config | {"ignore": [f"re:{expression}"]}
    storage = read_storage({"quantization_config": config})
    assert (storage.layout_of("model.layers.0.mlp.up_proj") is None) == is_meant


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        (["re:a"] * 1001, "at most 1000 regular expressions"),
        (["re:.*.*.*a"] * 33, "regular expressions of at most"),
        (["a"] * 100_001, "a list of at most 100000 names"),
    ],
    ids=["expressions", "slow ones", "names"],
)
def test_lists_without_end_are_refused(listed, says):
    config = FORMATS["compressed-w4a16"].config | {"ignore": listed}
    with pytest.raises(LoadError, match=says) as caught:
        read_storage({"quantization_config": config})
    assert len(str(caught.value)) < 1000


def test_groups_share_the_time_that_expressions_may_take():
    config = json.loads(json.dumps(FORMATS["compressed-w4a16"].config))
    own = config["config_groups"]["group_0"] | {"targets": ["re:.*.*.*a"]}
    for count, is_taken in ((20, True), (33, False)):
        config["config_groups"] = {f"group_{i}": own for i in range(count)}
        try:
            read_storage({"quantization_config": config})
            assert is_taken
        except LoadError as error:
            assert not is_taken and "regular expressions of at most" in str(error)


def test_the_expressions_of_a_large_config_are_taken():
    """One for each layer and part, as tools write them."""
    parts = [r"re:.*\.{}\..*(?:gate|up|down).*", r"re:model\.layers\.{}\.self_attn\.q_proj$"]
    listed = [part.format(layer) for layer in range(100) for part in parts]
    config = FORMATS["compressed-w4a16"].config | {"ignore": listed}
    storage = read_storage({"quantization_config": config})
    assert storage.layout_of("model.layers.99.mlp.up_proj") is None
    assert storage.layout_of("model.layers.99.self_attn.k_proj") is not None


def test_activations_in_integers_are_refused():
    config = json.loads(json.dumps(FORMATS["compressed-w4a16"].config))
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    with pytest.raises(LoadError, match="group_0.input_activations"):
        read_storage({"quantization_config": config})


SCHEMES = {
    "input_activations": [
        {"symmetric": False},
        {"dynamic": "local"},
        {"type": "float"},
        {"num_bits": 4},
        {"strategy": "channel"},
        {"dynamic": False},
    ],
    "weights": [
        {"symmetric": False},
        {"strategy": "block"},
        {"actorder": "group"},
    ],
}


@pytest.mark.parametrize("part", SCHEMES)
def test_other_schemes_of_bytes_are_refused_by_their_key(part):
    for keys in SCHEMES[part]:
        config = json.loads(json.dumps(FORMATS["compressed-int"].config))
        config["config_groups"]["group_0"][part] |= keys
        with pytest.raises(LoadError, match=f"group_0.{part}"):
            read_storage({"quantization_config": config})


def test_an_unknown_key_is_named():
    config = {**FORMATS["awq"].config, "wish": 1}
    with pytest.raises(UnknownConfigKey, match=r"quantization_config\.wish"):
        read_storage({"quantization_config": config})


def set_value(part, value, at=(0, 0)):
    def edit(tensors):
        tensors[AT + part][at] = value

    return edit


def replaced(part, change):
    def edit(tensors):
        tensors[AT + part] = change(tensors[AT + part])

    return edit


def taken(part):
    return lambda tensors: tensors.pop(AT + part)


TENSORS = {
    "NaN scale": ("awq", set_value("scales", float("nan")), CorruptCheckpoint, "q_proj.* scale"),
    "NaN weight": (
        "fp8-blocks",
        replaced(
            "weight",
            lambda t: t.view(torch.uint8).index_fill(0, torch.tensor(3), 255).view(t.dtype),
        ),
        CorruptCheckpoint,
        "q_proj.weight has NaN among its numbers",
    ),
    "scale of rows": (
        "modelopt",
        set_value("input_scale", -1.0, ...),
        CorruptCheckpoint,
        "q_proj.input_scale is -1",
    ),
    "endless rows": (
        "fp8-static",
        set_value("input_scale", float("nan"), ...),
        CorruptCheckpoint,
        "q_proj.input_scale is nan",
    ),
    "plain numbers": (
        "fp8-blocks",
        replaced("weight", torch.Tensor.float),
        LoadError,
        "q_proj.weight is stored as F32",
    ),
    "no scales": (
        "fp8-blocks",
        taken("weight_scale_inv"),
        LoadError,
        "q_proj.weight is stored as F8_E4M3, and there is no .*q_proj.weight_scale_inv",
    ),
    "exponents of whole numbers": (
        "compressed-int",
        replaced("weight_scale", lambda t: t.to(torch.float8_e8m0fnu)),
        LoadError,
        "weight_scale is stored as F8_E8M0, and config.json says that it is a part of a quantised",
    ),
    "endless exponent of a block": (
        "fp8-blocks-of-exponents",
        replaced(
            "weight_scale_inv",
            lambda t: t.view(torch.uint8).index_fill(0, torch.tensor(0), 255).view(t.dtype),
        ),
        CorruptCheckpoint,
        "q_proj has a scale that is not a finite number",
    ),
    "one scale": (
        "fp8-blocks",
        replaced("weight_scale_inv", lambda t: t[:1, :1].clone()),
        WeightMismatch,
        r"wrong shape .*q_proj.weight_scale_inv \[1, 1\] instead of \[3, 3\]",
    ),
    "endless scale": (
        "compressed-w4a16",
        set_value("weight_scale", float("inf")),
        CorruptCheckpoint,
        "q_proj has a scale that is not a finite number",
    ),
    "group that is none": (
        "gptq-v2-act_order",
        set_value("g_idx", 9, 0),
        CorruptCheckpoint,
        r"q_proj has groups \(g_idx\)",
    ),
    "negative group": ("gptq-v1", set_value("g_idx", -1, 0), CorruptCheckpoint, "g_idx"),
    "lying shape": (
        "compressed-w4a16",
        set_value("weight_shape", 10**12, 0),
        CorruptCheckpoint,
        r"weight_shape is \[1000000000000, 64\]",
    ),
    "shape": (
        "awq",
        replaced("qzeros", lambda t: t[:1].clone()),
        WeightMismatch,
        r"wrong shape .*q_proj.qzeros \[1, 12\] instead of \[4, 12\]",
    ),
    "missing": ("gptq-v1", taken("qzeros"), WeightMismatch, "missing .*q_proj.qzeros"),
    "missing order": (
        "gptq-v2-act_order",
        taken("g_idx"),
        WeightMismatch,
        "missing .*q_proj.g_idx",
    ),
    "type": (
        "awq",
        replaced("qweight", torch.Tensor.float),
        LoadError,
        "q_proj.qweight is stored as F32",
    ),
    "endless exponent": (
        "mxfp4",
        set_value("weight_scale", 255),
        CorruptCheckpoint,
        "q_proj has a scale that is not a finite number",
    ),
    "factor of zero": (
        "nvfp4",
        set_value("weight_global_scale", 0.0, 0),
        CorruptCheckpoint,
        "q_proj has a scale that is not a finite number",
    ),
    "endless magnitude": (
        "bitsandbytes-int8",
        set_value("SCB", float("inf"), 3),
        CorruptCheckpoint,
        "q_proj has a scale that is not a finite number",
    ),
    "order of an old GPU": (
        "bitsandbytes-int8",
        set_value("weight_format", 2, ...),
        LoadError,
        "q_proj.weight_format is not 0",
    ),
    "blocks of another size": (
        "bitsandbytes-nf4",
        replaced("weight.absmax", lambda t: t[::2].clone()),
        WeightMismatch,
        r"wrong shape .*q_proj.weight.absmax \[48\] instead of \[96\]",
    ),
    "table": (
        "bitsandbytes-nf4",
        set_value("weight.quant_map", float("nan"), 3),
        CorruptCheckpoint,
        "q_proj.weight.quant_map has a number that is not finite",
    ),
    "scales of scales": (
        "bitsandbytes-nf4-nested",
        set_value("weight.nested_absmax", float("nan"), 0),
        CorruptCheckpoint,
        "q_proj has a scale that is not a finite number",
    ),
    "scales that are not nested": (
        "bitsandbytes-nf4-nested",
        replaced("weight.absmax", torch.Tensor.float),
        LoadError,
        "q_proj.weight.absmax is stored as F32",
    ),
    "codes of what is ignored": (
        "compressed-w4a16",
        lambda t: t.update({"lm_head.weight_packed": t[AT + "weight_packed"].clone()}),
        WeightMismatch,
        "unknown lm_head.weight_packed",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_broken_tensor_is_one_clear_error(folders, tmp_path, case):
    name, edit, kind, says = TENSORS[case]
    with pytest.raises(kind, match=says) as caught:
        spoilt(folders(name), tmp_path / "model", edit=edit)
    assert len(str(caught.value)) < 800


EXPERTS = {
    "scales": (lambda t: None, r"missing model\.layers\.0\.mlp\.experts\.down_proj_scales"),
    "blocks": (lambda t: t[:, :-1].clone(), r"wrong shape .*down_proj_blocks \[4, 63, 3, 16\]"),
}


@pytest.mark.parametrize("part", EXPERTS)
def test_broken_experts_of_gpt_oss_are_one_clear_error(tmp_path, part):
    change, says = EXPERTS[part]
    hostile = dataclasses.replace(HOSTILE["gpt_oss"], keys=HOSTILE["gpt_oss"].keys | WIDE_EXPERTS)
    source = make(hostile, tmp_path / "source").folder
    write_experts(source, tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    name = f"model.layers.0.mlp.experts.down_proj_{part}"
    changed = change(tensors.pop(name))
    tensors |= {} if changed is None else {name: changed}
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMismatch, match=says):
        load(tmp_path / "model", read_spec(read_config(tmp_path / "model")))


def test_another_group_than_the_files_have(folders, tmp_path):
    with pytest.raises(WeightMismatch, match="wrong shape"):
        spoilt(folders("awq"), tmp_path / "model", config={"group_size": 32})
