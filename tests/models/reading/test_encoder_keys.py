"""The rule for keys of config.json, for families that only pool: see test_keys.py."""

import pytest
import torch
import transformers

from quire.errors import LoadError, UnknownConfigKey
from quire.models.families import read_spec, read_with_foreign
from quire.models.reading.listed import NEUTRAL
from tests.models.hostile.encoders import ENCODERS, ask, random_encoder
from tests.models.paged_driver import TOLERANCE, relative_error
from tests.models.reading.test_keys import OF_OUTPUTS, is_read, reference_for
from tests.models.test_mutations import other_values

FORMS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
BARE = [
    name
    for name, hostile in ENCODERS.items()
    if not hostile.model.endswith("ForPreTraining")
    and not name.endswith(FORMS)
    and hostile.architecture is None
]
"""One model of each family that transformers has under its name, and of some forms."""
SHARP = ("BertModel", "NomicBertModel", "ModernBertModel", "T5EncoderModel")
"""Those of the default run of the longest test; the others with `--full`."""
OF_TRAINING = {"torch_dtype", "dtype", "problem_type", *OF_OUTPUTS}


def config_of(name):
    hostile = ENCODERS[name]
    kind = getattr(transformers, hostile.config).model_type
    names = [hostile.architecture or hostile.model]
    return {"model_type": kind, "architectures": names, **hostile.keys}


@pytest.mark.parametrize("name", BARE)
def test_a_foreign_key_is_listed_or_silent_or_refused(name):
    config = config_of(name)
    spec, planted = read_spec(config), {**config, "planted_key": [3]}
    assert reference_for(config) is not None
    listed = {key.path: key.value for key in read_with_foreign(planted)[1]}
    assert listed[("planted_key",)] == [3] and read_spec(planted) == spec
    for nothing in (None, False, 0, "", [], {}):
        found = read_with_foreign({**config, "planted_key": nothing})[1]
        assert ("planted_key",) not in {key.path for key in found}
    own = {"AutoModel": f"modeling.{config['architectures'][0]}"}
    with pytest.raises(UnknownConfigKey, match="planted_key="):
        read_spec({**planted, "auto_map": own})


@pytest.mark.parametrize("name", BARE)
def test_a_key_of_the_reference_is_neutral_at_its_default_alone(name):
    config = config_of(name)
    spec, tried = read_spec(config), 0
    for key, default in reference_for(config).keys.items():
        if "." in key or key in NEUTRAL or is_read(config, key):
            continue
        if default is not None:
            assert read_spec({**config, key: default}) == spec, f"{key}={default}"
        for value in {True, False, 7, "", "other"} - {default}:
            tried += 1
            with pytest.raises(UnknownConfigKey, match=f"{key}="):
                read_spec({**config, key: value})
    assert tried or name in ALL_READ


ALL_READ: tuple[str, ...] = ()
"""Families that read all keys of their reference."""


def hidden_of(name, keys, state):
    """transformers' hidden states with these keys and weights; None where it fails with them."""
    hostile = ENCODERS[name]
    torch.manual_seed(0)
    try:
        config = getattr(transformers, hostile.config)(**keys, attn_implementation="eager")
        model = getattr(transformers, hostile.model)(config).eval().float()
    except Exception:  # of whatever class
        return None
    try:
        model.load_state_dict(state)
    except RuntimeError:
        return torch.full((21, 64), torch.inf)  # other tensors
    prompt = torch.randint(4, 90, (21,), generator=torch.Generator().manual_seed(7)).tolist()
    try:
        return ask(model, prompt, 9 if hostile.has_types else None)[0]
    except (IndexError, TypeError, AttributeError):
        return None


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SHARP else [pytest.mark.full]) for n in BARE]
)
def test_what_moves_the_states_of_transformers_is_noticed(name):
    config, keys = config_of(name), ENCODERS[name].keys
    spec, state = read_spec(config), random_encoder(ENCODERS[name]).state_dict()
    usual, reference = hidden_of(name, keys, state), reference_for(config)
    assert usual is not None and usual.isfinite().all()
    moved, tried = [], 0
    for key in sorted({*reference.keys, *keys} - {*OF_TRAINING, *reference.aliases}):
        for other in other_values(keys.get(key, reference.keys.get(key))):
            try:
                if read_spec({**config, key: other}) != spec:
                    continue
            except LoadError:
                continue
            found = hidden_of(name, {**keys, key: other}, state)
            tried += 1
            if found is not None and relative_error([found], [usual]) > TOLERANCE:
                moved.append((key, other))
    assert tried > 3, "some keys change nothing"
    assert not moved
