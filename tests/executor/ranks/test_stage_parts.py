"""What a model cut into stages does besides drawing tokens: pictures, poolers, networks that draft,
hidden states in files and recorded experts, with the bits of one worker.
"""

from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.engine.core import builder
from quire.errors import LoadError
from quire.executor.stages import open_stages
from quire.executor.uniproc import open_uniproc
from quire.testing import make_checkpoint
from tests.engine.test_hidden_states import config
from tests.executor.test_shared_drafts import ALWAYS
from tests.executor.test_shared_poolers import ask_encoder, ask_pictures, some
from tests.executor.test_stages import staged_core
from tests.executor.worker_cores import open_core, requests, same_bits, serve
from tests.models.hostile.encoders import ENCODERS, make_encoder
from tests.models.vision.spoken import write_spoken
from tests.models.vision.spoken_models import SPOKEN
from tests.runner.drafting.draft_checkpoints import write_eagle, write_eagle3, write_medusa
from tests.support.needs import needs_native

pytestmark = needs_native


def over_stages(monkeypatch, ask, sizes):
    """What an engine of one worker answers, and one of stages of so many layers."""
    answers = []
    for opener in (open_uniproc, lambda config, **_: open_stages(config, sizes)):
        monkeypatch.setattr(builder, "find_executor", lambda parallel, opener=opener: opener)
        answers.append(ask())
    return answers


# pictures

LAYERS = {"qwen3_vl": (2, 1), "qwen3_vl_moe": (2, 1)}
"""Stages of models whose first layers get further rows."""
UNCUT = {"gemma4": "inputs of their own"}
"""Models whose layers need more than hidden states."""


@pytest.mark.parametrize("name", some([n for n in SPOKEN if n not in UNCUT], {"qwen3_vl"}))
def test_pictures(name, tmp_path, monkeypatch):
    """The first stage has the encoder, all of them the positions of pictures."""
    model = write_spoken(name, tmp_path)
    count = model.config.get_text_config().num_hidden_layers
    sizes = LAYERS.get(name, (1, count - 1))
    one, staged = over_stages(monkeypatch, partial(ask_pictures, name, tmp_path), sizes)
    assert len(one) == 36 and one == staged


@pytest.mark.full
def test_a_first_stage_without_layers_that_pictures_enter_is_refused(tmp_path, monkeypatch):
    write_spoken("qwen3_vl", tmp_path)
    with pytest.raises(LoadError, match="first 2 layers of this model, and its first stage has 1"):
        over_stages(monkeypatch, partial(ask_pictures, "qwen3_vl", tmp_path), (1, 2))


# poolers


POOLING = [n for n in ENCODERS if "Siglip" not in n and "Albert" not in n]
"""But for those without a text encoder of their own, and those whose layers share weights."""


@pytest.mark.parametrize("name", some(POOLING, {"BertForMaskedLM"}))
def test_poolers(name, tmp_path, monkeypatch):
    made = make_encoder(ENCODERS[name], tmp_path / "model")
    one, staged = over_stages(monkeypatch, partial(ask_encoder, name, made), (1, 2))
    assert any(array.any() for array in one)
    assert all(map(np.array_equal, one, staged))


# networks that draft, hidden states and experts

SHAPE = {
    "num_hidden_layers": 4, "vocab_size": 300, "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 96, "rms_norm_eps": 1e-3,
}  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    shape = SHAPE | {"tie_word_embeddings": False}
    return make_checkpoint(tmp_path_factory.mktemp("target"), shape, "llama", 3, dtype="float32")


def watch_drafts(core):
    """The drafts of the worker that samples, by request and position."""
    head = core.executor.workers[-1].model_runner.heads._by_kind[SamplingParams]
    drafter, seen = head.drafting.drafter, {}
    propose = drafter.propose

    def watched(rows, step):
        counts = propose(rows, step)
        for row, count in zip(step.sampled, counts, strict=True):
            place = int(rows.handles[row]), int(rows.num_tokens[row])
            seen[place] = rows.drafts(row, count)
        return counts

    drafter.propose = watched
    return seen


NETWORKS = {
    "eagle": write_eagle,
    "eagle3": partial(write_eagle3, layers=(1, 2, 4)),
    "medusa": write_medusa,
    "draft_model": lambda folder, target: target,
}


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 2)])
@pytest.mark.parametrize("method", some(NETWORKS, {"eagle3"}))
def test_networks_draft_next_to_the_last_stage(target, tmp_path, method, sizes):
    """The same drafts, also from states that enter layers of earlier stages."""
    network = NETWORKS[method](tmp_path / "draft", target)
    drafts_with = {"method": method, "model": str(network), **ALWAYS}
    answers, drafts = [], []
    wishes = {"speculative_config": drafts_with, "async_scheduling": False}
    for core in (open_core(target, 1, **wishes), staged_core(target, sizes, **wishes)):
        drafts.append(watch_drafts(core))
        answers.append(serve(core, requests(5)))
        core.shutdown()
    assert same_bits(*answers)
    one, staged = drafts  # at the places where both drafted: steps may differ
    both = [(one[place], staged[place]) for place in one.keys() & staged.keys()]
    assert all(mine == theirs for mine, theirs in both)
    assert sum(len(mine) for mine, _ in both) > 20
    assert method != "draft_model" or answers[1].num_accepted > 20


def ids_of(seed):
    draw = np.random.default_rng(seed)
    return [{"prompt_token_ids": draw.integers(5, 290, n).tolist()} for n in (1, 30, 9, 17, 30)]


@pytest.mark.parametrize("sizes", some([(1, 3), (2, 2), (1, 2, 1)], {(1, 3)}))
def test_hidden_states_of_all_stages_are_written(target, tmp_path, monkeypatch, sizes):
    def ask():
        wishes = config(tmp_path / f"{len(list(tmp_path.iterdir()))}", layers=[4, 0, 1, 3])
        wishes |= {"dtype": "float32", "max_model_len": 48, "block_size": 4, "cpu_threads": 2}
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
        with LLM(str(target), skip_tokenizer_init=True, max_num_batched_tokens=16, **wishes) as llm:
            outputs = llm.generate(ids_of(1), params, use_tqdm=False)
        return [
            load_file(output.kv_transfer_params["hidden_states_path"])["hidden_states"]
            for output in outputs
        ]

    one, staged = over_stages(monkeypatch, ask, sizes)
    assert all(found.shape[1:] == (4, 64) for found in one)
    assert all(map(torch.equal, one, staged))


@pytest.mark.parametrize("sizes", some([(1, 3), (2, 2), (1, 2, 1)], {(1, 3)}))
def test_experts_of_all_stages_are_recorded(tmp_path, monkeypatch, sizes):
    """The second of four layers has none."""
    shape = SHAPE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    folder = make_checkpoint(
        tmp_path, shape | {"mlp_only_layers": [1]}, "qwen3_moe", dtype="float32"
    )

    def ask():
        wishes = {"dtype": "float32", "max_model_len": 64, "num_gpu_blocks_override": 12}
        wishes |= {"max_num_batched_tokens": 16, "cpu_threads": 2, "block_size": 16}
        with LLM(
            str(folder), skip_tokenizer_init=True, enable_return_routed_experts=True, **wishes
        ) as llm:
            params = SamplingParams(max_tokens=8, temperature=0.9, seed=1, ignore_eos=True)
            runs = [llm.generate(ids_of(2), params, use_tqdm=False) for _ in range(2)]
        return [out.outputs[0].routed_experts for outputs in runs for out in outputs]

    one, staged = over_stages(monkeypatch, ask, sizes)
    assert one[1].shape == (37, 4, 2) and one[1][:, 3].any()
    assert all(map(np.array_equal, one, staged))
