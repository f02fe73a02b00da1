"""Every family against its oracle: whole and chunked passes over paged memory give its logits."""

import pytest
import torch

from quire.models import memories_of, plan_kv_pool, read_spec
from quire.models.config_reader import read_config
from quire.models.families import architectures, family_of
from quire.models.layer_memory import NumberBytes
from tests.models.hostile.kinds import kinds_of
from tests.models.hostile.models import DENSE, HOSTILE, cases, config_of, theirs
from tests.models.paged_driver import (
    TOLERANCE,
    PagedRun,
    load,
    relative_error,
    run_chunked,
    run_full,
)


def load_hostile(made):
    spec = read_spec(read_config(made.folder))
    return load(made.folder, spec, max_model_len=made.max_model_len)


@pytest.mark.parametrize("name", cases())
def test_logits_equal_the_oracle_s(checkpoints, name):
    made = checkpoints[name]
    model = load_hostile(made)
    assert relative_error(run_full(model, made.prompts), made.logits) < TOLERANCE
    assert relative_error(run_chunked(model, made.prompts), made.logits) < TOLERANCE


WITH_STATES = ["gemma3", "gpt2", *(n for n, h in DENSE.items() if h.reference is None)]


@pytest.mark.parametrize("name", cases(WITH_STATES))
def test_hidden_states_equal_those_of_transformers(checkpoints, name):
    made = checkpoints[name]
    spec = read_spec(read_config(made.folder))
    layers = tuple(range(len(spec.blocks)))
    model = load(made.folder, spec, max_model_len=made.max_model_len, aux_layers=layers)
    seen = []

    def forward(batch):
        seen.append(model.forward(batch))
        return seen[-1]

    prompt = made.prompts[0]
    PagedRun(model, [prompt]).step([len(prompt)], forward)
    with torch.no_grad():
        found = theirs(HOSTILE[name], made.folder)(
            prompt[None], use_cache=False, output_hidden_states=True
        )
    aux, expected = seen[0].aux, [state[0] for state in found.hidden_states]
    if HOSTILE[name].lacks_embeddings:
        expected = [aux[0], *expected]
    for layer in layers:
        error = relative_error([aux[layer]], [expected[layer]])
        assert error < TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize("name", cases())
def test_random_weights_fill_every_model(checkpoints, name):
    made = checkpoints[name]
    spec = read_spec(read_config(made.folder))
    model = load(None, spec, max_model_len=made.max_model_len, load_format="dummy")
    for logits in run_full(model, made.prompts):
        assert logits.isfinite().all() and logits.std() > 0.1


PARTS_ALONE = ("MiniMaxM3ForCausalLM", "MiniMaxM3SparseForCausalLM")
"""Architectures whose files transformers reads as parts of a whole alone."""


def test_every_family_has_an_oracle():
    found = {config_of(hostile)["architectures"][0]: hostile for hostile in HOSTILE.values()}
    for name in architectures():
        family = family_of(name)
        if family.pools or name.endswith("TextModel") or name in PARTS_ALONE:
            continue  # test_encoders.py, test_text_parts.py
        compared = [found[other] for other in family.architectures if other in found]
        assert compared, f"no model of {name}"
        for hostile in compared:
            assert (family.oracle == "reference") == (hostile.reference is not None)


def test_the_default_run_has_every_kind_of_fact():
    kinds = {name: kinds_of(hostile) for name, hostile in HOSTILE.items()}
    default = set().union(*(kinds[name] for name in HOSTILE if HOSTILE[name].is_default))
    for name, found in kinds.items():
        assert found <= default, f"{name} alone has {found - default}: make it is_default"


def test_a_decoder_can_be_cut_anywhere(checkpoints):
    made = checkpoints["gemma2"]
    model = load_hostile(made)
    for cut in range(model.num_layers + 1):

        def in_two(batch, cut=cut):
            between = model.forward(batch, slice(0, cut))
            return model.forward(batch, slice(cut, None), between.last)

        if cut == model.num_layers:  # the first piece is whole, nothing is left to do
            in_two = model.forward
        assert relative_error(run_chunked(model, made.prompts, 1, in_two), made.logits) < TOLERANCE


@pytest.mark.parametrize("name", ["gpt2", "gemma"])
def test_embeddings_can_stand_in_for_ids(checkpoints, name):
    made = checkpoints[name]
    model = load_hostile(made)

    def from_embeddings(batch):
        table = dict(model.named_parameters())["embed.weight"]
        batch.embeds = table[batch.ids] * model.spec.embed_scale
        batch.ids = None
        return model.forward(batch)

    got = run_chunked(model, made.prompts, 2, from_embeddings)
    assert relative_error(got, made.logits) < TOLERANCE


def test_bfloat16_is_loaded_and_run_as_bfloat16(checkpoints):
    made = checkpoints["qwen3"]
    spec = read_spec(read_config(made.folder))
    model = load(made.folder, spec, dtype=torch.bfloat16)
    assert {t.dtype for t in model.parameters()} == {torch.bfloat16}
    got = run_full(model, made.prompts, dtype=torch.bfloat16)
    assert got[0].dtype == torch.float32
    assert relative_error(got, made.logits) < 0.1


def test_windows_make_groups_of_equal_slots(checkpoints):
    spec = read_spec(read_config(checkpoints["gemma3"].folder))
    groups = plan_kv_pool(memories_of([spec]), 32, NumberBytes(2, 2)).groups
    assert [(g.kind, g.window, g.layers) for g in groups] == [
        ("full", None, (1,)),
        ("sliding", 4, (0,)),
        ("sliding", 4, (2,)),
    ]


def test_parameters_are_named_and_counted_once(checkpoints):
    made = checkpoints["gemma2"]
    model = load_hostile(made)
    names = [name for name, _ in model.named_parameters()]
    assert len(names) == len(set(names))
    assert "layers.0.attn.qkv.weight" in names and "head.weight" not in names
    assert model.weight_bytes == sum(t.nbytes for t in model.parameters())


@pytest.mark.parametrize(("name", "added"), [("gemma2", {"head.weight"}), ("qwen3", set())])
def test_a_tied_head_has_a_name_where_duplicates_are_asked_for(checkpoints, name, added):
    """As torch's modules have it: all that comes to the names is that of the tied head."""
    model = load_hostile(checkpoints[name])
    once, all_names = (dict(model.named_parameters(remove_duplicate=d)) for d in (True, False))
    assert all_names.keys() - once.keys() == added
    assert torch.equal(all_names["head.weight"], once["embed.weight"]) == bool(added)
