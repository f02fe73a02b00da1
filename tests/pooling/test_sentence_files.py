"""Folders of sentence-transformers: their modules are honoured, in every form in which its
releases have written them, or refused by name.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.functional import normalize

from quire import LLM, EngineArgs
from quire.cli import main as cli
from quire.errors import LoadError, UnsupportedConfigValue
from quire.hardware.native import find_native
from quire.models.pooling.sentence_transformers import read_sentence_files
from tests.models.hostile.encoders import ENCODERS, make_encoder
from tests.pooling import models

OLD = "sentence_transformers.models."
NEW = "sentence_transformers.sentence_transformer.modules.pooling."
ASKED = models.prompts(seed=9, lengths=(1, 20, 100))


def write(folder, name, value):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def write_modules(folder, *kinds, package=OLD):
    """A list of modules, with a folder for each but the transformer."""
    found = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": package + kind}
        for i, kind in enumerate(("Transformer", *kinds))
    ]
    write(folder, "modules.json", found)


def write_dense(folder, number, inputs, outputs, activation, seed, name="linear.", bias=True):
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=draw)
    tensors = {f"{name}weight": weight}
    if bias:
        tensors[f"{name}bias"] = torch.randn(outputs, generator=draw)
    config = {"in_features": inputs, "out_features": outputs, "bias": bias}
    config |= {"activation_function": f"torch.nn.modules.{activation}"}
    write(folder, f"{number}_Dense/config.json", config)
    if seed % 2:
        save_file(tensors, folder / f"{number}_Dense/model.safetensors")
    else:
        torch.save(tensors, folder / f"{number}_Dense/pytorch_model.bin")
    return weight, tensors.get(f"{name}bias", 0)


def embed(folder, **options):
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **options) as llm:
        return np.array([o.outputs.embedding for o in llm.embed(ASKED, use_tqdm=False)])


def states(model):
    return [models.hidden(model, ids) for ids in ASKED]


@pytest.mark.parametrize("package", [OLD, NEW, "sentence_transformers.base.modules."])
@pytest.mark.parametrize(
    ("config", "pool"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_pooling_of_a_generator(tmp_path, package, config, pool):
    write_modules(tmp_path, "Pooling", package=package)
    write(tmp_path, "1_Pooling/config.json", config)
    files = read_sentence_files(tmp_path)
    assert (files.poolings, files.normalizes, files.has_pooling) == ((pool,), False, True)


def test_two_dense_layers_and_lengths(tmp_path):
    model = models.make(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=True)
    write_modules(tmp_path, "Pooling", "Dense", "Dense", "Normalize")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode_mean_tokens": True})
    first, bias = write_dense(tmp_path, 2, 48, 64, "activation.Tanh", seed=1)
    second, _ = write_dense(
        tmp_path, 3, 64, 20, "linear.Identity", seed=2, name="dense.", bias=False
    )
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    wanted = [
        normalize(second @ torch.tanh(first @ x.mean(0) + bias), dim=0) for x in states(model)
    ]
    np.testing.assert_allclose(embed(tmp_path), torch.stack(wanted), atol=2e-5)
    with LLM(str(tmp_path), dtype="float32") as llm:
        assert llm.llm_engine.front_end.plan.model.max_model_len == 100
        with pytest.raises(ValueError, match="maximum context length is 100 tokens"):
            llm.embed([[5] * 101], use_tqdm=False)


def test_vectors_are_as_long_as_the_modules_make_them(tmp_path):
    model = models.make(tmp_path, "Llama", "Model")
    write_modules(tmp_path, "Pooling")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "lasttoken"})
    wanted = torch.stack([x[-1] for x in states(model)])
    np.testing.assert_allclose(embed(tmp_path), wanted, atol=1e-4, rtol=1e-4)
    found = embed(tmp_path, pooler_config={"use_activation": True, "pooling_type": "CLS"})
    wanted = torch.stack([normalize(x[0], dim=0) for x in states(model)])
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_show_says_what_the_modules_make(tmp_path, capsys):
    """Of an encoder, which keeps nothing of a request."""
    make_encoder(ENCODERS["BertModel"], tmp_path)
    write_modules(tmp_path, "Pooling", "Dense")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write_dense(tmp_path, 2, 64, 20, "activation.Tanh", seed=1)
    assert cli.main(["show", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "p = mean of x" in told and "p = tanh(W[20 x 64] @ p + bias)" in told
    assert "vector[20] = p\n" in told and "KV groups: none, nothing is kept" in told


COMPARED = {
    "cosine": lambda a, b: torch.cosine_similarity(a, b, dim=-1),
    "dot": lambda a, b: b @ a,
    "euclidean": lambda a, b: -torch.cdist(b, a[None])[:, 0],
    "manhattan": lambda a, b: -torch.cdist(b, a[None], p=1)[:, 0],
}


@pytest.mark.parametrize(("name", "compare"), [(None, "cosine"), *((n, n) for n in COMPARED)])
def test_vectors_are_compared_as_the_files_say(tmp_path, name, compare):
    model = models.make(tmp_path, "Llama", "Model")
    write_modules(tmp_path, "Pooling")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write(tmp_path, "config_sentence_transformers.json", {"similarity_fn_name": name})
    query, *documents = (x.double().mean(0) for x in states(model))
    wanted = COMPARED[compare](query, torch.stack(documents))
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True) as llm:
        found = llm.score([ASKED[0]], ASKED[1:], use_tqdm=False)
    np.testing.assert_allclose([one.outputs.score for one in found], wanted, rtol=2e-5)
    assert abs(wanted[0] - wanted[1]) > 1e-3


def test_a_comparison_that_nobody_knows(tmp_path):
    write(tmp_path, "config_sentence_transformers.json", {"similarity_fn_name": "jaccard"})
    with pytest.raises(UnsupportedConfigValue, match="similarity_fn_name"):
        read_sentence_files(tmp_path)


def test_small_letters(tmp_path):
    models.make(tmp_path, "Qwen3", "Model")
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 64, "do_lower_case": True})
    with LLM(str(tmp_path), dtype="float32") as llm:
        large, small = llm.embed(["A Quick FOX", "a quick fox"], use_tqdm=False)
    assert large.outputs == small.outputs and large.prompt_token_ids == small.prompt_token_ids


def test_a_generator_stays_one_if_that_is_asked_for(tmp_path):
    models.make(tmp_path, "Qwen3", "ForCausalLM")
    write_modules(tmp_path, "Pooling", "Normalize")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "lasttoken"})
    with LLM(str(tmp_path), dtype="float32", runner="generate") as llm:
        [output] = llm.generate([[5, 6, 7]], use_tqdm=False)
    assert output.outputs[0].token_ids
    assert embed(tmp_path).shape == (3, 48)


def test_an_engine_that_generates_as_well_has_the_vectors_of_the_files(tmp_path):
    models.make(tmp_path, "Qwen3", "ForCausalLM")
    write_modules(tmp_path, "Pooling", "Dense")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write_dense(tmp_path, 2, 48, 20, "activation.Tanh", seed=3)
    write(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": "find: "}})
    write(tmp_path, "sentence_bert_config.json", {"max_seq_length": 110, "do_lower_case": True})
    both = {"runner": "generate", "convert": "embed"}
    assert np.array_equal(embed(tmp_path, **both), embed(tmp_path))
    plan = EngineArgs(model=str(tmp_path), **both).create_engine_config()
    assert plan.model.prompts == {"query": "find: "} and plan.model.lowers_input
    assert plan.model.max_model_len == 160, "that of config.json, which generation needs"
    [note] = plan.notes
    assert "truncate_prompt_tokens=110" in note
    shorter = EngineArgs(model=str(tmp_path), max_model_len=110, **both).create_engine_config()
    assert shorter.notes == ()


def test_generation_keeps_its_length_where_the_tokenizer_has_a_shorter_one(tmp_path):
    sizes = {"n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 160, "vocab_size": 320}
    sizes |= {"bos_token_id": 1, "eos_token_id": 1}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(tmp_path)
    models.write_tokenizer(tmp_path, models.VOCAB)
    path = tmp_path / "tokenizer_config.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {"model_max_length": 90}))

    def length(**options):
        return EngineArgs(model=str(tmp_path), **options).create_engine_config().model.max_model_len

    assert length(runner="pooling") == 90
    assert length(runner="generate", convert="embed") == length() == 160


SWITCHES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens")
SWITCHES += ("weightedmean_tokens", "lasttoken")
POOLED = {
    "cls": lambda x: x[0],
    "max": lambda x: x.amax(0),
    "mean": lambda x: x.mean(0),
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: (
        torch.arange(1.0, len(x) + 1) @ x / torch.arange(1.0, len(x) + 1).sum()
    ),
    "lasttoken": lambda x: x[-1],
}
EVERY = list(POOLED)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        *(({"pooling_mode": name}, [name]) for name in ("max", "mean_sqrt_len_tokens")),
        ({"pooling_mode_weightedmean_tokens": True}, ["weightedmean"]),
        ({"pooling_mode": ["lasttoken", "max", "cls"]}, ["lasttoken", "max", "cls"]),
        ({f"pooling_mode_{name}": True for name in reversed(SWITCHES)}, EVERY),
        ({}, ["mean"]),
    ],
    ids=["max", "root", "weighted", "three", "all", "none named"],
)
def test_every_pooling_and_several_at_once(tmp_path, config, names):
    """Also in chunks, whose bits are those of whole prompts."""
    model = models.make(tmp_path, "Qwen3", "Model")
    write_modules(tmp_path, "Pooling")
    write(tmp_path, "1_Pooling/config.json", config)
    wanted = [torch.cat([POOLED[name](x) for name in names]) for x in states(model)]
    found = embed(tmp_path)
    np.testing.assert_allclose(found, torch.stack(wanted), atol=2e-4, rtol=1e-4)
    if find_native()[0] is not None:
        np.testing.assert_array_equal(embed(tmp_path, max_num_batched_tokens=24), found)


def test_several_poolings_before_a_dense_layer(tmp_path):
    model = models.make(tmp_path, "Qwen3", "Model")
    write_modules(tmp_path, "Pooling", "Dense", "Normalize")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": ["mean", "max"]})
    matrix, bias = write_dense(tmp_path, 2, 96, 20, "activation.Tanh", seed=1)
    pooled = [torch.cat([x.mean(0), x.amax(0)]) for x in states(model)]
    wanted = [normalize(torch.tanh(matrix @ x + bias), dim=0) for x in pooled]
    np.testing.assert_allclose(embed(tmp_path), torch.stack(wanted), atol=2e-5)
    with LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True) as llm:
        assert llm.llm_engine.get_supported_tasks() == ("embed",)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"pooling_mode": "sum"}, "pooling_mode='sum'"),
        ({"pooling_mode": ["mean", 3]}, "pooling_mode"),
        ({"pooling_mode": []}, "pooling_mode"),
        ({"pooling_mode": "mean", "include_prompt": False}, "include_prompt=False"),
    ],
)
def test_poolings_that_do_not_exist(tmp_path, config, text):
    write_modules(tmp_path, "Pooling")
    write(tmp_path, "1_Pooling/config.json", config)
    with pytest.raises(UnsupportedConfigValue, match=text):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (("Dense", "Pooling"), "Pooling after Dense"),
        (("Pooling", "Normalize", "Dense"), "Dense after Normalize"),
        (("Pooling", "Pooling"), "Pooling after Pooling"),
        (("Pooling", "Normalize", "Normalize"), "Normalize after Normalize"),
    ],
)
def test_modules_in_an_order_that_computes_something_else(tmp_path, kinds, text):
    """As it would be with a Dense module of tokens, or one behind the normalisation."""
    write_modules(tmp_path, *kinds)
    with pytest.raises(LoadError, match=f"{text} is not implemented; the order is"):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize("kind", ["Dense", "Normalize"])
def test_modules_that_read_something_else(tmp_path, kind):
    write_modules(tmp_path, "Pooling", kind)
    write(tmp_path, f"2_{kind}/config.json", {"module_input_name": "token_embeddings"})
    told = f"2_{kind}/config.json: module_input_name='token_embeddings' is not implemented"
    with pytest.raises(UnsupportedConfigValue, match=told):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        ([{"type": OLD + "LSTM", "path": ""}], "modules of type sentence_transformers.models.LSTM"),
        ([{"type": "os.path.Dense", "path": ""}], "modules of type os.path.Dense"),
        ([{"type": OLD + "Pooling", "path": "../1"}], "not a folder of the model"),
        ([{"type": OLD + "Pooling", "path": "/etc"}], "not a folder of the model"),
        ({"type": 3}, "must be a list of modules"),
        ([3], "must be a list of modules"),
    ],
)
def test_hostile_lists_of_modules(tmp_path, listed, text):
    write(tmp_path, "modules.json", listed)
    with pytest.raises(LoadError, match=text.replace(".", r"\.")):
        read_sentence_files(tmp_path)


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        ({"activation_function": "os.system"}, UnsupportedConfigValue, "activation_function"),
        ({"in_features": "48"}, UnsupportedConfigValue, "in_features"),
        ({"out_features": 21}, LoadError, "wrong shape"),
        ({"in_features": 47}, LoadError, "in_features=47, but its inputs have 48"),
        ({"gain": 2}, LoadError, "gain"),
        ({"bias": False}, LoadError, "unknown 2_Dense"),
    ],
)
def test_hostile_dense_layers(tmp_path, config, kind, text):
    models.make(tmp_path, "Qwen3", "Model")
    write_modules(tmp_path, "Pooling", "Dense")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write_dense(tmp_path, 2, 48, 20, "linear.Identity", seed=1)
    path = tmp_path / "2_Dense/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(kind, match=text):
        LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)


def test_a_dense_layer_without_weights(tmp_path):
    models.make(tmp_path, "Qwen3", "Model")
    write_modules(tmp_path, "Pooling", "Dense")
    write(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean"})
    write_dense(tmp_path, 2, 48, 20, "linear.Identity", seed=1)
    (tmp_path / "2_Dense/model.safetensors").unlink()
    with pytest.raises(LoadError, match="has no weights in"):
        LLM(str(tmp_path), skip_tokenizer_init=True)
