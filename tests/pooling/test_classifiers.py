"""Labels that are made of a generator's head, of reward models, and as options have them."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, PoolingParams
from quire.errors import LoadError
from tests.models.hostile.encoders import rename
from tests.pooling import models

ASKED = models.prompts(seed=11, lengths=(1, 20, 90))
TWO = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["a", "b"]}


def open_llm(folder, **options):
    options.setdefault("max_num_batched_tokens", 40)
    return LLM(str(folder), dtype="float32", **options)


def logits_of(model):
    with torch.inference_mode():
        return [model(torch.tensor([ids])).logits[0] for ids in ASKED]


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-4, rtol=1e-4)


def test_a_bias_where_there_is_one(tmp_path):
    model = models.make(tmp_path, "Llama", "ForSequenceClassification", num_labels=3)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = torch.tensor([1.0, -2.0, 0.5])
    save_file({**tensors, "score.bias": bias}, tmp_path / "model.safetensors")
    with open_llm(tmp_path) as llm:
        outputs = llm.classify(ASKED, use_tqdm=False)
    for output, logits in zip(outputs, logits_of(model), strict=True):
        close(output.outputs.probs, (logits + bias).softmax(-1))


@pytest.mark.parametrize("is_tied", [False, True])
def test_yes_and_no(tmp_path, is_tied):
    model = models.make(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=is_tied)
    with open_llm(tmp_path, hf_overrides={**TWO, "is_original_qwen3_reranker": True}) as llm:
        vocabulary = llm.get_tokenizer().get_vocab()
        outputs = llm.classify(ASKED, use_tqdm=False)
        scores = llm.score("a", ["b", "c"], use_tqdm=False)
        whole = llm.classify(["ab", "ac"], use_tqdm=False)
    chosen = [vocabulary["a"], vocabulary["b"]]
    for output, logits in zip(outputs, logits_of(model), strict=True):
        close(output.outputs.probs, logits[-1, chosen].softmax(-1)[1:])
    assert [s.outputs.score for s in scores] == [one.outputs.probs[0] for one in whole]


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_missing_template_of_a_reranker_is_noted(tmp_path, template):
    models.make(tmp_path, "Qwen3", "ForCausalLM")
    options = {"hf_overrides": {**TWO, "is_original_qwen3_reranker": True}}
    with open_llm(tmp_path, chat_template=template, **options) as llm:
        notes = llm.llm_engine.front_end.plan.notes
    told = [note for note in notes if "Scores of Qwen3-Reranker mean nothing without" in note]
    assert len(told) == (template is None)


POOLED = {"avg": lambda x: x.mean(0), "cls": lambda x: x[0], "last": lambda x: x[-1]}


@pytest.mark.parametrize("pooling", POOLED)
def test_a_llama_that_sees_whole_prompts(tmp_path, pooling):
    """As a reranker, whose scores are divided by a temperature, and as an embedder."""
    keys = {"num_labels": 1, "is_causal": False, "pooling": pooling}
    model = models.make(tmp_path, "Llama", "ForSequenceClassification", **keys)
    rename(tmp_path, "LlamaBidirectionalForSequenceClassification")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.25}))
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = llm.classify(ASKED, use_tqdm=False)
        score = llm.score("a text", "another", use_tqdm=False)
        whole = llm.classify("a textanother", use_tqdm=False)
    assert score[0].outputs.score == whole[0].outputs.probs[0]
    for ids, output in zip(ASKED, found, strict=True):
        states = models.hidden(model, ids)
        with torch.inference_mode():
            wanted = model.score(POOLED[pooling](states)) / 0.25
        close(output.outputs.probs, wanted.sigmoid())
    model = models.make(tmp_path, "Llama", "Model", **keys)
    rename(tmp_path, "LlamaBidirectionalModel")
    with LLM(str(tmp_path), dtype="float32") as llm:
        vectors = llm.embed(ASKED, use_tqdm=False)
    for ids, output in zip(ASKED, vectors, strict=True):
        states = POOLED[pooling](models.hidden(model, ids))
        close(output.outputs.embedding, torch.nn.functional.normalize(states, dim=0))


def test_rows_as_they_are(tmp_path):
    model = models.make(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=False)
    three = {"classifier_from_token": ["c", "a", "b"], "method": "no_post_processing"}
    with open_llm(tmp_path, convert="classify", hf_overrides=three) as llm:
        vocabulary = llm.get_tokenizer().get_vocab()
        outputs = llm.classify(ASKED, use_tqdm=False)
    chosen = [vocabulary[token] for token in "cab"]
    for output, logits in zip(outputs, logits_of(model), strict=True):
        close(output.outputs.probs, logits[-1, chosen].softmax(-1))


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ({"method": "from_3_way"}, "from_2_way_softmax, no_post_processing"),
        ({"method": "from_2_way_softmax", "classifier_from_token": ["a"]}, "two tokens"),
        ({"method": "no_post_processing", "classifier_from_token": ["a", 3]}, "a list of tokens"),
        ({"method": "no_post_processing", "classifier_from_token": ["a nowhere"]}, "vocabulary"),
    ],
)
def test_hostile_tokens(tmp_path, overrides, text):
    models.make(tmp_path, "Qwen3", "ForCausalLM")
    with pytest.raises(LoadError, match=text):
        open_llm(tmp_path, hf_overrides={**TWO, **overrides})


@pytest.mark.parametrize(
    ("keys", "apply"),
    [
        ({"problem_type": "regression"}, lambda x: x),
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            lambda x: x,
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            torch.sigmoid,
        ),
        ({}, lambda x: x.softmax(-1)),
    ],
    ids=["regression", "several", "identity", "sigmoid", "softmax"],
)
def test_activations_that_configs_state(tmp_path, keys, apply):
    model = models.make(tmp_path, "Llama", "ForSequenceClassification", num_labels=3)
    with open_llm(tmp_path, hf_overrides=keys) as llm:
        outputs = llm.classify(ASKED, use_tqdm=False)
    for output, logits in zip(outputs, logits_of(model), strict=True):
        close(output.outputs.probs, apply(logits))


def test_mean_and_deviation_come_before_the_activation(tmp_path):
    model = models.make(tmp_path, "Llama", "ForSequenceClassification", num_labels=1)
    config = {"logit_mean": 0.5, "logit_sigma": 3.0}
    with open_llm(tmp_path, pooler_config=config) as llm:
        outputs = llm.classify(ASKED, use_tqdm=False)
    for output, logits in zip(outputs, logits_of(model), strict=True):
        close(output.outputs.probs, ((logits - 0.5) / 3).sigmoid())


def reward_model(folder, labels, architecture):
    """A Qwen2 with a scorer of two layers; returns the model and the scores of hidden states."""
    model = models.make(folder, "Qwen2", "ForCausalLM", tie_word_embeddings=False)
    draw = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    shapes = {"0.weight": (48, 48), "0.bias": (48,), "2.weight": (labels, 48), "2.bias": (labels,)}
    scorer = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file(tensors | {f"score.{k}": v for k, v in scorer.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))

    def score(states):
        inner = torch.relu(states @ scorer["0.weight"].T + scorer["0.bias"])
        return inner @ scorer["2.weight"].T + scorer["2.bias"]

    return model, score


def test_rewards_of_tokens(tmp_path):
    model, score = reward_model(tmp_path, 1, "Qwen2ForRewardModel")
    with open_llm(tmp_path) as llm:
        outputs = llm.encode(ASKED, pooling_task="token_classify", use_tqdm=False)
    for ids, output in zip(ASKED, outputs, strict=True):
        close(output.outputs.data, score(models.hidden(model, ids)))


def test_rewards_of_steps(tmp_path):
    model, score = reward_model(tmp_path, 2, "Qwen2ForProcessRewardModel")
    asked = [[*range(10, 25), 7, 30, 31, 7, *range(40, 90), 7], [7], [8, 9]]
    with open_llm(tmp_path, pooler_config={"step_tag_id": 7}) as llm:
        outputs = llm.encode(asked, pooling_task="token_classify", use_tqdm=False)
        params = PoolingParams(step_tag_id=8, returned_token_ids=[1])
        [other] = llm.encode([asked[2]], params, pooling_task="token_classify", use_tqdm=False)
    for ids, output in zip(asked, outputs, strict=True):
        states = models.hidden(model, ids)[torch.tensor(ids) == 7]
        close(output.outputs.data, score(states).softmax(-1))
    assert [len(output.outputs.data) for output in outputs] == [3, 1, 0]
    assert other.outputs.data.tolist() == [[1.0]], "a softmax over the one column that is left"
