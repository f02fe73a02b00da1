"""The EAGLE-3 network of the embedded model guesses right as often as the documentation says."""

from __future__ import annotations

import pytest
import torch
from embedded_model.checkpoint import load_model
from embedded_model.corpus import held_out_texts
from embedded_model.draft import DraftHead, export_head, losses
from safetensors.torch import load_file

from quire import LLM, SamplingParams, embedded
from quire.runner.drafting.pace import FixedPace

NUM_DRAFTS = 3


def acceptance(temperature):
    """How often the guess at each place was right after those before it, on held-out files."""
    config = {"method": "eagle3", "model": embedded.draft_head()}
    prompts = [text[:600] for text in held_out_texts()]
    params = SamplingParams(temperature=temperature, max_tokens=64, ignore_eos=True, seed=1)
    tried, right = [0] * NUM_DRAFTS, [0] * NUM_DRAFTS
    with LLM(
        max_model_len=512, speculative_config=config | {"num_speculative_tokens": NUM_DRAFTS}
    ) as llm:

        def watch(worker):
            drafting = worker.model_runner.heads.of(params).drafting
            drafting.pace = FixedPace(NUM_DRAFTS)
            propose = drafting.drafter.propose

            def count(rows, step):
                for new, drafts in zip(step.new_tokens, step.drafts.tolist(), strict=True):
                    for place in range(min(drafts, len(new))):
                        tried[place] += 1
                        right[place] += place < len(new) - 1
                return propose(rows, step)

            drafting.drafter.propose = count

        llm.collective_rpc(watch)
        found = llm.generate(prompts, params, use_tqdm=False)
    assert all(len(one.outputs[0].token_ids) == 64 for one in found)
    return [r / t for r, t in zip(right, tried, strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_guesses_are_right_as_often_as_was_measured(temperature):
    found = acceptance(temperature)
    assert found[0] > {0.0: 0.35, 1.0: 0.3}[temperature], found
    assert all(share > 0.1 for share in found), found


def test_what_is_trained_is_what_is_exported(tmp_path):
    torch.manual_seed(0)
    target = load_model(embedded.path())
    head = DraftHead(target)
    ids = torch.randint(5, 3000, (2, 40))
    loss, common = losses(head, target, ids, 3)
    assert loss.shape == common.shape == (3,) and ((common >= 0) & (common <= 1)).all()
    export_head(head, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shipped = load_file(embedded.draft_head() / "model.safetensors")
    assert {n: t.shape for n, t in tensors.items()} == {n: t.shape for n, t in shipped.items()}
    assert sum(t.nbytes for t in shipped.values()) < 1 << 20
