"""Costs of exchanges: formulas against published figures, real tensors, and the page."""

from pathlib import Path

import pytest
import torch

from benchmarks.scaling import (
    DEEPSEEK_V3,
    LLAMA_8B,
    MODELS,
    NETWORK,
    as_markdown,
    expert_layer_seconds,
    gather_bytes,
    per_expert_layer,
    per_layer,
    per_step,
    ring_bytes,
    weight_seconds,
)
from quire.models.cutting.sharding import num_segments

PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_experts_over_a_network_take_what_deepseek_published():
    """32 tokens of a rank: 120.96 us a direction, 14.76 ms for two of them in 61 layers."""
    found = expert_layer_seconds(32, NETWORK)
    assert found == pytest.approx(120.96e-6, rel=1e-4)
    assert 61 * 2 * found == pytest.approx(14.76e-3, rel=1e-3)


def test_the_payload_of_a_step_is_the_one_of_the_reference():
    """32 layers of width 4096, bf16, 64 tokens: half a MiB each, 32.5 MiB with the embedding."""
    payload = ring_bytes(64, LLAMA_8B.dim, 2)  # of which two ranks move as much as there is
    assert payload == 2**19 and (2 * LLAMA_8B.layers + 1) * payload == 32.5 * 2**20


@pytest.mark.parametrize("size", [2, 4])
def test_gathered_bytes_are_those_of_the_tensors(size):
    segments = num_segments(32, 4096) // size
    parts = torch.zeros(7, segments, 4096)  # of one rank, unrounded
    assert gather_bytes(7, 4096, size) == (size - 1) * parts.nbytes


def test_weights_of_a_rank_are_all_read_by_many_tokens():
    assert weight_seconds(LLAMA_8B, 8, 1) == weight_seconds(LLAMA_8B, 8, 64)
    active = 37e9 / 8 / 3.35e12
    assert weight_seconds(DEEPSEEK_V3, 8, 1) == pytest.approx(active, rel=0.02)
    assert weight_seconds(DEEPSEEK_V3, 8, 10_000) == pytest.approx(671e9 / 8 / 3.35e12)


@pytest.mark.parametrize("rows", [per_layer, per_expert_layer, per_step])
def test_the_page_has_the_tables(rows):
    assert as_markdown(rows()) in PAGE.read_text(), "python -m benchmarks.scaling"
    assert all(model.name in PAGE.read_text() for model in MODELS)
