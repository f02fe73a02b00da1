"""Vectors and labels of decoders are those of transformers."""

import numpy as np
import pytest
import torch
import transformers

from quire import LLM, PoolingParams
from tests.pooling import models

OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_batched_tokens": 48}


def close(found, wanted, atol=2e-5):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=atol, rtol=1e-4)


def open_llm(folder, **options):
    return LLM(str(folder), **{**OPTIONS, **options})


@pytest.mark.parametrize("family", models.FAMILIES)
def test_vectors_by_last_token(tmp_path, family):
    model = models.make(tmp_path, family, "Model")
    asked = models.prompts()
    with open_llm(tmp_path) as llm:
        outputs = llm.embed(asked, use_tqdm=False)
        plain = llm.embed(
            asked[:2], pooling_params=PoolingParams(use_activation=False), use_tqdm=False
        )
    for ids, output in zip(asked, outputs, strict=True):
        wanted = torch.nn.functional.normalize(models.hidden(model, ids)[-1], dim=0)
        close(output.outputs.embedding, wanted)
        assert output.finished and output.prompt_token_ids == ids and output.error is None
    close(plain[1].outputs.embedding, models.hidden(model, asked[1])[-1], atol=1e-4)


@pytest.mark.parametrize("kind", ["CLS", "MEAN"])
def test_other_poolings(tmp_path, kind):
    model = models.make(tmp_path, "Qwen3", "ForCausalLM", tie_word_embeddings=False)
    asked = models.prompts(seed=1)
    config = {"pooling_type": kind, "use_activation": False}
    with open_llm(tmp_path, runner="pooling", pooler_config=config) as llm:
        outputs = llm.embed(asked, use_tqdm=False)
    for ids, output in zip(asked, outputs, strict=True):
        states = models.hidden(model, ids)
        close(output.outputs.embedding, states[0] if kind == "CLS" else states.mean(0), atol=1e-4)


@pytest.mark.parametrize("task", ["token_embed", "embed"])
def test_tokens_in_order(tmp_path, task):
    model = models.make(tmp_path, "Llama", "Model")
    asked = models.prompts(seed=2)
    with open_llm(tmp_path, pooler_config={"task": task}) as llm:
        outputs = llm.encode(asked, pooling_task=task, use_tqdm=False)
    for ids, output in zip(asked, outputs, strict=True):
        states = torch.nn.functional.normalize(models.hidden(model, ids), dim=-1)
        close(output.outputs.data, states if task == "token_embed" else states[-1])


@pytest.mark.parametrize(("family", "labels"), [("Qwen2", 3), ("Gemma", 1), ("Mistral", 2)])
def test_labels_of_prompts(tmp_path, family, labels):
    model = models.make(tmp_path, family, "ForSequenceClassification", num_labels=labels)
    asked = models.prompts(seed=3)
    with open_llm(tmp_path) as llm:
        outputs = llm.classify(asked, use_tqdm=False)
        raw = llm.classify(
            asked, pooling_params=PoolingParams(use_activation=False), use_tqdm=False
        )
    for ids, output, scores in zip(asked, outputs, raw, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        close(scores.outputs.probs, logits, atol=1e-4)
        close(output.outputs.probs, logits.sigmoid() if labels == 1 else logits.softmax(-1))
        assert output.outputs.num_classes == labels


def test_labels_of_tokens(tmp_path):
    model = models.make(tmp_path, "Qwen3", "ForTokenClassification", num_labels=5)
    asked = models.prompts(seed=4)
    with open_llm(tmp_path) as llm:
        outputs = llm.encode(asked, pooling_task="token_classify", use_tqdm=False)
    for ids, output in zip(asked, outputs, strict=True):
        with torch.inference_mode():
            close(output.outputs.data, model(torch.tensor([ids])).logits[0].softmax(-1))


SMALL = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
OTHERS = {
    "Gemma3TextModel": {**SMALL, "head_dim": 12, "sliding_window": 24},
    "MixtralForSequenceClassification": {**SMALL, "num_local_experts": 4},
    "MambaModel": {"state_size": 8},
    "GPT2ForSequenceClassification": {"n_head": 4, "n_positions": 160, "eos_token_id": 1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(tmp_path, name):
    """Experts, recurrent states, learned positions, and a name of its own for the text's part."""
    kind = next(end for end in ("ForSequenceClassification", "Model") if name.endswith(end))
    keys = {"hidden_size": 48, "num_hidden_layers": 2, "vocab_size": 320, "pad_token_id": 0}
    keys |= {"num_labels": 3, "max_position_embeddings": 160} | OTHERS[name]
    config = getattr(transformers, name.removesuffix(kind) + "Config")(**keys)
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    model.save_pretrained(tmp_path)
    asked = models.prompts(seed=6, lengths=(1, 40, 90))
    with open_llm(tmp_path, max_model_len=160) as llm:
        task = llm.llm_engine.front_end.plan.model.pooler.tasks[0]
        outputs = llm.encode(asked, pooling_task=task, use_tqdm=False)
    for ids, output in zip(asked, outputs, strict=True):
        with torch.inference_mode():
            found = model(torch.tensor([ids]))
        if task == "classify":
            close(output.outputs.data, found.logits[0].softmax(-1))
        else:
            close(output.outputs.data, torch.nn.functional.normalize(found[0][0, -1], dim=0))


def test_sixteen_bits_are_close(tmp_path):
    model = models.make(tmp_path, "Qwen3", "Model")
    asked = models.prompts(seed=5)
    with open_llm(tmp_path, dtype="bfloat16") as llm:
        outputs = llm.embed(asked, use_tqdm=False)
    for ids, output in zip(asked, outputs, strict=True):
        wanted = torch.nn.functional.normalize(models.hidden(model, ids)[-1], dim=0)
        assert torch.tensor(output.outputs.embedding) @ wanted > 0.999
