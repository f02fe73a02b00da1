"""The training script: its model is transformers' Llama, and what it exports comes back."""

from __future__ import annotations

import pytest
import torch
from embedded_model import checkpoint, corpus, muon, tokenizer
from embedded_model.model import Model, ModelShape, token_losses
from transformers import AutoModelForCausalLM


def hostile_model() -> torch.nn.Module:
    """A tiny model with random norms and non-zero outputs, so that each part counts."""
    shape = ModelShape(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rope_theta=50.0,
        rms_norm_eps=0.05,
    )
    torch.manual_seed(0)
    made = Model(shape)
    for parameter in made.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
        parameter.data.copy_(parameter.data.bfloat16())
    return made


def small_tokenizer():
    return tokenizer.train_tokenizer(["def f(x):\n    return x\n"] * 3, 300)


def test_exported_model_is_the_model_that_was_trained(tmp_path):
    model = hostile_model()
    checkpoint.export(model, small_tokenizer(), tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, 300, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, rtol=1e-4, atol=1e-4)


def test_exported_model_is_read_back(tmp_path):
    model = hostile_model()
    checkpoint.export(model, small_tokenizer(), tmp_path)
    again = checkpoint.load_model(tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=0, atol=0)


def test_held_out_files_exist_and_are_not_trained_on():
    names = {file.as_posix() for file in corpus.library_files()}
    assert len(names) > 300
    assert len(corpus.held_out_texts()) == len(corpus.HELD_OUT)
    assert not [name for name in names for held in corpus.HELD_OUT if name.endswith("/" + held)]


SOURCE = '''"""A module."""


@decorated
def first(x):
    """Give x back.

    And nothing else.
    """
    return x


class Second:
    def method(self):
        """Do nothing."""
'''


def test_definitions_are_cut_with_decorators():
    cut = corpus.definitions(SOURCE, corpus.parsed(SOURCE))
    assert [piece.splitlines()[0] for piece in cut] == ["@decorated", "class Second:"]


def test_chats_ask_for_what_a_docstring_says():
    turns = corpus.chat_turns(SOURCE, corpus.parsed(SOURCE))
    assert turns[0][0] == "Give x back."
    assert turns[1] == ("Do nothing.", 'def method(self):\n    """Do nothing."""\n')


def test_broken_source_has_no_tree():
    assert corpus.parsed("def (") is None


def test_batches_show_each_window_once_per_epoch():
    document = corpus.Document(whole=list(range(256 * 21 + 1)), cut=[], chats=[])
    batches = corpus.Batches([document], 1024)
    seen = []
    for step in range(5):
        ids, targets = batches.take(step, 0.1)
        assert ids.shape == (4, 256)
        assert torch.equal(ids[:, 1:], targets[:, :-1])
        seen += ids[:, 0].tolist()
    assert batches.epoch == 0
    assert len(set(seen)) == 20


def test_long_windows_come_in_the_second_part_only():
    document = corpus.Document(whole=list(range(20_000)), cut=[], chats=[])
    batches = corpus.Batches([document], 4096)
    assert {batches.take(step, 0.1)[0].shape[1] for step in range(24)} == {256}
    assert {batches.take(step, 0.5)[0].shape[1] for step in range(24)} == {512, 2048, 4096}


@pytest.mark.parametrize("shape", [(16, 16), (8, 40)], ids=["square", "wide"])
def test_orthogonalise_makes_singular_values_alike(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(muon.orthogonalise(torch.randn(3, *shape)))
    assert values.max() < 1.3
    assert values.median() > 0.6


def test_muon_lowers_the_loss():
    model, ids = hostile_model(), torch.arange(64)[None] % 7
    optimizer, losses = muon.Muon(model), []
    for _ in range(8):
        loss = token_losses(model, ids[:, :-1], ids[:, 1:]).mean()
        loss.backward()
        optimizer.step(0.02)
        model.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
