"""Adapters of models that pool: transformers with the same changes merged into its weights judges
vectors and labels.
"""

import copy

import numpy as np
import pytest
import torch

from quire import LLM, LoRARequest, PoolingParams
from quire.errors import BadAdapter
from quire.models import find_family, read_spec
from quire.models.adapters.targets import AdapterTargets
from quire.models.config_reader import read_config
from tests.models.adapters.made import PREFIX, adapted
from tests.models.hostile.encoders import ENCODERS, ask, make_encoder, random_encoder
from tests.pooling import models

ASKED = models.prompts(seed=21, lengths=(1, 20, 90))


def open_llm(folder, **options):
    options = {"max_num_batched_tokens": 40, "max_loras": 3, **options}
    return LLM(str(folder), dtype="float32", enable_lora=True, **options)


def make_adapters(model, folder, *wholes):
    """An adapter for each of `wholes`, the modules that it replaces; and the merged models."""
    requests, merged = [None], [model]
    for number, whole in enumerate(wholes, 1):
        changed = copy.deepcopy(model)
        path = adapted(changed, seed=number, whole=whole).save(folder / f"adapter{number}")
        requests.append(LoRARequest(f"adapter{number}", number, str(path)))
        merged.append(changed)
    return requests, merged


def close(found, wanted):
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-4, rtol=1e-4)


def test_classifiers_of_their_own(tmp_path):
    model = models.make(tmp_path / "base", "Qwen3", "ForSequenceClassification", num_labels=3)
    requests, merged = make_adapters(model, tmp_path, ["score"], ["score"])
    pairs = [(n, ids) for ids in ASKED for n in range(3)]
    with open_llm(tmp_path / "base") as llm:
        prompts, own = [ids for _, ids in pairs], [requests[n] for n, _ in pairs]
        outputs = llm.classify(prompts, lora_request=own, use_tqdm=False)
        (alone,) = llm.classify(ASKED[2], lora_request=requests[2], use_tqdm=False)
    found = [output.outputs.probs for output in outputs]
    for (n, ids), probs in zip(pairs, found, strict=True):
        with torch.inference_mode():
            close(probs, merged[n](torch.tensor([ids])).logits[0].softmax(-1))
    assert alone.outputs.probs == found[8], "the bits of a row are its own"
    assert not np.allclose(found[0], found[1], atol=1e-2), "the adapter changes nothing"


def test_vectors(tmp_path):
    model = models.make(tmp_path / "base", "Llama", "Model")
    requests, merged = make_adapters(model, tmp_path, [])
    with open_llm(tmp_path / "base") as llm:
        outputs = llm.embed(ASKED, lora_request=requests[1], use_tqdm=False)
        plain = llm.embed(ASKED, use_tqdm=False)
    for ids, output, other in zip(ASKED, outputs, plain, strict=True):
        wanted = torch.nn.functional.normalize(models.hidden(merged[1], ids)[-1], dim=-1)
        close(output.outputs.embedding, wanted)
        assert not np.allclose(output.outputs.embedding, other.outputs.embedding, atol=1e-2)


CLASSIFIERS = [n for n, h in ENCODERS.items() if "Classification" in h.model]
BODIES = [n for n, h in ENCODERS.items() if h.model.endswith("Model")]
BY_DEFAULT = ("RobertaForSequenceClassification", "ModernBertForTokenClassification", "BertModel")


@pytest.mark.parametrize("name", CLASSIFIERS + BODIES)
@pytest.mark.sharp(when=lambda name: name in BY_DEFAULT)
def test_encoders(tmp_path, name):
    """Every module of the body is adapted, and of classifiers the whole head is replaced."""
    made, model = make_encoder(ENCODERS[name], tmp_path / "base"), random_encoder(ENCODERS[name])
    config = read_config(made.folder)
    targets = AdapterTargets(find_family(config), read_spec(config))
    whole = {n for n, _ in model.named_modules() if targets.head(n + ".weight") is not None}
    adapter = adapted(model, whole=whole, can_be=lambda n: n in whole or targets.module(n))
    request = LoRARequest("a", 1, str(adapter.save(tmp_path / "a")))
    task = (
        "embed"
        if name in BODIES
        else "classify"
        if "Sequence" in ENCODERS[name].model
        else "token_classify"
    )
    options = {"runner": "pooling", "pooler_config": {"seq_pooling_type": "CLS"}}
    params = [
        PoolingParams(
            task=task,
            use_activation=False,
            extra_kwargs=None if second is None else {"compressed_token_type_ids": second},
        )
        for second in made.seconds
    ]
    options = (options if task == "embed" else {}) | {"skip_tokenizer_init": True}
    with open_llm(made.folder, **options, max_num_batched_tokens=100) as llm:
        outputs = llm.encode(
            made.prompts, params, pooling_task=task, lora_request=request, use_tqdm=False
        )
    for ids, second, output in zip(made.prompts, made.seconds, outputs, strict=True):
        states, logits = ask(model, ids, second)
        close(output.outputs.data, states[0] if task == "embed" else logits)


def test_heads_that_do_not_fit(tmp_path):
    model = models.make(tmp_path / "base", "Qwen3", "ForSequenceClassification", num_labels=3)
    made = adapted(model, whole=["score"])
    made.tensors[PREFIX + "score.weight"] = torch.ones(4, 48)
    request = LoRARequest("four", 1, str(made.save(tmp_path / "four")))
    with open_llm(tmp_path / "base") as llm:
        text = r"score.weight is \[4, 48\], and this model needs \[3, 48\]"
        with pytest.raises(BadAdapter, match=text):
            llm.classify(ASKED[1:], lora_request=[None, request], use_tqdm=False)
        (output,) = llm.classify(ASKED[1], use_tqdm=False)
    assert output.error is None and len(output.outputs.probs) == 3
