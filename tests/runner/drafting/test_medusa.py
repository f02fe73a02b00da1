"""Medusa heads guess what plain torch makes of the target's last hidden state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from quire.errors import LoadError, WeightMismatch
from quire.testing import make_checkpoint
from tests.runner.drafting.draft_checkpoints import read, write, write_medusa
from tests.runner.drafting.watched_core import K, assert_same, open_with, run_requests, serve
from tests.runner.late_engines import Life, open_core


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    shape = {"num_hidden_layers": 2, "vocab_size": 300, "hidden_size": 64, "head_dim": 16}
    return make_checkpoint(tmp_path_factory.mktemp("target"), shape, "llama", 3, dtype="float32")


def guess(tensors, hidden, count):
    """The likeliest token of each of `count` heads of two blocks."""
    found = []
    for head in range(count):
        x = hidden
        for block in range(2):
            at = f"blocks.{head}.layers.{block}."
            if at + "weight" not in tensors:
                at = f"{head}.{block}.linear."
            x = x + F.silu(tensors[at + "weight"] @ x + tensors.get(at + "bias", 0))
        own = tensors.get(f"lm_heads.{head}.weight", tensors.get(f"{head}.2.weight"))
        token = int((own @ x).argmax())
        found.append(int(tensors["token_map"][token]) if "token_map" in tensors else token)
    return found


@pytest.mark.parametrize("facts", [{}, {"layout": "authors"}, {"vocab": 77}], ids=str)
def test_guesses_are_those_of_the_reference(target, tmp_path, facts):
    folder = write_medusa(tmp_path / "draft", target, **facts)
    core, watched = open_with(target, folder, "medusa")
    run_requests(core, 290, together=True)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tensors = read(folder)[1]
    checked = [(known, drafts) for known, drafts in watched.guesses if drafts]
    assert len(checked) > 20 and {len(drafts) for _, drafts in checked} >= {K}
    for known, drafts in checked:
        with torch.inference_mode():
            ids = torch.tensor([known[:-1]])
            hidden = model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        assert drafts == guess(tensors, hidden, len(drafts))


@pytest.mark.parametrize("late_seed", [None, 1])
def test_answers_are_those_without_drafts(target, tmp_path, late_seed):
    life = Life(4)
    plain, _ = open_core(target, late_seed=late_seed)
    right = serve(plain, life, disturbed=False)
    core, watched = open_with(target, write_medusa(tmp_path, target), "medusa", late_seed=late_seed)
    assert_same(serve(core, life, disturbed=late_seed is None), right, life)
    assert watched.num_drafts > 20


def test_heads_that_do_not_fit_are_refused(target, tmp_path):
    folder = write_medusa(tmp_path, target)
    with pytest.raises(LoadError, match="4 heads"):
        open_with(target, folder, "medusa", count=5)
    config, tensors = read(folder)
    tensors["blocks.0.layers.2.weight"] = tensors.pop("blocks.0.layers.1.weight")
    write(folder, config, tensors)
    with pytest.raises(WeightMismatch, match=r"missing blocks\.0\.layers\.1.*unknown blocks\.0"):
        open_with(target, folder, "medusa")


@pytest.mark.parametrize("wrong", [-1, 300, 2**40])
def test_ids_that_the_target_does_not_have_are_refused(target, tmp_path, wrong):
    config, tensors = read(write_medusa(tmp_path, target, vocab=90))
    tensors["token_map"][17] = wrong
    write(tmp_path, config, tensors)
    with pytest.raises(LoadError, match="token_map has ids that the target does not have"):
        open_with(target, tmp_path, "medusa")
