"""Draft networks in the pool of a target: their guesses are a reference's, a network with the
target's weights is always right, and answers are those without drafts.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import SamplingParams
from quire.errors import LoadError
from quire.runner.drafting.pace import FixedPace
from quire.testing import make_checkpoint
from tests.models.hostile.models import Library
from tests.runner.drafting.draft_checkpoints import read, write, write_eagle, write_eagle3
from tests.runner.drafting.draft_reference import Eagle, Eagle3
from tests.runner.drafting.watched_core import (
    K,
    assert_same,
    open_with,
    run_requests,
    serve,
)
from tests.runner.late_engines import Life, open_core


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    shape = {"num_hidden_layers": 5, "vocab_size": 300, "hidden_size": 64, "head_dim": 16}
    shape |= {"intermediate_size": 96, "rms_norm_eps": 1e-3, "tie_word_embeddings": False}
    return make_checkpoint(tmp_path_factory.mktemp("target"), shape, "llama", 3, dtype="float32")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "recorded"])
def test_a_draft_with_the_targets_weights_is_always_right(target, seed, eager):
    """At temperature 0 and above it, with edits and filters, in chunks, after prefix hits and
    preemptions.
    """
    life = Life(seed)
    plain, _ = open_core(target)
    right = serve(plain, life, disturbed=False)
    wishes = {"enforce_eager": eager, "max_num_batched_tokens": 12 if eager else 30}
    core, watched = open_with(target, target, "draft_model", count=(1, 3, 7)[seed % 3], **wishes)
    found = serve(core, life, disturbed=seed % 2 == 1)
    assert_same(found, right, life)
    assert watched.num_drafts >= 8
    assert watched.num_right == watched.num_drafts


@pytest.fixture(scope="module")
def hidden_states(target):
    """The function from ids to hidden states of the target, each layer's input and the last."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)

    @torch.inference_mode()
    def run(ids):
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return [state[0] for state in states]

    return run


class Seldom(FixedPace):
    """Wants drafts of one step in `every`."""

    def __init__(self, num_tokens, every):
        super().__init__(num_tokens)
        self.every, self.count = every, 0

    def limits(self, rows, longest):
        self.count += 1
        return [n * (self.count % self.every == 0) for n in super().limits(rows, longest)]


@pytest.mark.parametrize("every", [6, 9])
def test_a_draft_that_waits_catches_up(target, monkeypatch, every):
    """Tokens that no guesses are wanted of are computed later, together; several passes where one
    has too few places.
    """
    monkeypatch.setattr("quire.runner.drafting.networks._MOST_BEHIND", 2 * every - 8)
    wishes = {"max_num_batched_tokens": 8, "max_num_seqs": 3}
    core, watched = open_with(target, target, "draft_model", pace=Seldom(K, every), **wishes)
    run_requests(core, 290, together=True)
    assert watched.num_right == watched.num_drafts >= 5
    if every == 9:
        assert 11 in watched.sizes, "as many tokens as the pass has places"


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    """A model with full layers and layers that see four tokens, in the same pages of a pool."""
    return Library(tmp_path_factory.mktemp("windowed"))["gemma2"].folder


@pytest.mark.parametrize("fails", [False, True], ids=["waits", "fails"])
def test_a_draft_that_waits_leaves_the_blocks_that_its_windows_have_left(windowed, fails):
    """They may be another request's by then, whose keys and values a late pass would overwrite."""
    wishes = {"block_size": 2, "num_gpu_blocks_override": 90, "max_num_batched_tokens": 40}
    wishes |= {"enable_prefix_caching": False, "max_num_seqs": 4}
    plain, _ = open_core(windowed, **wishes)
    pace = FixedPace(K) if fails else Seldom(K, 9)
    core, _ = open_with(windowed, windowed, "draft_model", pace=pace, **wishes)
    drafting = core.executor.worker.model_runner.heads.of(SamplingParams()).drafting
    if fails:
        drafting.drafter = Tired(drafting.drafter)
    life = Life(5)
    for request in life.requests:
        request.prompt_token_ids[:] = [token % 96 for token in request.prompt_token_ids]
        request.params = SamplingParams(
            temperature=request.handle % 2, max_tokens=26, ignore_eos=True, logprobs=0
        )
    found = [serve(each, life, disturbed=False) for each in (plain, core)]
    assert_same(found[1], found[0], life)
    assert sum(core.scheduler.counters.num_accepted[1:]) > 10


class Tired:
    """A drafter that raises five times, then works once."""

    def __init__(self, drafter):
        self.drafter, self.count = drafter, 0
        self.add_row, self.remove_row = drafter.add_row, drafter.remove_row

    def propose(self, rows, step):
        self.count += 1
        if self.count % 6:
            raise RuntimeError("not now")
        return self.drafter.propose(rows, step)


def references(target, folder, hidden_states, layers):
    """What a network in the folder should guess after known ids."""
    config, tensors = read(folder)
    _, own = read(target)
    embedding, head = own["model.embed_tokens.weight"], own["lm_head.weight"]
    kind = Eagle if layers is None else Eagle3
    reference = kind(config, tensors, embedding, head)

    @torch.inference_mode()
    def drafts(ids, count):
        states = hidden_states(ids[:-1])
        joined = states[-1] if layers is None else torch.cat([states[i] for i in layers], 1)
        return reference.drafts(torch.tensor(ids), joined, count)

    return drafts


EAGLE3 = {
    "original": {},
    "speculators": {"layout": "speculators"},
    "residual": {"norm_before_residual": True},
    "ids": {"vocab": 90},
    "speculators-ids": {"layout": "speculators", "vocab": 90, "norm_before_residual": False},
    "width": {"dim": 32, "norm_before_fc": True},
    "normed": {"norm_output": True, "layers": [1, 3, 4]},
    "speculators-layers": {"layout": "speculators", "layers": [0, 2, 3]},
}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("name", ["eagle", "eagle-bias", *EAGLE3])
def test_guesses_are_those_of_the_reference(target, hidden_states, tmp_path, name, together):
    facts = EAGLE3.get(name)
    if facts is None:
        layers, method = None, "eagle"
        folder = write_eagle(tmp_path / "draft", target, bias=name == "eagle-bias")
    else:
        layers, method = facts.get("layers", [1, 2, 3]), "eagle3"
        folder = write_eagle3(tmp_path / "draft", target, **facts | {"layers": layers})
    wishes = {"enforce_eager": together, "max_num_batched_tokens": 10, "block_size": 8}
    core, watched = open_with(target, folder, method, **wishes, enable_prefix_caching=together)
    run_requests(core, 290, together=together)
    guess = references(target, folder, hidden_states, layers)
    checked = [(known, drafts) for known, drafts in watched.guesses if drafts]
    assert len(checked) > 20 and {len(drafts) for _, drafts in checked} >= {K}
    wrong = [(len(k), d, guess(k, len(d))) for k, d in checked if d != guess(k, len(d))]
    if not together:
        assert wrong == []
    else:  # the last row of a cached prefix belongs to the token that followed it there
        assert len(wrong) < len(checked) / 4


@pytest.mark.parametrize("late_seed", [None, 0])
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_answers_are_those_without_drafts(target, tmp_path, method, late_seed):
    life = Life(2)
    plain, _ = open_core(target, late_seed=late_seed)
    right = serve(plain, life, disturbed=False)
    make = write_eagle if method == "eagle" else write_eagle3
    facts = {} if method == "eagle" else {"layers": [1, 2, 3], "vocab": 120}
    folder = make(tmp_path / "draft", target, **facts)
    core, watched = open_with(target, folder, method, late_seed=late_seed)
    assert_same(serve(core, life, disturbed=late_seed is None), right, life)
    assert watched.num_drafts > 20


def test_a_network_sleeps_with_its_target(target, tmp_path):
    """Weights of both are released and loaded again; programs are recorded again."""
    folder = write_eagle3(tmp_path / "draft", target, layers=[1, 2, 3])
    guesses = []
    for sleeps in (False, True):
        core, watched = open_with(target, folder, "eagle3", enforce_eager=False)
        worker = core.executor.worker
        if sleeps:
            worker.sleep(["weights", "kv_cache"])
            assert worker.kv_cache_bytes() == 0
            worker.wake_up(["weights", "kv_cache"])
        run_requests(core, 290, together=True)
        guesses.append([drafts for _, drafts in watched.guesses])
    assert guesses[0] == guesses[1] and any(guesses[0])


def test_networks_that_cannot_draft_for_the_target_are_refused(target, tmp_path):
    config, tensors = read(write_eagle3(tmp_path / "draft", target, layers=[1, 2, 3]))
    for number, (changes, message) in enumerate(
        [
            ({"hidden_act": "relu9"}, "hidden_act='relu9'"),
            ({"twist": 2}, "twist"),
            ({"vocab_size": 299}, "vocab_size=299"),
            ({"fc_norm": True}, "fc_norm=True"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 9]}}, r"\[1, 9\]"),
            ({"norm_before_fc": True}, "missing input_norm.weight"),
        ]
    ):
        folder = write(tmp_path / str(number), config | changes, tensors)
        with pytest.raises(LoadError, match=message):
            open_with(target, folder, "eagle3")
    config, tensors = read(write_eagle3(tmp_path / "ids", target, layers=[1, 2, 3], vocab=90))
    offsets = tensors["d2t"]
    for number, (wrong, message) in enumerate(
        [
            (offsets[:-1], "89 entries for 90 ids"),
            (offsets[:1], "1 entries for 90 ids"),
            (offsets - 200, "ids that the target does not have"),
            (torch.cat([offsets[:-1], torch.tensor([300 - 89])]), "target does not have"),
            (torch.cat([offsets[1:2] + 9, offsets[1:]]), "ascending"),
        ]
    ):
        folder = write(tmp_path / f"ids{number}", config, tensors | {"d2t": wrong})
        with pytest.raises(LoadError, match=message):
            open_with(target, folder, "eagle3")
    other = make_checkpoint(tmp_path / "other", {"vocab_size": 310}, "llama", dtype="float32")
    with pytest.raises(LoadError, match="310 token ids and the model 300"):
        open_with(target, other, "draft_model")
    state = make_checkpoint(tmp_path / "state", {"vocab_size": 300}, "qwen3_5", dtype="float32")
    with pytest.raises(LoadError, match="recurrent"):
        open_with(target, state, "draft_model")


@pytest.mark.parametrize("spoiled", ["lm_head.weight", "norm.weight", "fc.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_network_of_nans_and_infinities_costs_drafts_only(target, tmp_path, spoiled, value):
    life = Life(2)
    plain, _ = open_core(target)
    right = serve(plain, life, disturbed=False)
    folder = write_eagle3(tmp_path / "draft", target, layers=[1, 2, 3], vocab=120)
    config, tensors = read(folder)
    tensors[spoiled][::2] = value
    write(folder, config, tensors)
    core, watched = open_with(target, folder, "eagle3", enforce_eager=False)
    assert_same(serve(core, life, disturbed=True), right, life)
    assert watched.num_drafts > 20
    drafted = [token for _, drafts in watched.guesses for token in drafts]
    assert drafted and all(0 <= token < 300 for token in drafted)
