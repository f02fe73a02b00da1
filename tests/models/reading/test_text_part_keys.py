"""The rule for keys of config.json, for texts of models with pictures: see test_keys.py."""

import json

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from quire.errors import LoadError, UnknownConfigKey
from quire.models.families import find_family, read_spec, read_with_foreign
from quire.models.reading.listed import NEUTRAL
from quire.models.reading.reference import reference_of_kind
from quire.models.reading.text_part import PART, text_part
from tests.models.hostile.models import HOSTILE, keys_of
from tests.models.paged_driver import TOLERANCE, relative_error
from tests.models.reading.test_keys import OF_OUTPUTS, is_read
from tests.models.test_mutations import other_values
from tests.models.test_text_parts import VISION
from tests.models.vision.spoken_models import SPOKEN
from tests.models.vision.wholes import PIXTRAL, TEXT, Whole

WHOLES = {
    **{
        name: SPOKEN[name].whole
        for name in ("glm4v", "glm_ocr", "glm4v_moe", "paddleocr_vl", "qwen3_vl_moe")
    },
    "mistral_large4": SPOKEN["mistral_large4"].whole,
    "mistral4": Whole(
        "mistral3",
        PIXTRAL,
        text=keys_of(HOSTILE["mistral4"]) | {"model_type": "mistral4", "head_dim": 28},
    ),
    "minimax_m3": Whole(
        "minimax_m3_vl", VISION | {"num_channels": 1}, text=keys_of(HOSTILE["minimax_m3"])
    ),
}
WHOLES["minimax_m3"].text.pop("final_logit_softcapping", None)
OF_FILES = ("tie_word_embeddings",)
"""Next to a false one of the whole, what weights the files have decides it in transformers."""
ARCHITECTURES = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def config_of(name, **changes):
    """A config.json with changes to its text."""
    whole = WHOLES[name]
    return {
        "model_type": whole.kind,
        "architectures": [ARCHITECTURES[whole.kind]],
        "text_config": {**TEXT, **whole.text, **changes},
        "vision_config": dict(whole.vision),
        "tie_word_embeddings": False,
        **whole.keys,
    }


def text_of(name, **changes):
    return text_part(config_of(name, **changes))


def reference_for(name):
    return reference_of_kind(text_of(name)["model_type"])


def foreign_in(config):
    return {key.path: key.value for key in read_with_foreign(config)[1]}


def test_these_are_the_families_that_no_other_model_has():
    found = {a for name in WHOLES for a in find_family(text_of(name)).architectures}
    for hostile in HOSTILE.values():
        found -= {hostile.architecture} if hostile.whole is None else set()
    assert {"Glm4vTextModel", "GlmOcrTextModel", "Glm4vMoeTextModel"} <= found
    assert {"PaddleOCRTextModel", "Qwen3VLMoeTextModel", "MiniMaxM3SparseForCausalLM"} <= found
    assert all(reference_for(name) is not None for name in WHOLES)


@pytest.mark.parametrize("name", WHOLES)
def test_a_foreign_key_is_listed_or_silent_or_refused(name):
    spec, usual = read_spec(text_of(name)), foreign_in(text_of(name))
    planted = text_of(name, planted_key=[3])
    assert foreign_in(planted) == usual | {("text_config", "planted_key"): [3]}
    assert read_spec(planted) == spec
    for nothing in (None, False, 0, "", [], {}):
        assert foreign_in(text_of(name, planted_key=nothing)) == usual
    own = {"AutoModel": f"modeling.{planted['architectures'][0]}"}
    with pytest.raises(UnknownConfigKey, match=r"text_config\.planted_key="):
        read_spec({**planted, "auto_map": own})


@pytest.mark.parametrize("name", WHOLES)
def test_a_key_of_the_reference_is_neutral_at_its_default_alone(name):
    spec, tried = read_spec(text_of(name)), 0
    for key, default in reference_for(name).keys.items():
        if "." in key or key in (*NEUTRAL, PART) or is_read(text_of(name), key):
            continue
        if default is not None:
            assert read_spec(text_of(name, **{key: default})) == spec, f"{key}={default}"
        for value in {True, False, 7, "", "other"} - {default}:
            tried += 1
            with pytest.raises(UnknownConfigKey, match=f"{key}="):
                read_spec(text_of(name, **{key: value}))
    assert tried


def model_of(config):
    given = json.loads(json.dumps(config))
    loaded = AutoConfig.for_model(given.pop("model_type"), **given, attn_implementation="eager")
    kind = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(loaded)]
    torch.manual_seed(0)
    return kind(loaded).eval().float()


def logits_of(config, state):
    """transformers' logits with this config and weights; None where it fails with it."""
    try:
        model = model_of(config)
    except Exception:  # of whatever class
        return None
    try:
        model.load_state_dict(state)
    except RuntimeError:
        return torch.full((1, 21, TEXT["vocab_size"]), torch.inf)  # other tensors
    prompt = torch.randint(4, 38, (1, 21), generator=torch.Generator().manual_seed(7))
    try:
        with torch.no_grad():
            return model(prompt, use_cache=False).logits
    except (IndexError, TypeError, RuntimeError, KeyError):
        return None


@pytest.mark.full
@pytest.mark.parametrize("name", WHOLES)
def test_what_moves_the_logits_of_transformers_is_noticed(name):
    spec, reference, model = (
        read_spec(text_of(name)),
        reference_for(name),
        model_of(config_of(name)),
    )
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn_like(value) * 0.3)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    usual = logits_of(config_of(name), state)
    assert usual is not None and usual.isfinite().all()
    given, moved, tried = config_of(name)["text_config"], [], 0
    others = {*OF_OUTPUTS, *OF_FILES, *reference.aliases, "model_type"}
    for key in sorted({*reference.keys, *given} - others):
        for other in other_values(given.get(key, reference.keys.get(key))):
            try:
                if read_spec(text_of(name, **{key: other})) != spec:
                    continue
            except LoadError:
                continue
            found = logits_of(config_of(name, **{key: other}), state)
            tried += 1
            if found is not None and relative_error([found], [usual]) > TOLERANCE:
                moved.append((key, other))
    assert tried > 3, "some keys change nothing"
    assert not moved
