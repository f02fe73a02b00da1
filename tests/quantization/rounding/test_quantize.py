"""Rounding by kind and by name while a model is loaded, and the checkpoints of `quire quantize`."""

import json

import pytest
import torch
from safetensors.torch import load_file

from quire.cli import main
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import make_plan
from quire.errors import InvalidParameter
from quire.models import read_spec
from quire.models.config_reader import read_config
from quire.models.formats import read_storage
from quire.models.formats.rounding_rules import RoundingRules, read_rounding_rules
from quire.models.loading.options import ModelOptions
from quire.models.loading.rounding.quantized_files import write_quantized
from quire.models.loading.rounding.recipes import recipe_of
from quire.models.loading.separate_products import SeparateLinear
from quire.models.loading.weights import load_model
from quire.ops import select
from quire.testing import make_checkpoint
from tests.models.hostile.models import Library
from tests.models.paged_driver import PagedRun

NATIVE = select(device="cpu", dtype=torch.float32)
OPS = select(device="cpu", dtype=torch.float32, providers=["torch"])


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("plain"))


def rules_of(quantization="online", **config):
    return read_rounding_rules(quantization, config)


def loaded(folder, rules=None, ops=NATIVE):
    config = read_config(folder)
    options = ModelOptions(recipe=recipe_of("online" if rules else None, rules))
    spec = read_spec(config)
    return load_model(folder, spec, ops, dtype=torch.float32, max_model_len=64, options=options)


def logits(made, model, ops=NATIVE):
    run = PagedRun(model, made.prompts, ops=ops)
    return torch.cat(list(run.step([len(p) for p in made.prompts]).values()))


def write(made, target, rules, most_bytes=1 << 30):
    return write_quantized(
        made.folder, read_config(made.folder), rules, target, most_bytes=most_bytes
    )


MIXED = {
    "linear": "int8",
    "moe": "int8",
    "head": "int8",
    "ignore": ["o_proj"],
    "targets": {"re:.*layers.0.*k_proj": "int4", "re:.*layers.1.*down_proj": None},
}
EXACT = {
    "int8": {"linear": "int8", "moe": "int8"},
    "int8-head": {"linear": "int8", "moe": "int8", "head": "int8"},
    "int4": {"linear": "int4", "moe": "int4"},
    "int4_g64": {"linear": "int4_g64", "moe": "int4_g64"},
    "mixed": MIXED,
}
NEAR = {
    "int8_weight_only": {"linear": "int8_weight_only", "moe": "int8_weight_only"},
    "int4_weight_only": {"linear": "int4_weight_only", "moe": "int4_weight_only"},
}


@pytest.mark.parametrize("config", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("ops", [NATIVE, OPS], ids=["native", "torch"])
def test_a_written_checkpoint_gives_the_bits_of_rounding_at_load(
    library, tmp_path, name, config, ops
):
    made, rules = library[name], rules_of(**config)
    write(made, tmp_path / "model", rules)
    found = logits(made, loaded(tmp_path / "model", ops=ops), ops)
    assert torch.equal(found, logits(made, loaded(made.folder, rules, ops), ops))
    assert not torch.equal(found, logits(made, loaded(made.folder, ops=ops), ops))


@pytest.mark.parametrize("config", NEAR.values(), ids=NEAR)
@pytest.mark.parametrize("ops", [NATIVE, OPS], ids=["native", "torch"])
def test_weights_alone_have_the_same_numbers(library, tmp_path, config, ops):
    """Their products are added in another order by native kernels, in fp32."""
    made, rules = library["llama"], rules_of(**config)
    write(made, tmp_path / "model", rules)
    found = logits(made, loaded(tmp_path / "model", ops=ops), ops)
    expected = logits(made, loaded(made.folder, rules, ops), ops)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - logits(made, loaded(made.folder, ops=ops), ops)).abs().max() > 1e-2


def test_rules_reach_the_modules_that_they_name(library):
    model = loaded(library["llama"].folder, rules_of(**MIXED))
    forms = {}
    for name, part in model._parts:
        parts = part.parts if isinstance(part, SeparateLinear) else (part,)
        forms[name] = [getattr(each, "form", None) for each in parts]
    assert forms["layers.0.attn.qkv"] == ["int8", "int4", "int8"]
    assert forms["layers.1.attn.qkv"] == ["int8"]
    assert forms["layers.0.attn.o"] == forms["layers.1.attn.o"] == ["plain"]
    assert forms["layers.0.mlp.down"] == ["int8"]
    assert forms["layers.1.mlp.down"] == ["plain"]
    assert forms["head"] == ["int8"]


def test_a_tied_head_that_is_rounded_is_written_as_its_own(tmp_path):
    tied = {"tie_word_embeddings": True}
    source = make_checkpoint(tmp_path / "source", tied, dtype="float32")
    config = read_config(source)
    assert config["tie_word_embeddings"]
    for head in (None, "int8"):
        target = tmp_path / str(head)
        rules = rules_of(linear="int8", head=head)
        write_quantized(source, config, rules, target, most_bytes=1 << 30)
        changed = read_config(target)
        assert changed["tie_word_embeddings"] == (head is None)
        assert ("lm_head" in changed["quantization_config"]["ignore"]) == (head is None)
        tensors = load_file(target / "model.safetensors")
        assert ("lm_head.weight" in tensors) == (head is not None)
        loaded(target)


def test_a_checkpoint_is_written_file_by_file(library, tmp_path):
    made, rules = library["llama"], rules_of(linear="int4_weight_only")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    one = write(made, whole, rules)
    several = write(made, parts, rules, most_bytes=20_000)
    assert one.files == 1 < several.files
    index = json.loads((parts / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(index.values()))
    assert len(files) == several.files == len(list(parts.glob("*.safetensors")))
    tensors = {name: load_file(parts / file)[name] for name, file in index.items()}
    assert not list(parts.glob("*.part"))
    expected = load_file(whole / "model.safetensors")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert one.written_bytes == several.written_bytes < one.read_bytes


def test_the_command_keeps_the_head_unless_it_is_named(library, tmp_path, capsys):
    folder = str(library["llama"].folder)
    target = tmp_path / "model"
    assert main.main(["quantize", folder, "--out", str(target), "-q", "int4"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["folder"] == str(target) and said["written_bytes"] < said["read_bytes"]
    stored = json.loads((target / "config.json").read_text())["quantization_config"]
    assert stored["ignore"] == ["lm_head"]
    [group] = stored["config_groups"].values()
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (4, 32)
    assert main.main(["quantize", folder, "--out", str(target)]) == 2
    assert "a folder that is new or empty" in capsys.readouterr().err
    assert main.main(["quantize", str(target), "--out", str(tmp_path / "again")]) == 2
    assert "a checkpoint that is not quantised" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("quantization", "config", "message"),
    [
        ("int8", {"linear": "int9"}, r"quantization_config\['linear'\]='int9'"),
        ("int8", {"conv": "int8"}, "quantization_config=.'conv'."),
        ("int8", {"ignore": "lm_head"}, r"quantization_config\['ignore'\]='lm_head'"),
        ("int8", {"targets": {"a": "awq"}}, r"quantization_config\['a'\]='awq'"),
        ("int8", {"ignore": ["re:(.*.*)*x"]}, "regular expressions"),
        ("online", {}, "quantization='online'"),
        ("online", {"linear": None}, "at least one kind"),
    ],
)
def test_other_rules_are_refused_by_name(quantization, config, message):
    with pytest.raises(InvalidParameter, match=message):
        read_rounding_rules(quantization, config)


def test_the_first_rule_that_names_a_module_counts():
    config = {"ignore": ["q_proj"], "targets": {"re:a.*": "int4", "k_proj": "int8"}, "moe": None}
    scheme_of = read_rounding_rules("int8", config).scheme_finder()
    assert scheme_of("linear", "a.q_proj") is None
    assert scheme_of("linear", "a.k_proj") == "int4"
    assert scheme_of("linear", "b.xk_proj") == scheme_of("linear", "b.k_proj") == "int8"
    assert scheme_of("moe", "b.c") is None


def test_the_plan_counts_what_is_rounded(tmp_path):
    folder = str(make_checkpoint(tmp_path, "tiny", dtype="float32"))

    def planned(**options):
        args = EngineArgs(model=folder, skip_tokenizer_init=True, dtype="float32", **options)
        return make_plan(args)

    plain, whole = planned(), planned(quantization="int8")
    ruled = planned(quantization="int8", quantization_config={"ignore": ["re:.*mlp.*"]})
    assert whole.model.weight_bytes < ruled.model.weight_bytes < plain.model.weight_bytes
    assert ruled.model.rounding_rules == RoundingRules(
        "int8", "int8", "int8", (("re:.*mlp.*", None),)
    )
    online = planned(quantization="online", quantization_config={"head": "int8"})
    assert online.model.quantization == "online"
    with pytest.raises(InvalidParameter, match="quantization='online'"):
        planned(quantization="online")


def test_a_quantised_checkpoint_takes_no_rules(library, tmp_path):
    write(library["llama"], tmp_path / "model", rules_of(linear="int8"))
    assert read_storage(read_config(tmp_path / "model")).method == "compressed-tensors"
    args = EngineArgs(model=str(tmp_path / "model"), skip_tokenizer_init=True)
    args.quantization_config = {"linear": "int8"}
    with pytest.raises(InvalidParameter, match="quantization_config=.*quantised already"):
        make_plan(args)
