"""Labels of prompts with pictures, from heads on models of pictures."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.errors import LoadError
from tests.models.vision.spoken import write_side_files, write_spoken
from tests.models.vision.spoken_models import IMAGE, SPOKEN
from tests.models.vision.test_pictures import as_prompt
from tests.models.vision.wholes import config_of, write_drawn
from tests.pooling.pictures.test_embedders import (
    ONE,
    OTHER,
    PROMPTS,
    image_pil,
    of_transformers,
)

LABELS = {"0": "cat", "1": "dog", "2": "neither"}
FULL = pytest.mark.full
WHOLES = {"gemma3": "Gemma3", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl_moe": "Qwen3VLMoe"}


def engine(folder, **options):
    given = {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    return LLM(model=str(folder), runner="pooling", **{**given, **options})


def with_head(folder, rows):
    """The files of a model of pictures as those of a classifier; the head."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    width = next(t for n, t in tensors.items() if n.endswith("embed_tokens.weight")).shape[1]
    torch.manual_seed(0)
    head = torch.randn(rows, width)
    kept = {name: t for name, t in tensors.items() if not name.endswith("lm_head.weight")}
    save_file(kept | {"score.weight": head}, file, {"format": "pt"})
    return head


def change(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl_moe", marks=FULL)])
def test_labels_are_those_of_the_last_state(name, tmp_path):
    model = write_spoken(name, tmp_path)
    head = with_head(tmp_path, 3)
    change(tmp_path, id2label=LABELS, architectures=[f"{WHOLES[name]}ForSequenceClassification"])
    given = [as_prompt(*each) for each in PROMPTS]
    for options in ({}, {"max_num_batched_tokens": 7}):
        llm = engine(tmp_path, **options)
        for _ in range(2):
            found = llm.classify(given)
            for output, (_, pictures) in zip(found, PROMPTS, strict=True):
                ids = output.prompt_token_ids
                states = of_transformers(model, name, tmp_path, ids, pictures, whole=True)
                right = (states @ head.T).softmax(-1).numpy()
                np.testing.assert_allclose(output.outputs.probs, right, atol=2e-5)
        assert all(output.num_cached_tokens for output in found[:3])
        del llm


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_labels_are_those_of_transformers(name, tmp_path):
    kind = {"gemma3": "Gemma3", "qwen3_5": "Qwen3_5"}[name]
    config = config_of(SPOKEN[name].whole)
    config.id2label = {int(number): label for number, label in LABELS.items()}
    model = write_drawn(getattr(transformers, f"{kind}ForSequenceClassification"), config, tmp_path)
    write_side_files(name, tmp_path)
    llm = engine(tmp_path)
    shown = SPOKEN[name].placeholder
    given = [as_prompt(text.replace(IMAGE, shown), pictures) for text, pictures in PROMPTS]
    for output, (_, pictures) in zip(llm.classify(given), PROMPTS, strict=True):
        ids = output.prompt_token_ids
        states = of_transformers(model, name, tmp_path, ids, pictures, whole=True)
        right = (states @ model.score.weight.detach().T).softmax(-1).numpy()
        np.testing.assert_allclose(output.outputs.probs, right, atol=2e-5)


def test_another_form_is_asked_for_by_its_name(tmp_path):
    model = write_spoken("qwen3_vl", tmp_path)
    asked = {
        "architectures": ["Qwen3VLForSequenceClassification"],
        "classifier_from_token": ["w1", "w2"],
        "is_original_qwen3_reranker": True,
    }
    llm = engine(tmp_path, hf_overrides=asked)
    template = (
        "{% for m in messages %}{{ 'w7 ' if m.role == 'query' else 'w8 ' }}{{ m.content }} "
        "{% endfor %}"
    )
    words = {"type": "text", "text": "w2 w3"}
    contents = [{"content": [image_pil(each), words]} for each in (ONE, OTHER)]
    scores = llm.score("w1 w4", contents, chat_template=template)
    rows = model.lm_head.weight[[llm.get_tokenizer().get_vocab()[t] for t in ("w1", "w2")]]
    for score, shown in zip(scores, (ONE, OTHER), strict=True):
        ids = score.prompt_token_ids
        states = of_transformers(model, "qwen3_vl", tmp_path, ids, [shown], whole=True)
        no, yes = states @ rows.T.detach()
        assert score.outputs.score == pytest.approx(torch.sigmoid(yes - no).item(), abs=2e-5)
    with pytest.raises(LoadError, match="FooForSequenceClassification"):
        engine(tmp_path, hf_overrides={"architectures": ["FooForSequenceClassification"]})


def as_ranker(folder):
    """Make the files of a Qwen2-VL those of Jina's ranker; its head."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, value in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            width = value.shape[1]  # a prompt ends with token 100
            tensors[name] = torch.cat((value, torch.randn(128 - len(value), width)))
    torch.manual_seed(0)
    first, last = torch.nn.Linear(width, width), torch.nn.Linear(width, 1)
    for i, part in ((0, first), (2, last)):
        tensors |= {f"score.{i}.{name}": t.detach() for name, t in part.named_parameters()}
    save_file(tensors, file, {"format": "pt"})
    text = json.loads((folder / "config.json").read_text())["text_config"] | {"vocab_size": 128}
    change(folder, architectures=["JinaVLForRanking"], text_config=text)
    return first, last


def test_the_ranker_of_jina(tmp_path):
    """Its code is not in transformers: the prompt, the head and its shift are spelled out here."""
    write_spoken("qwen2_vl", tmp_path)
    first, last = as_ranker(tmp_path)
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(tmp_path).float()
    llm = engine(tmp_path)
    words = {"type": "text", "text": "w2 w3"}
    query = {"content": [image_pil(ONE), words]}
    documents = ["w5", {"content": [image_pil(OTHER)]}, {"content": [image_pil(OTHER), words]}]
    vocab = llm.get_tokenizer().get_vocab()
    for asked, shown in (("w1 w4", []), (query, [ONE])):
        for score, document in zip(llm.score(asked, documents), documents, strict=True):
            pictures = ([] if document == "w5" else [OTHER]) + shown
            ids = score.prompt_token_ids
            assert ids[-1] == 100 and ids[-2] == vocab["w4" if asked == "w1 w4" else "w3"]
            with torch.inference_mode():
                state = of_transformers(model, "qwen2_vl", tmp_path, ids, pictures, whole=True)
                right = torch.sigmoid(last(first(state).relu()) - 2.65).item()
            assert score.outputs.score == pytest.approx(right, abs=2e-5)
    [cut] = llm.score("w1 w4", "w5", tokenization_kwargs={"truncate_prompt_tokens": 3})
    assert len(cut.prompt_token_ids) == 3 and cut.prompt_token_ids[-1] == 100
