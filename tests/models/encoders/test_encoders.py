"""Encoders against transformers: hidden states, older files' names and keys, sensitivity."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from quire.errors import InvalidParameter, LoadError, WeightMismatch
from quire.models import memories_of, plan_kv_pool, read_spec
from quire.models.config_reader import read_config
from quire.models.families import architectures, family_of
from quire.models.layer_memory import NumberBytes
from quire.models.loading.weights import load_model
from quire.models.rules import RuleError
from quire.ops import select
from tests.models.encoders.prompt_driver import hidden_states
from tests.models.hostile.encoders import ENCODERS, make_encoder, rename, renamed_tensors
from tests.models.paged_driver import TOLERANCE, relative_error
from tests.models.test_mutations import changed_configs, has_out_bias, mutants, shows

DEFAULT = (
    *("BertModel", "BertForSequenceClassification", "RobertaForMaskedLM"),
    *("DistilBertForTokenClassification", "modernbert-biased", "NomicBertModel"),
    *("GteForSequenceClassification", "qwen3", "gemma3", "AlbertModel", "ElectraModel"),
    *("EuroBertModel", "MPNetModel", "DebertaV2Model", "T5EncoderModel", "UMT5EncoderModel"),
)
"""One of each family; the others run with --full."""


def cases(names=ENCODERS):
    return [
        pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.full]) for name in names
    ]


class Library:
    """Makes each checkpoint once."""

    def __init__(self, folder):
        self._folder, self._made = folder, {}

    def __getitem__(self, name):
        if name not in self._made:
            self._made[name] = make_encoder(ENCODERS[name], self._folder / name)
        return self._made[name]


@pytest.fixture(scope="session")
def encoders(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("encoders"))


def load(folder, spec=None, provider=None, dtype=torch.float32):
    ops = select(device="cpu", dtype=dtype, providers=[provider] if provider else [])
    spec = spec or read_spec(read_config(folder))
    return load_model(folder, spec, ops, dtype=dtype), ops


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("provider", [None, "torch"])
def test_hidden_states_equal_those_of_transformers(encoders, name, provider):
    made = encoders[name]
    model, ops = load(made.folder, provider=provider)
    found = hidden_states(model, ops, made.prompts, made.seconds)
    assert relative_error(found, made.hidden) < TOLERANCE


SAME_BITS = (
    *("BertModel", "ModernBertModel", "gemma3"),
    *("MPNetModel", "DebertaV2Model", "T5EncoderModel", "AlbertModel"),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", cases(SAME_BITS))
def test_a_prompt_has_the_same_bits_alone_and_in_a_crowd(encoders, name, dtype):
    made = encoders[name]
    model, ops = load(made.folder, provider="cpu", dtype=dtype)
    together = hidden_states(model, ops, made.prompts, made.seconds)
    for prompt, second, found in zip(made.prompts, made.seconds, together, strict=True):
        (alone,) = hidden_states(model, ops, [prompt], [second])
        assert torch.equal(alone, found)


def test_every_architecture_is_compared():
    compared = {hostile.architecture or hostile.model for hostile in ENCODERS.values()}
    others = {"NewModel", "GteNewModel"}  # other names for the files of GteModel
    elsewhere = {
        "BertSpladeSparseEmbeddingModel",  # in tests/pooling/test_sparse.py
        # in test_jina.py
        *("JinaBertModel", "JinaBertForMaskedLM"),
        *("JinaBertForSequenceClassification", "JinaBertForTokenClassification"),
        # in tests/pooling/test_text_towers.py
        *("CLIPModel", "CLIPTextModel", "CLIPTextModelWithProjection"),
        *("SiglipModel", "Siglip2Model"),
        "LlamaBidirectionalForSequenceClassification",  # in tests/pooling/test_classifiers.py
        "JinaVLForRanking",  # in tests/pooling/pictures/test_labels.py
    }
    ours = [name for name in architectures() if family_of(name).pools and name not in elsewhere]
    for name in ours:
        stem = {"New": "Gte", "GteNew": "Gte"}
        for prefix, same in stem.items():
            if name.startswith(prefix):
                name = name.replace(prefix, same, 1)
        assert name in compared, name
    assert others <= set(ours)


def test_they_keep_nothing_of_a_request(encoders):
    spec = read_spec(read_config(encoders["modernbert-biased"].folder))
    pool = plan_kv_pool(memories_of([spec]), 16, NumberBytes(2, 2))
    assert [group.kind for group in pool.groups] == ["none"] and pool.block_bytes == 0
    assert pool.held_blocks(1000, 1000) == 0


def test_token_types_tell_texts_apart(encoders):
    made = encoders["BertModel"]
    model, ops = load(made.folder)
    found = hidden_states(model, ops, made.prompts)
    assert relative_error(found[:1], made.hidden[:1]) > 0.01
    assert relative_error(found[1:2], made.hidden[1:2]) < TOLERANCE


# names and keys of files


def copied(made, folder, **keys):
    folder.mkdir()
    for file in made.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def old_name(name):
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        name = name.replace(new, old)
    return name


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("change", [str, old_name], ids=["new", "old"])
def test_names_of_older_files_are_known(encoders, tmp_path, prefix, change):
    made = encoders["BertModel"]
    folder = copied(made, tmp_path / "model")
    renamed_tensors(folder, lambda name: prefix + change(name))
    model, ops = load(folder)
    assert relative_error(hidden_states(model, ops, made.prompts, made.seconds), made.hidden) < 1e-6


def test_two_names_for_a_norm_are_refused(encoders, tmp_path):
    folder = copied(encoders["BertModel"], tmp_path / "model")
    renamed_tensors(folder, lambda name: name.replace("embeddings.LayerNorm.bias", "embeddings.b"))
    with pytest.raises(WeightMismatch, match=r"LayerNorm\.bias"):
        load(folder)


@pytest.mark.parametrize("architecture", ["NewModel", "GteNewModel"])
def test_published_names_of_gte_are_known(encoders, tmp_path, architecture):
    made = encoders["GteModel"]
    folder = copied(made, tmp_path / "model", model_type="new", pack_qkv=True)
    rename(folder, architecture)
    renamed_tensors(folder, lambda name: f"new.{name}")
    model, ops = load(folder)
    assert relative_error(hidden_states(model, ops, made.prompts, made.seconds), made.hidden) < 1e-5


def test_published_keys_of_nomic_are_known(encoders):
    config = json.loads((encoders["NomicBertModel"].folder / "config.json").read_text())
    renames = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
    }
    published = {renames.get(k, k): v for k, v in config.items() if k != "rope_parameters"}
    published |= {"activation_function": "swiglu", "rotary_emb_base": 1000, "prenorm": False}
    del published["hidden_act"]
    assert read_spec(published) == read_spec(config)
    assert read_spec({**published, "max_trained_positions": 20}).context == 20


def test_ntk_of_gte_is_a_larger_base_and_slower_turns():
    config = {
        "architectures": ["NewModel"],
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
        "type_vocab_size": 1,
        "rope_theta": 20000,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
    }
    rope = read_spec(config).blocks[0].mixer.rope
    assert rope.theta == 160000 and rope.scaling.factor == 8.0 ** (2 / 16)


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        ("RobertaForMaskedLM", {"max_position_embeddings": 4}, "max_position_embeddings"),
        ("NomicBertModel", {"moe_every_n_layers": 2, "num_experts": 8}, "moe_every_n_layers"),
        ("NomicBertModel", {"causal": True}, "causal"),
        ("GteForSequenceClassification", {"logn_attention_scale": True}, "logn_attention_scale"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(encoders, name, keys, told):
    config = json.loads((encoders[name].folder / "config.json").read_text())
    with pytest.raises(LoadError, match=told):
        read_spec(config | keys)


# is the comparison sensitive?

WITHOUT_HEAD = ("tie", "head_bias", "logit_scale", "logit_softcap", "pooler")


def is_explained(path, block, spec, name):
    """Whether a change cannot show in hidden states."""
    last = path[-1]
    if last in WITHOUT_HEAD or last == "axes":  # those which positions of text share
        return True
    if last in ("context", "position_offset"):
        return not spec.learned_positions  # a limit, no part of any formula
    if last == "eps" and name.startswith("DistilBert"):
        return True  # transformers has no key for it: 1e-12, which random numbers do not show
    if last == "out_bias":
        return has_out_bias(block)
    if last in ("pre", "post", "mixer_pre") and block.norms_sum:
        return True
    if last == "mlp_post":
        return block.has_post
    return last in ("qk_norm_over", "qk_norm_after_rope") and block.mixer.qk_norm is None


def notices(made, mutant):
    try:
        model, ops = load(made.folder, mutant, provider="torch")
        found = hidden_states(model, ops, made.prompts[:1], made.seconds[:1])
    except (LoadError, InvalidParameter, RuleError, AssertionError, RuntimeError, AttributeError):
        return True
    except KeyError:  # a leaf that the mutant has and the checkpoint has not
        return True
    return relative_error(found, made.hidden[:1]) > TOLERANCE


@pytest.mark.parametrize("name", cases())
def test_every_fact_of_a_spec_is_noticed(encoders, name):
    made = encoders[name]
    spec = read_spec(read_config(made.folder))
    blind = []
    for path, mutant in mutants(replace(spec, pooler=None)):
        block = next(
            (b for b, m in zip(spec.blocks, mutant.blocks, strict=False) if b != m), spec.blocks[0]
        )
        mutant = replace(mutant, pooler=spec.pooler)
        if notices(made, mutant) == is_explained(path, block, spec, name):
            blind.append(".".join(path))
    assert not blind


DROPOUT = {"hidden_dropout_prob", "attention_probs_dropout_prob"}
OF_TRAINING = {
    *("decoder_bias", "sparse_prediction", "sparse_pred_ignore_index", "mlp_dropout"),
    *("deterministic_flash_attn", "initializer_cutoff_factor"),
}
OF_CLASSIFIERS = {"classifier_activation", "classifier_bias", "classifier_pooling"}

OF_T5_DECODERS = {
    *("is_encoder_decoder", "num_decoder_layers", "scale_decoder_outputs"),
    *("initializer_factor", "dropout_rate"),
}
EUROBERT_WITHOUT_POOLING = (
    *("EuroBertModel", "EuroBertForMaskedLM", "EuroBertForTokenClassification"),
)


def blind_keys(name):
    """Keys that are read and cannot show in the model at hand."""
    if name in ("llama", "LlamaBidirectionalModel", "qwen2", "qwen3", "gemma3"):
        own = {"qwen2": {"max_window_layers"}, "qwen3": {"max_window_layers"}}
        return own.get(name, {"_sliding_window_pattern"} if name == "gemma3" else set())
    if name.startswith("DistilBert"):
        return {"qa_dropout", "seq_classif_dropout", "sinusoidal_pos_embds", "tie_word_embeddings"}
    if name.lower().startswith("modernbert"):
        is_embedder = name in ("ModernBertModel", "ModernBertForMaskedLM")
        is_tagger = name == "ModernBertForTokenClassification"
        unused = OF_CLASSIFIERS if is_embedder else {"classifier_pooling"} if is_tagger else set()
        return {*OF_TRAINING, *unused, "tie_word_embeddings"}
    if name.lower().startswith("eurobert"):
        is_classifier = name not in EUROBERT_WITHOUT_POOLING
        pooling = set() if is_classifier else {"classifier_pooling"}
        return {"mask_token_id", "tie_word_embeddings", *pooling}
    if "T5" in name:
        return {*OF_T5_DECODERS, "dense_act_fn", "is_gated_act", "tie_word_embeddings"}
    of_deberta = {"legacy", "pooler_dropout"}
    if name != "DebertaV2ForSequenceClassification":
        of_deberta |= {"pooler_hidden_act", "pooler_hidden_size"}
    return {
        *(*DROPOUT, "tie_word_embeddings", *of_deberta),
        *("summary_last_dropout", "classifier_dropout_prob"),  # ELECTRA's and ALBERT's
    }


@pytest.mark.parametrize("name", cases())
def test_every_key_of_a_config_is_noticed(encoders, name):
    config = read_config(encoders[name].folder)
    spec = read_spec(config)
    blind = {
        key
        for key, copies in changed_configs(config)
        if not any(shows(copy, spec) for copy in copies)
    }
    assert blind == blind_keys(name) & set(config)
