"""Stages of a model, one after the other: the bits of the whole model, with recorded steps, drafts
and grammars, and with several steps in flight, where ids come back later.
"""

import msgspec
import pytest

from quire import EngineArgs
from quire.engine.core.builder import core_over, worker_config
from quire.errors import LoadError, NotBuiltYet
from quire.executor.stages import open_stages
from quire.executor.uniproc import open_uniproc
from quire.models.parameters import parameters
from quire.runner.forward.forward import RecordedForward
from quire.step.faults import RowFailures
from quire.step.plan import StepPlan
from quire.testing import make_checkpoint
from tests.executor.test_shared_drafts import CROWDED, NGRAM, cycling, grammars
from tests.executor.worker_cores import open_core, plan_of, requests, same_bits, serve
from tests.models.hostile.models import HOSTILE, write
from tests.support.needs import needs_native

pytestmark = needs_native


def staged_core(folder, sizes, depth=1, **wishes):
    plan = plan_of(folder, **wishes)
    steps = msgspec.structs.replace(plan.steps, max_steps_in_flight=depth)
    plan = msgspec.structs.replace(plan, steps=steps)
    return core_over(plan, open_stages(worker_config(plan), sizes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    shape = {"num_hidden_layers": 4}
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), shape, "qwen3", dtype="float32")


@pytest.fixture(scope="module")
def right(folder):
    core = open_core(folder, 1)
    found = serve(core)
    core.shutdown()
    return found


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (1, 1, 2), (4,)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_stages_answer_as_the_whole(folder, right, sizes, depth):
    core = staged_core(folder, sizes, depth)
    forwards = [worker.model_runner._forward for worker in core.executor.workers]
    assert all(isinstance(forward, RecordedForward) for forward in forwards)
    assert same_bits(serve(core), right)
    core.shutdown()


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "bfloat16", "enforce_eager": True},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
    ],
    ids=["eager", "int8", "int4"],
)
def test_stages_of_rounded_weights(folder, kind):
    found = []
    for core in (open_core(folder, 1, **kind), staged_core(folder, (2, 2), **kind)):
        found.append(serve(core, requests(4)))
        core.shutdown()
    assert same_bits(*found)


FAMILIES = (
    *("gpt2", "bloom", "mixtral", "deepseek_v2", "qwen3_next", "jamba", "gemma2", "granite"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_stages_of_families(tmp_path, name):
    """Learned positions, norms of embeddings, experts, latents, recurrent states, windows."""
    write(HOSTILE[name], tmp_path)
    core = open_core(tmp_path, 1)
    count = len(core.executor.worker.get_model().spec.blocks)
    one = serve(core, small(4))
    core.shutdown()
    for depth in (1, 3):
        core = staged_core(tmp_path, (1, count - 1), depth)
        assert same_bits(serve(core, small(4)), one)
        core.shutdown()


def small(count):
    """Requests within the vocabulary of the hostile models."""
    for request in requests(count):
        yield msgspec.structs.replace(
            request, prompt_token_ids=[3 + t % 90 for t in request.prompt_token_ids]
        )


def test_each_stage_has_its_layers_and_no_more(folder):
    whole, staged = open_core(folder, 1), staged_core(folder, (1, 3))
    model, cache = whole.executor.worker.get_model(), whole.executor.worker.kv_cache_bytes()
    first, last = (worker.get_model() for worker in staged.executor.workers)
    table = {"embed.weight"}
    names, early, late = (set(parameters(each.spec)) for each in (model, first, last))
    assert early == table | {name for name in names if name.startswith("layers.0.")}
    assert late == names - early | table, "the head is the table"
    shared = 4 * model.spec.vocab * model.spec.dim
    assert first.weight_bytes + last.weight_bytes == model.weight_bytes + shared
    assert [w.kv_cache_bytes() for w in staged.executor.workers] == [cache // 4, 3 * cache // 4]
    for core in (whole, staged):
        core.shutdown()


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("config", [None, NGRAM], ids=["none", "ngram"])
def test_requests_that_lose_their_rows(folder, config, depth):
    """With ids that come when their row is another request's, or the same one's again."""
    wishes = CROWDED if config is None else CROWDED | {"speculative_config": config}
    one = open_core(folder, 1, **wishes)
    found = [serve(one, cycling(max_tokens=30))]
    one.shutdown()
    core = staged_core(folder, (2, 2), depth, **wishes)
    found.append(serve(core, cycling(max_tokens=30)))
    core.shutdown()
    assert same_bits(*found)
    assert found[1].num_preemptions > 0
    assert config is None or found[1].num_accepted > 10


@pytest.mark.parametrize("config", [None, NGRAM], ids=["plain", "ngram"])
def test_grammars(config):
    found = []
    for is_staged in (False, True):
        plan = EngineArgs(
            device="cpu", max_num_seqs=3, max_num_batched_tokens=32, max_model_len=128,
            num_gpu_blocks_override=40, speculative_config=config,
        ).create_engine_config()  # fmt: skip
        layers = plan.model.hf_config["num_hidden_layers"]
        own = worker_config(plan)
        executor = open_stages(own, (2, layers - 2)) if is_staged else open_uniproc(own)
        core = core_over(plan, executor)
        found.append(serve(core, grammars()))
        core.shutdown()
    assert same_bits(*found)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["named", "unnamed"])
def test_a_fault_on_one_stage_costs_its_request_alone(folder, right, rank, kind, depth):
    core = staged_core(folder, (2, 2), depth)
    worker = core.executor.workers[rank]
    launch = worker.launch

    def failing(plan, *given):
        launched = launch(plan, *given)
        rows = worker.model_runner.rows
        planned = [*plan.decode_rows, *(chunk.row for chunk in plan.chunks)]
        bad = [row for row in planned if rows.handles[row] == 2]
        if bad and rows.num_tokens[bad[0]] >= rows.num_prompt[bad[0]] + 3:
            raise RowFailures({bad[0]: "named"}) if kind == "named" else RuntimeError("unnamed")
        return launched

    worker.launch = failing
    found = serve(core)
    core.shutdown()
    cut = found.tokens.pop(2)
    assert 0 < len(cut) < len(right.tokens[2]) and cut == right.tokens[2][: len(cut)]
    assert found.tokens == {h: ids for h, ids in right.tokens.items() if h != 2}


@pytest.mark.parametrize(
    ("sizes", "wishes", "why"),
    [
        ((2, 1), {}, "are not the 4 layers"),
        ((4, 0), {}, "one layer or more"),
    ],
)
def test_what_is_not_built_is_refused(folder, sizes, wishes, why):
    with pytest.raises((LoadError, NotBuiltYet), match=why):
        staged_core(folder, sizes, **wishes)


@pytest.mark.parametrize(
    ("name", "sizes", "why"),
    [("gemma3n", (1,), "several streams"), ("zamba2", (1,), "share a transformer")],
)
def test_layers_that_need_more_than_hidden_states_are_refused(tmp_path, name, sizes, why):
    write(HOSTILE[name], tmp_path)
    plan = plan_of(tmp_path)
    count = plan.model.hf_config.get("text_config", plan.model.hf_config)["num_hidden_layers"]
    with pytest.raises(LoadError, match=why):
        open_stages(worker_config(plan), (*sizes, count - sum(sizes)))


def test_a_step_that_runs_again_after_later_ones_is_not_prepared_again(tmp_path):
    """Its blocks may have been written since, and its transfers have begun."""
    folder = make_checkpoint(tmp_path, {"num_hidden_layers": 2}, "llama", dtype="float32")
    core = open_core(folder, 1)
    runner, zeroed = core.executor.worker.model_runner, []
    runner.kv_cache.zero = zeroed.append
    for step in (1, 2, 1, 2, 3):
        runner.launch(StepPlan(step, [], [], [], [], [], zero_blocks=[step]))
    assert zeroed == [[1], [2], [3]]
    core.shutdown()
