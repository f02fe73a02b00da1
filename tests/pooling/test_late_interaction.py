"""Models whose tokens have vectors (ColBERT), in the forms in which they are published: vectors and
scores against transformers and sentence-transformers.
"""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize

from quire import LLM
from quire.config.args.engine_args import EngineArgs
from quire.config.planning import gather_model_facts
from quire.errors import CorruptCheckpoint, LoadError
from tests.pooling import models
from tests.pooling.test_sentence_transformers import QUERY, SIZES, TEXTS, library, write

SEEN = models.prompts(seed=12, lengths=(1, 7, 60))
QUIET = {"use_tqdm": False}
WIDTH = 24


def change_config(folder, **keys):
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **keys}
    path.write_text(json.dumps({name: key for name, key in config.items() if key is not None}))


def drawn(inputs):
    return torch.randn(WIDTH, inputs, generator=torch.Generator().manual_seed(5))


def write_stanford(folder, kind, as_dense=False, prefix="bert."):
    """A checkpoint of a BERT with its projection; returns the model and that."""
    config = transformers.BertConfig(**{**SIZES, "vocab_size": models.VOCAB, "pad_token_id": 0})
    torch.manual_seed(3)
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6.0) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(folder)
    matrix = drawn(config.hidden_size)
    path = folder / "model.safetensors"
    tensors = {prefix + name: tensor for name, tensor in load_file(path).items()}
    if as_dense:
        write_dense(folder, matrix)
    else:
        tensors["linear.weight"] = matrix
    save_file(tensors, path)
    change_config(folder, architectures=[kind])
    models.write_tokenizer(folder, models.VOCAB)
    return model, matrix


def write_dense(folder, matrix, package="pylate.models.Dense."):
    """Modules as pylate lists them, without Pooling."""
    inside = folder / "1_Dense"
    inside.mkdir()
    config = {"in_features": matrix.shape[1], "out_features": matrix.shape[0], "bias": False}
    config |= {"activation_function": "torch.nn.modules.linear.Identity"}
    (inside / "config.json").write_text(json.dumps(config))
    save_file({"linear.weight": matrix}, inside / "model.safetensors")
    kinds = (("sentence_transformers.models.", "Transformer"), (package, "Dense"))
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": at + kind}
        for i, (at, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


def expected(model, matrix):
    return [normalize(models.hidden(model, ids) @ matrix.T, dim=-1) for ids in SEEN]


def check(folder, wanted, **options):
    with LLM(str(folder), dtype="float32", **options) as llm:
        found = llm.encode(SEEN, pooling_task="token_embed", **QUIET)
        scores = llm.score([SEEN[1]], SEEN, **QUIET)
    for output, vectors in zip(found, wanted, strict=True):
        np.testing.assert_allclose(output.outputs.data, vectors, atol=2e-5)
    right = [float((wanted[1] @ vectors.T).max(-1).values.sum()) for vectors in wanted]
    np.testing.assert_allclose([one.outputs.score for one in scores], right, rtol=1e-4)
    assert np.ptp(right) > 0.05


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("HF_ColBERT", {"as_dense": False, "prefix": "bert."}),
        ("HF_ColBERT", {"as_dense": True, "prefix": ""}),
        ("ColBERTBertModel", {"as_dense": False, "prefix": ""}),
        ("BertModel", {"as_dense": True, "prefix": ""}),
    ],
)
def test_vectors_of_tokens_and_their_scores(tmp_path, kind, form):
    check(tmp_path, expected(*write_stanford(tmp_path, kind, **form)))


@pytest.mark.parametrize("keys", [{}, {"colbert_dim": WIDTH}])
def test_a_model_whose_hidden_width_is_named_dim(tmp_path, keys):
    sizes = {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4, "pad_token_id": 0}
    config = transformers.DistilBertConfig(
        vocab_size=models.VOCAB, max_position_embeddings=160, **sizes
    )
    torch.manual_seed(3)
    model = transformers.DistilBertModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(6.0) if weight.ndim > 1 else weight.add_(torch.randn_like(weight) * 0.2)
    model.save_pretrained(tmp_path)
    models.write_tokenizer(tmp_path, models.VOCAB)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    matrix = drawn(sizes["dim"])
    save_file({**tensors, "linear.weight": matrix}, file)
    change_config(tmp_path, architectures=["ColBERTDistilBertModel"], **keys)
    check(tmp_path, expected(model, matrix))


@pytest.mark.parametrize(
    "shape",
    [["x", 3], [[1], 3], [None], [True, 64], [1.5, 2], [-5, 64], [0, 64], [10**12, 64], "ab"],
)
def test_a_projection_of_no_width_is_refused(tmp_path, shape):
    write_stanford(tmp_path, "HF_ColBERT")
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["linear.weight"]["shape"] = shape
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(CorruptCheckpoint, match=r"the shape of linear\.weight does not begin with"):
        gather_model_facts(EngineArgs(model=str(tmp_path)))


def test_a_decoder_that_is_projected(tmp_path):
    """Causal, in chunks, with an architecture of sentence-transformers' kind."""
    model = models.make(tmp_path, "Llama", "Model")
    matrix = drawn(48)
    write_dense(tmp_path, matrix)
    check(tmp_path, expected(model, matrix), max_num_batched_tokens=48)
    change_config(tmp_path, architectures=["ColBERTLlamaModel"])
    check(tmp_path, expected(model, matrix), max_num_batched_tokens=48)


def test_scores_of_a_multi_vector_encoder(tmp_path):
    """In a folder that the library writes, with its special tokens."""
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "folder"
    checkpoint.mkdir()
    write(checkpoint, "Bert", "Model")
    judge = library.MultiVectorEncoder(str(checkpoint), device="cpu")
    judge.save(str(folder))
    vectors = judge.encode_document(TEXTS, show_progress_bar=False)
    right = judge.similarity(vectors[:1], vectors[1:])[0].tolist()
    with LLM(str(folder), dtype="float32") as llm:
        found = llm.score(QUERY, TEXTS[1:], **QUIET)
        notes = llm.llm_engine.front_end.plan.notes
    np.testing.assert_allclose([one.outputs.score for one in found], right, rtol=2e-5)
    assert np.ptp(right) > 0.05 and any("queries are not expanded" in note for note in notes)


def test_the_width_of_pickled_projections_has_to_be_named(tmp_path):
    model, matrix = write_stanford(tmp_path, "HF_ColBERT")
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match="linear.weight.*colbert_dim"):
        LLM(str(tmp_path), dtype="float32")
    check(tmp_path, expected(model, matrix), hf_overrides={"colbert_dim": WIDTH})
    with pytest.raises(LoadError, match="wrong shape"):
        LLM(str(tmp_path), dtype="float32", hf_overrides={"colbert_dim": WIDTH + 1})
