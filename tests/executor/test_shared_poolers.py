"""Encoders of texts and of pictures over several workers: the bits of one."""

from functools import partial

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams, SamplingParams
from quire.engine.core import builder
from quire.executor.uniproc import open_uniproc
from quire.models import read_spec
from quire.models.cutting.sharding import has_bits_of_one
from quire.models.loading.folder_files import read_folder_config
from tests.models.hostile.encoders import ENCODERS, make_encoder
from tests.models.vision.spoken import picture, write_spoken
from tests.models.vision.spoken_models import IMAGE, IMAGE_ID, SPOKEN
from tests.support.needs import needs_native

pytestmark = needs_native
OFTEN = {"modernbert-biased", "DebertaV2ForSequenceClassification", "T5ForTokenClassification"}


def some(names, often):
    return [pytest.param(n, marks=[] if n in often else [pytest.mark.full]) for n in names]


def over_workers(monkeypatch, ask, sizes):
    """What an engine answers with each number of workers."""
    answers = []
    for size in sizes:
        opener = partial(open_uniproc, num_workers=size)
        monkeypatch.setattr(builder, "find_executor", lambda parallel, opener=opener: opener)
        answers.append(ask())
    return answers


def task_of(name):
    kinds = {"Token": "token_classify", "Sequence": "classify", "biased": "classify"}
    return next((task for kind, task in kinds.items() if kind in name), "embed")


def ask_encoder(name, made):
    given = [None if s is None else {"compressed_token_type_ids": s} for s in made.seconds]
    params = [PoolingParams(extra_kwargs=one) for one in given]
    wishes = {"dtype": "float32", "skip_tokenizer_init": True, "runner": "pooling"}
    with LLM(str(made.folder), **wishes, cpu_threads=2) as llm:
        found = llm.encode(made.prompts, params, pooling_task=task_of(name), use_tqdm=False)
    return [torch.as_tensor(output.outputs.data).numpy() for output in found]


def ask_pictures(name, folder, **sizes):
    """Tokens and their log-probabilities after pictures, in chunks and with prefix hits."""
    placeholder = SPOKEN[name].placeholder
    prompts = [
        {
            "prompt": f"w1 {IMAGE} w2 w3".replace(IMAGE, placeholder),
            "multi_modal_data": {"image": [picture(number)]},
        }
        for number in (1, 2)
    ]
    prompts.append({"prompt": "w4 w5 w6"})
    params = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0, logit_bias={IMAGE_ID: -100.0}
    )
    wishes = {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    with LLM(str(folder), **wishes, cpu_threads=2, **sizes) as llm:
        found = [
            output for _ in range(2) for output in llm.generate(prompts, params, use_tqdm=False)
        ]
    return [
        (token, each[token].logprob)
        for output in found
        for token, each in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]


@pytest.mark.parametrize("name", some([n for n in ENCODERS if "Siglip" not in n], OFTEN))
def test_encoders(name, tmp_path, monkeypatch):
    """Also those whose scores depend on distances, which are whole on each worker. Text towers are
    served with the ids of the model that they are of.
    """
    made = make_encoder(ENCODERS[name], tmp_path / "model")
    one, four = over_workers(monkeypatch, partial(ask_encoder, name, made), (1, 4))
    assert any(array.any() for array in one)
    assert all(map(np.array_equal, one, four))


@pytest.mark.parametrize("name", some(SPOKEN, {"llava"}))
def test_pictures(name, tmp_path, monkeypatch):
    """Every worker has the whole encoder."""
    write_spoken(name, tmp_path)
    one, two = over_workers(monkeypatch, partial(ask_pictures, name, tmp_path), (1, 2))
    assert len(one) == 36
    if has_bits_of_one(read_spec(read_folder_config(tmp_path, "safetensors")), 2):
        assert one == two
    else:  # as the plan says: the values of a head are too few for four segments
        assert one == [(token, pytest.approx(found, abs=1e-5)) for token, found in two]
