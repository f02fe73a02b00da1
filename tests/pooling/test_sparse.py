"""Sparse vectors: weights of the vocabulary's tokens, against the logits of transformers' masked
language models.
"""

import json

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from quire import LLM, PoolingParams
from quire.errors import InvalidParameter, LoadError
from quire.runner.pooling import term_scores
from tests.models.hostile.encoders import ENCODERS, HostileEncoder, make_encoder
from tests.pooling import models
from tests.pooling.test_sentence_files import write, write_modules

SPARSE = "sentence_transformers.sparse_encoder.models."
FAMILIES = ("Bert", "DistilBert", "XLMRoberta", "ModernBert")
RELU = {**ENCODERS["BertForMaskedLM"].keys, "hidden_act": "relu"}
CASES = {
    **{f"{name}ForMaskedLM": ENCODERS[f"{name}ForMaskedLM"] for name in FAMILIES},
    "relu": HostileEncoder("BertForMaskedLM", "BertConfig", RELU, has_types=True),
}
STRATEGIES = [("max", "relu"), ("max", "log1p_relu"), ("sum", "relu"), ("sum", "log1p_relu")]


class Library:
    def __init__(self, folder):
        self._folder, self._made = folder, {}

    def __getitem__(self, name):
        if name not in self._made:
            self._made[name] = make_encoder(CASES[name], self._folder / name)
        return self._made[name]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return Library(tmp_path_factory.mktemp("sparse"))


def sparse_folder(made, folder, strategy="max", activation="relu", **pooling):
    """A folder of sentence-transformers with the checkpoint."""
    for file in made.folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    kinds = [("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")]
    found = [
        {"idx": i, "name": str(i), "path": path, "type": SPARSE + kind}
        for i, (kind, path) in enumerate(kinds)
    ]
    write(folder, "modules.json", found)
    config = {"pooling_strategy": strategy, "activation_function": activation, **pooling}
    write(folder, "1_SpladePooling/config.json", {"word_embedding_dimension": 96, **config})
    return str(folder)


def right(logits, strategy="max", activation="relu"):
    """The formula, of logits [T, V] in fp64."""
    weights = torch.log1p(torch.relu(logits.double()))
    weights = torch.log1p(weights) if activation == "log1p_relu" else weights
    return weights.amax(0) if strategy == "max" else weights.sum(0)


def params_of(made):
    """Parameters for each prompt, with the types of its second text."""
    return [
        PoolingParams(extra_kwargs=None if n is None else {"compressed_token_type_ids": n})
        for n in made.seconds
    ]


def vectors(folder, made, **options):
    with LLM(folder, dtype="float32", skip_tokenizer_init=True, **options) as llm:
        found = llm.embed(made.prompts, pooling_params=params_of(made), use_tqdm=False)
        alone = [
            llm.embed([prompt], pooling_params=params, use_tqdm=False)[0].outputs.embedding
            for prompt, params in zip(made.prompts, params_of(made), strict=True)
        ]
    together = [output.outputs.embedding for output in found]
    assert together == alone
    return np.array(together)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_masked_language_model(checkpoints, tmp_path, name):
    made = checkpoints[name]
    found = vectors(sparse_folder(made, tmp_path), made)
    wanted = torch.stack([right(logits) for logits in made.logits])
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    assert (found == 0).any() and (found > 0.1).any()


@pytest.mark.parametrize(("strategy", "activation"), STRATEGIES)
def test_strategies_and_activations(checkpoints, tmp_path, monkeypatch, strategy, activation):
    """Also where the scores of a prompt are computed in several pieces."""
    monkeypatch.setattr(term_scores, "_MOST_SCORES", 96 * 7)
    made = checkpoints["BertForMaskedLM"]
    found = vectors(sparse_folder(made, tmp_path, strategy, activation), made)
    wanted = torch.stack([right(logits, strategy, activation) for logits in made.logits])
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_the_same_bits_in_16_bits(checkpoints, tmp_path, dtype, strategy):
    made = checkpoints["BertForMaskedLM"]
    with LLM(sparse_folder(made, tmp_path, strategy), dtype=dtype, skip_tokenizer_init=True) as llm:
        together = llm.embed(made.prompts, use_tqdm=False)
        for prompt, output in zip(made.prompts, together, strict=True):
            [alone] = llm.embed([prompt], use_tqdm=False)
            assert alone.outputs == output.outputs


def test_scores_are_dot_products_and_activation_is_a_length(checkpoints, tmp_path):
    made = checkpoints["DistilBertForMaskedLM"]
    wanted = torch.stack([right(logits) for logits in made.logits])
    folder = sparse_folder(made, tmp_path)
    with LLM(folder, dtype="float32", skip_tokenizer_init=True) as llm:
        query, *documents = made.prompts
        scores = llm.score([query], documents, use_tqdm=False)
        found = [one.outputs.score for one in scores]
        np.testing.assert_allclose(found, wanted[1:] @ wanted[0], rtol=2e-5)
        unit = llm.embed(
            made.prompts, pooling_params=PoolingParams(use_activation=True), use_tqdm=False
        )
    found = np.array([one.outputs.embedding for one in unit])
    np.testing.assert_allclose(found, normalize(wanted), atol=2e-5)


def test_first_and_last_token_are_left_out_by_name_of_the_architecture(checkpoints, tmp_path):
    """Only where they are the special ones; a prompt of nothing else has no weights."""
    made = checkpoints["BertForMaskedLM"]
    first, last = made.prompts[0][0], made.prompts[0][-1]
    overrides = {
        "architectures": ["BertSpladeSparseEmbeddingModel"],
        "cls_token_id": first,
        "sep_token_id": last,
    }
    with LLM(
        str(made.folder), dtype="float32", skip_tokenizer_init=True, hf_overrides=overrides
    ) as llm:
        given = [*made.prompts, [first, last], [first]]
        found = llm.embed(given, pooling_params=[*params_of(made), *[PoolingParams()] * 2],
                          use_tqdm=False)  # fmt: skip
    *found, pair, single = [one.outputs.embedding for one in found]
    assert pair == single == [0.0] * 96
    cut = [logits[ids[0] == first :] for logits, ids in zip(made.logits, made.prompts, strict=True)]
    cut = [
        logits[: len(logits) - (ids[-1] == last)]
        for logits, ids in zip(cut, made.prompts, strict=True)
    ]
    wanted = torch.stack([right(logits) for logits in cut])
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5)
    assert len(cut[0]) == len(made.prompts[0]) - 2


@pytest.mark.parametrize(
    ("name", "pooling", "options", "kind", "text"),
    [
        ("BertForMaskedLM", {"pooling_strategy": "mean"}, {}, LoadError, "pooling_strategy"),
        ("BertForMaskedLM", {"activation_function": "gelu"}, {}, LoadError, "activation_function"),
        ("BertForMaskedLM", {"gain": 3}, {}, LoadError, "gain"),
        (
            "BertForMaskedLM",
            {},
            {"pooler_config": {"pooling_type": "MEAN"}},
            InvalidParameter,
            "no other pooling",
        ),
        ("BertForMaskedLM", {}, {"convert": "classify"}, InvalidParameter, "pooler already"),
        (
            "BertForMaskedLM",
            {},
            {"hf_overrides": {"tie_word_embeddings": False}},
            LoadError,
            "tie_word_embeddings",
        ),
    ],
)
def test_what_sparse_vectors_are_not(checkpoints, tmp_path, name, pooling, options, kind, text):
    folder = sparse_folder(checkpoints[name], tmp_path, **pooling)
    with pytest.raises(kind, match=text):
        LLM(folder, dtype="float32", skip_tokenizer_init=True, **options)


def test_models_that_predict_no_masked_tokens(checkpoints, tmp_path):
    generator, bare = tmp_path / "generator", tmp_path / "bare"
    bare.mkdir()
    models.make(generator, "Qwen3", "ForCausalLM")
    write_modules(generator, "SpladePooling", package=SPARSE)
    write(generator, "1_SpladePooling/config.json", {})
    with pytest.raises(LoadError, match="SpladePooling needs what predicts masked tokens"):
        LLM(str(generator), skip_tokenizer_init=True)
    sparse_folder(checkpoints["BertForMaskedLM"], bare)
    path = bare / "modules.json"
    listed = json.loads(path.read_text())
    kind = "sentence_transformers.models.Dense"
    path.write_text(json.dumps([*listed, {"type": kind, "path": "2_Dense"}]))
    with pytest.raises(LoadError, match="neither Pooling nor Dense"):
        LLM(str(bare), skip_tokenizer_init=True)
