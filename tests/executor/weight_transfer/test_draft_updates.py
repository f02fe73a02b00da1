"""Updates of networks that draft: the weights of a start with them, and answers that stay."""

import pytest

from quire.errors import LoadError, WeightMismatch, WeightUpdateError
from quire.testing import make_checkpoint
from tests.executor.weight_transfer.test_updates import begin, opened, send, tensors_of, update
from tests.executor.worker_cores import same_bits, serve
from tests.runner.drafting.draft_checkpoints import write_eagle3

SHAPE = {
    "num_hidden_layers": 3, "vocab_size": 384, "hidden_size": 64, "head_dim": 16,
    "intermediate_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
COUNTS = {"num_speculative_tokens": 2, "num_speculative_tokens_per_batch_size": [[1, 99, 2]]}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("target"), SHAPE, "llama", 3, dtype="float32")


@pytest.fixture(scope="module", params=["draft_model", "eagle3"])
def drafts(request, target, tmp_path_factory):
    """The method, and two networks that draft by it, with other weights."""
    base = tmp_path_factory.mktemp(request.param)
    if request.param == "draft_model":
        shape = SHAPE | {"num_hidden_layers": 1}
        made = [make_checkpoint(base / str(s), shape, "llama", s, "float32") for s in (5, 6)]
    else:
        made = [write_eagle3(base / str(s), target, vocab=80, seed=s) for s in (5, 6)]
    return request.param, *made


def with_drafts(target, method, folder, num_workers=1):
    config = {"method": method, "model": str(folder), **COUNTS}
    core = opened(target, num_workers, speculative_config=config)
    core.init_weight_transfer_engine({})
    return core


def begin_drafts(core):
    future = core.start_weight_update(is_draft=True)
    while not future.done():
        core.step()
    future.result()


def update_drafts(core, pairs):
    begin_drafts(core)
    send(core, pairs)
    core.prepare_weight_update()
    core.commit_weight_update()


def tensors_for(method, first, second):
    """The second network's tensors, with the ids of the first one's, which are not weights."""
    new = tensors_of(second)
    return new | {n: t for n, t in tensors_of(first).items() if n in ("d2t", "t2d")}


def test_the_network_that_drafts_gets_other_weights(target, drafts):
    method, first, second = drafts
    core = with_drafts(target, method, first)
    right, before = serve(core), core.compute_weight_checksums()
    new = tensors_for(method, first, second)
    update_drafts(core, new.items())
    after = core.compute_weight_checksums()
    changed = {name for name in after if after[name] != before[name]}
    assert changed and all(":draft." in name for name in changed)
    if method == "draft_model":
        other = with_drafts(target, method, second)
        assert other.compute_weight_checksums() == after
        other.shutdown()
    assert same_bits(serve(core), right)
    update_drafts(core, tensors_of(first).items())
    assert core.compute_weight_checksums() == before
    core.shutdown()


def test_drafts_that_fail_end_in_refusals_until_they_have_come(target, drafts):
    method, first, second = drafts
    core = with_drafts(target, method, first)
    right = serve(core)
    new = tensors_for(method, first, second)
    place = next(name for name in new if name.endswith("o_proj.weight"))
    nan = new[place].clone()
    nan.view(-1)[3] = float("nan")
    begin_drafts(core)
    with pytest.raises(LoadError, match="NaN"):
        send(core, (new | {place: nan}).items())
    if method == "draft_model":  # whose head and embedding have been written
        assert "a mixture" in core.refusal
        future = core.start_weight_update()
        with pytest.raises(WeightUpdateError, match="network that drafts are a mixture"):
            future.result()
        update_drafts(core, new.items())
    assert core.refusal is None
    assert same_bits(serve(core), right)
    if method == "eagle3":
        for wrong in (new["d2t"] + 1, new["d2t"].int() + 1, new["d2t"][1:]):
            begin_drafts(core)
            with pytest.raises(WeightMismatch, match="d2t is not a weight"):
                send(core, (new | {"d2t": wrong}).items())
    core.shutdown()


def test_the_target_is_updated_beside_its_drafts(target, tmp_path):
    other = make_checkpoint(tmp_path / "other", SHAPE, "llama", 4, dtype="float32")
    core = with_drafts(target, "draft_model", target, num_workers=2)
    begin(core)
    core.abandon_weight_update("over")
    update(core, tensors_of(other).items())
    update_drafts(core, tensors_of(other).items())
    sums = core.compute_weight_checksums()
    right = serve(core)
    core.shutdown()
    again = with_drafts(other, "draft_model", other, num_workers=2)
    assert again.compute_weight_checksums() == sums
    found = serve(again)
    assert same_bits(found, right) and found.num_accepted == right.num_accepted > 0
    again.shutdown()
