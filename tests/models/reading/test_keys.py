"""The rule for keys of config.json: known, neutral, foreign, unmet."""

import json

import pytest
import torch
import transformers
from reference_keys import TABLE, entry_of, made_table, text_of
from transformers import AutoConfig, AutoModelForCausalLM

from quire.errors import LoadError, UnknownConfigKey
from quire.models import find_family
from quire.models.config_reader import ConfigReader
from quire.models.families import read_spec, read_with_foreign
from quire.models.reading.listed import NEUTRAL
from quire.models.reading.reference import reference_of
from tests.models.hostile.models import HOSTILE, class_of, config_of, keys_of, random_model
from tests.models.paged_driver import TOLERANCE, relative_error
from tests.models.test_mutations import other_values

SHARP = ("llama", "qwen3_moe", "gemma4", "falcon_h1", "deepseek_v3", "exaone")
"""Models of the default run; the others with `--full`."""

OF_BUFFERS = {"block_size"}
"""Sizes of tables that transformers' modules keep with their weights (MiniMax)."""

OF_OUTPUTS = ("return_dict", "output_hidden_states", "output_attentions", "dtype", "torch_dtype")
"""Keys with which transformers' call returns something else than logits of the same type."""


def some(names):
    return [pytest.param(name, marks=[] if name in SHARP else [pytest.mark.full]) for name in names]


def reference_for(config):
    return reference_of(config["architectures"], config["model_type"])


def foreign_in(config):
    return {".".join(key.path): key.value for key in read_with_foreign(config)[1]}


REFERENCED = [name for name, hostile in HOSTILE.items() if reference_for(config_of(hostile))]
stored = json.loads(TABLE.read_text())
same_version = pytest.mark.skipif(
    transformers.__version__ != stored["transformers"], reason="the table is of another version"
)


@same_version
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text", "hunyuan_v1_moe", "dbrx"])
def test_the_table_is_what_transformers_reads(kind):
    assert entry_of(kind) == stored["models"][kind], "run tools/reference_keys.py"


@same_version
@pytest.mark.full
def test_the_whole_table_is_up_to_date():
    assert text_of(made_table()) == TABLE.read_text(), "run tools/reference_keys.py"


def test_what_the_table_says_of_llama():
    llama = reference_of(["LlamaForCausalLM"])
    assert llama.keys["mlp_bias"] is False and llama.keys["rms_norm_eps"] == 1e-6
    assert llama.lacks(("use_qk_norm",), None)
    assert not llama.lacks(("rope_scaling", "beta_fast"), "yarn")
    assert llama.lacks(("rope_scaling", "beta_fast"), "linear")
    deepseek = reference_of(["DeepseekV3ForCausalLM"], "kimi_k2")
    assert deepseek.kind == "deepseek_v3"
    assert not deepseek.lacks(("rope_scaling", "mscale_all_dim"), "default")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_foreign_key_is_listed_or_silent_or_refused(name):
    config = config_of(HOSTILE[name])
    spec = read_spec(config)
    planted = {**config, "planted_key": [3]}
    if reference_for(config) is None:
        for value in ([3], False, 0, ""):
            with pytest.raises(UnknownConfigKey, match="planted_key="):
                read_spec({**config, "planted_key": value})
        return
    assert foreign_in(planted) == {"planted_key": [3]}
    assert read_spec(planted) == spec
    for nothing in (None, False, 0, "", [], {}):
        assert foreign_in({**config, "planted_key": nothing}) == {}
    own = {"AutoModelForCausalLM": f"modeling.{config['architectures'][0]}"}
    with pytest.raises(UnknownConfigKey, match="planted_key="):
        read_spec({**planted, "auto_map": own})
    assert read_spec({**config, "auto_map": own}) == spec


def is_read(config, key):
    """Whether the family reads a key, or a list has it."""
    reader = ConfigReader({**config, key: [0.5]})
    try:
        find_family(config).describe(reader)
    except LoadError:
        return True
    return (key,) not in {left.path for left in reader.left()}


@pytest.mark.parametrize("name", REFERENCED)
def test_a_key_of_the_reference_is_neutral_at_its_default_alone(name):
    config = config_of(HOSTILE[name])
    spec = read_spec(config)
    for key, default in reference_for(config).keys.items():
        if "." in key or key in NEUTRAL or is_read(config, key):
            continue
        if default is not None:
            assert read_spec({**config, key: default}) == spec, f"{key}={default}"
        for value in {True, False, 7, "", "other"} - {default}:
            with pytest.raises(UnknownConfigKey, match=f"{key}="):
                read_spec({**config, key: value})


def test_unmet_keys_stand_in_one_sentence_with_an_override():
    config = config_of(HOSTILE["llama"])
    unmet = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 2}
    with pytest.raises(UnknownConfigKey) as caught:
        read_spec({**config, **unmet, "planted_key": 1})
    text = str(caught.value)
    assert 'layer_types=["sliding_attention", "sliding_attention"], sliding_window=4.' in text
    removal = json.loads(text.partition("hf_overrides=")[2].rstrip("."))
    assert removal == {"sliding_window": None, "layer_types": None}
    assert read_spec({**config, **unmet, **removal}) == read_spec(config)


def logits_of(config_keys, hostile, state):
    """transformers' logits with these keys and weights; None where it fails with the keys."""
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(hostile.kind, **config_keys, attn_implementation="eager")
        kind = class_of(hostile)
        model = kind.from_config(config) if kind is AutoModelForCausalLM else kind(config)
        model = model.eval().float()
    except Exception:
        return None
    try:
        model.load_state_dict(state)
    except RuntimeError:
        return torch.full((1, 21, 96), torch.inf)  # other tensors
    prompt = torch.randint(3, 90, (1, 21), generator=torch.Generator().manual_seed(7))
    try:
        with torch.no_grad():
            return model(prompt, use_cache=False).logits
    except (IndexError, TypeError):  # of layers that the keys of this model do not describe
        return None


@pytest.mark.parametrize("name", some(REFERENCED))
def test_what_moves_the_logits_of_transformers_is_noticed(name):
    hostile = HOSTILE[name]
    config, keys, spec = config_of(hostile), keys_of(hostile), read_spec(config_of(hostile))
    model = random_model(hostile)
    state = model.state_dict()
    usual = logits_of(keys, hostile, state)
    assert usual is not None
    reference = reference_for(config)
    moved, tried = [], 0
    others = {*OF_OUTPUTS, *OF_BUFFERS, *reference.aliases}
    for key in sorted({*reference.keys, *keys} - others):
        value = keys.get(key, reference.keys.get(key))
        for other in other_values(value):
            try:
                if read_spec({**config, key: other}) != spec:
                    continue
            except LoadError:
                continue
            found = logits_of({**keys, key: other}, hostile, state)
            tried += 1
            if found is not None and relative_error([found], [usual]) > TOLERANCE:
                moved.append((key, other))
    assert tried > 5, "some keys change nothing"
    assert not moved
