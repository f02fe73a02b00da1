"""Pausing, sleeping and profiling a core: what becomes of requests, memory and answers."""

import json
from concurrent.futures import Future

import psutil
import pytest

from quire.config.args.engine_args import EngineArgs
from quire.engine.control_verbs import perform
from quire.engine.core.builder import build_core
from quire.engine.core.control import OF_THE_CORE
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.output_parts import FinishReason
from quire.errors import (
    EngineError,
    InvalidParameter,
    LoadError,
    NotBuiltYet,
    ProfilerAlreadyActive,
)
from quire.executor.weight_transfer.worker_methods import WeightMethods
from quire.executor.worker import Worker
from quire.params import SamplingParams
from quire.testing import make_checkpoint
from tests.engine.core.core_over_hashes import drain, expected, make_core, request

MIB = 2**20


def call(core, method, *args):
    answer = perform(core, method, args)
    return answer.result(timeout=0) if isinstance(answer, Future) else answer


def run(core, **params):
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, **params)
    core.add_request(EngineCoreRequest(7, list(range(3, 90)), params, seed=0, arrival_time=0.0))
    ids, ends = [], []
    while core.has_work:
        out = core.step()
        ids += out.token_ids
        ends += out.finished
    assert [end.reason for end in ends] == [FinishReason.LENGTH]
    return ids


# pausing


@pytest.mark.parametrize("depth", [1, 2])
def test_keep_freezes_and_goes_on_with_the_same_tokens(depth):
    core = make_core(depth=depth)
    core.add_request(request(0))
    before = list(core.step().token_ids)
    paused = perform(core, "pause_scheduler", ("keep",))
    assert paused.done() is (depth == 1), "with a step in flight it is not complete"
    tokens, ends = drain_paused(core)
    assert paused.done() and not ends
    before += tokens.get(0, [])
    core.add_request(request(1))
    assert not core.has_work
    call(core, "resume_scheduler")
    tokens, _ = drain(core)
    assert before + tokens[0] == expected(0)
    assert tokens[1] == expected(1)


def drain_paused(core):
    tokens, ends = {}, {}
    while core.has_work:
        out = core.step()
        for handle, token in zip(out.handles, out.token_ids, strict=True):
            tokens.setdefault(handle, []).append(token)
        ends.update((end.handle, end) for end in out.finished)
    return tokens, ends


@pytest.mark.parametrize("depth", [1, 2])
def test_wait_lets_the_running_finish_and_the_new_queue(depth):
    core = make_core(depth=depth)
    core.add_request(request(0))
    core.step()
    paused = perform(core, "pause_scheduler", ("wait",))
    core.add_request(request(1))
    assert call(core, "is_scheduler_paused") and not paused.done()
    _, ends = drain_paused(core)
    assert ends[0].reason is FinishReason.LENGTH and 1 not in ends and paused.done()
    call(core, "resume_scheduler")
    tokens, _ = drain(core)
    assert tokens[1] == expected(1)


def test_abort_ends_all_with_that_reason_and_the_new_queue():
    core = make_core()
    core.add_request(request(0))
    core.step()
    core.add_request(request(1))
    call(core, "pause_scheduler", "abort")
    core.add_request(request(2))
    _, ends = drain_paused(core)
    assert {h: e.reason for h, e in ends.items()} == dict.fromkeys((0, 1), FinishReason.ABORT)
    call(core, "resume_scheduler")
    tokens, ends = drain(core)
    assert tokens == {2: expected(2)} and set(ends) == {2}


@pytest.mark.parametrize(
    "again", [("pause_scheduler", "abort"), ("sleep", 0), ("sleep", 1)], ids=str
)
@pytest.mark.parametrize("first", [("pause_scheduler", "abort"), ("sleep", 0)], ids=str)
def test_what_waits_for_the_end_of_a_stop_is_not_ended_by_another(first, again):
    core = make_core()
    core.add_request(request(0))
    core.step()
    call(core, *first)
    core.add_request(request(1))
    call(core, *again)
    core.add_request(request(2))
    call(core, *again)
    _, ends = drain_paused(core)
    assert {h: e.reason for h, e in ends.items()} == {0: FinishReason.ABORT}
    call(core, "resume_scheduler")
    call(core, "wake_up")
    assert drain(core)[0] == {1: expected(1), 2: expected(2)}
    core.add_request(request(3))
    call(core, "pause_scheduler", "abort")
    _, ends = drain_paused(core)
    assert {h: e.reason for h, e in ends.items()} == {3: FinishReason.ABORT}, "a new stop"


def test_a_stop_may_be_made_harder_for_those_that_it_found():
    core = make_core()
    core.add_request(request(0))
    core.step()
    call(core, "pause_scheduler", "keep")
    core.add_request(request(1))
    call(core, "pause_scheduler", "abort")
    _, ends = drain_paused(core)
    assert {h: e.reason for h, e in ends.items()} == {0: FinishReason.ABORT}
    call(core, "resume_scheduler")
    assert drain(core)[0] == {1: expected(1)}


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_sleep_forgets_cached_blocks_at_every_level(level, mode):
    core = make_core()
    core.add_request(request(0, length=20, max_tokens=4))
    tokens, _ = drain(core)
    call(core, "sleep", level, mode)
    call(core, "wake_up")
    core.add_request(request(0, length=20, max_tokens=4))
    assert drain(core)[0] == tokens
    assert core.scheduler.counters.prefix_hits == 0
    core.add_request(request(0, length=20, max_tokens=4))
    assert drain(core)[0] == tokens
    assert core.scheduler.counters.prefix_hits > 0, "it would have been found"


def test_a_pause_that_is_ended_early_says_so():
    core = make_core()
    core.add_request(request(0))
    core.step()
    paused = perform(core, "pause_scheduler", ("wait",))
    call(core, "resume_scheduler")
    with pytest.raises(EngineError, match="ended before"):
        paused.result(timeout=0)
    assert drain(core)[0]


def test_clear_cache_forgets_and_the_frozen_compute_again():
    core = make_core()
    core.add_request(request(0, length=9))
    first = list(core.step().token_ids)
    call(core, "pause_scheduler", "keep", True)
    assert core.scheduler.counters.num_preemptions == 1 and core.scheduler.memory.pool.usage == 0
    call(core, "resume_scheduler")
    tokens, _ = drain(core)
    assert first + tokens[0] == expected(0, 9)


def test_anything_but_a_mode_level_tag_or_utility_is_refused():
    core = make_core()
    for method, *args in (
        ("pause_scheduler", "freeze"), ("sleep", 3), ("wake_up", ["kv"]), ("no_such_thing",),
        ("__init__",),
    ):  # fmt: skip
        with pytest.raises(InvalidParameter):
            call(core, method, *args)
    core.add_request(request(0))
    assert drain(core)[0] == {0: expected(0)}, "a refused call changes nothing"


def test_waking_does_not_end_a_pause():
    core = make_core()
    call(core, "pause_scheduler")
    call(core, "sleep", 0)
    assert call(core, "wake_up") is True
    assert call(core, "is_scheduler_paused") and not call(core, "is_sleeping")
    call(core, "resume_scheduler")
    assert not call(core, "is_scheduler_paused")


# sleeping: with a real model


WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "vocab_size": 8192}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("wide"), WIDE, dtype="bfloat16")


def plan_of(folder, **wishes):
    wishes = {"kv_cache_memory_bytes": 64 * MIB, "max_num_seqs": 4, "max_model_len": 256} | wishes
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **wishes).create_engine_config()


@pytest.fixture
def core(folder):
    core = build_core(plan_of(folder))
    yield core
    core.shutdown()


def resident():
    return psutil.Process().memory_info().rss


def touch_kv(core):
    """Make every page of the KV memory resident, as a full cache is."""
    cache = core.executor.worker.model_runner.kv_cache
    cache.zero(range(core.scheduler.config.num_blocks))


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back_and_the_answers_stay(core, level):
    worker = core.executor.worker
    weights, kv = worker.get_model().weight_bytes, worker.kv_cache_bytes()
    assert weights > 40 * MIB and kv > 60 * MIB
    right = run(core)
    touch_kv(core)
    awake = resident()
    call(core, "sleep", level)
    asleep = resident()
    assert call(core, "is_sleeping") and not core.has_work
    assert worker.kv_cache_bytes() == 0
    owed = kv + (weights if level == 2 else 0)
    assert awake - asleep > 0.9 * owed, f"{(awake - asleep) / MIB:.0f} of {owed / MIB:.0f} MiB"
    assert call(core, "wake_up") is True
    assert run(core) == right
    assert resident() < awake + 8 * MIB


@pytest.mark.parametrize("wishes", [{"enforce_eager": True}, {"async_scheduling": True}], ids=str)
def test_kept_requests_sleep_through_it(folder, wishes):
    core = build_core(plan_of(folder, **wishes))
    right = run(core)
    call(core, "reset_prefix_cache")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    core.add_request(EngineCoreRequest(1, list(range(3, 90)), params, seed=0, arrival_time=0.0))
    ids = []
    for level in (1, 2):
        while len(ids) < 4 * level:
            ids += core.step().token_ids
        asleep = perform(core, "sleep", (level, "keep"))
        while core.has_work:
            ids += core.step().token_ids
        asleep.result(timeout=0)
        call(core, "wake_up")
    while core.has_work:
        ids += core.step().token_ids
    assert ids == right
    core.shutdown()


def test_memory_comes_back_tag_by_tag(core):
    right = run(core)
    call(core, "sleep", 2)
    core.add_request(request(0, max_tokens=3))
    assert call(core, "wake_up", ["scheduling"]) is False, "there is nothing to schedule on"
    assert call(core, "wake_up", ["weights"]) is False
    assert call(core, "is_sleeping") and not core.has_work
    assert call(core, "wake_up", ["kv_cache"]) is True
    assert core.has_work
    while core.has_work:
        core.step()
    assert run(core) == right


def test_the_kv_cache_alone_goes_only_while_paused(core):
    right = run(core)
    with pytest.raises(EngineError, match="level=0"):
        call(core, "release_kv_cache_memory")
    call(core, "sleep", 0)
    call(core, "release_kv_cache_memory")
    assert core.executor.worker.kv_cache_bytes() == 0
    call(core, "wake_up")
    assert run(core) == right


def test_weights_that_cannot_be_read_again_leave_the_core_asleep(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "tiny")
    core = build_core(plan_of(folder))
    right = run(core)
    call(core, "sleep", 2)
    [file] = folder.glob("*.safetensors")
    aside = file.rename(tmp_path / "aside")
    with pytest.raises(LoadError):
        call(core, "wake_up")
    assert call(core, "is_sleeping")
    aside.rename(file)
    assert call(core, "wake_up") is True
    assert run(core) == right
    core.shutdown()


FREE = {
    "apply_model", "call", "check_adapter", "check_health", "get_model", "get_supported_tasks",
    "kv_cache_bytes", "profile", "reload_weights", "run_first_steps",
    "save_sharded_state", "compute_weight_checksums", "count_weight_changes", "settle_snapshot",
    "name_origin", "update_config",
}  # fmt: skip
"""Methods of workers that leave what the core knows of them as it is."""


def test_a_worker_s_methods_are_free_or_the_core_s_own():
    parts = (Worker, WeightMethods)
    public = {name for part in parts for name, entry in vars(part).items() if callable(entry)}
    assert {name for name in public if not name.startswith("_")} == FREE | OF_THE_CORE.keys()


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("sleep", (["weights", "kv_cache"], False)), ("wake_up", (["kv_cache"],)), ("close", ()),
        ("read_adapter", ("/a",)), ("keep_adapter", (None,)), ("drop_adapter", (1,)),
    ],
    ids=str,
)  # fmt: skip
def test_no_worker_changes_behind_the_core_s_back(core, method, args):
    right = run(core)
    memory = core.executor.worker.kv_cache_bytes()
    with pytest.raises(InvalidParameter, match=rf"method='{method}' .* Call .* of the engine\."):
        call(core, "collective_rpc", method, None, args)
    assert core.executor.worker.kv_cache_bytes() == memory > 0
    assert run(core) == right


def test_reloaded_weights_are_the_same(core):
    right = run(core)
    call(core, "collective_rpc", "reload_weights")
    assert run(core) == right
    assert call(core, "collective_rpc", "get_supported_tasks") == [("generate",)]


def test_blocks_of_the_weights_before_are_not_used_after_others_are_read(tmp_path):
    folders = [make_checkpoint(tmp_path / str(seed), "tiny", seed=seed) for seed in (0, 1)]
    other = build_core(plan_of(folders[1]))
    right = run(other)
    other.shutdown()
    core = build_core(plan_of(folders[0]))
    assert run(core) != right
    for file in folders[1].glob("*.safetensors"):
        (folders[0] / file.name).write_bytes(file.read_bytes())
    call(core, "collective_rpc", "reload_weights")
    assert run(core) == right
    core.shutdown()


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "not one", "of other shapes"])
def test_weights_that_do_not_fit_leave_the_core_with_its_own(tmp_path, damage):
    folder = make_checkpoint(tmp_path / "model", "tiny")
    core = build_core(plan_of(folder))
    right = run(core)
    [file] = folder.glob("*.safetensors")
    good = file.read_bytes()
    file.unlink()
    if damage == "of other shapes":
        other = make_checkpoint(tmp_path / "other", {"hidden_size": 64})
        file.write_bytes((other / file.name).read_bytes())
    elif damage != "missing":
        broken = {"empty": b"", "cut": good[: len(good) // 2], "not one": b"\xff" * len(good)}
        file.write_bytes(broken[damage])
    for _ in range(2):
        with pytest.raises(LoadError):
            call(core, "collective_rpc", "reload_weights")
        assert run(core) == right
    file.write_bytes(good)
    call(core, "collective_rpc", "reload_weights")
    assert run(core) == right
    core.shutdown()


# profiling


def profiled(folder, tmp_path, **fields):
    config = {
        "profiler": "torch",
        "torch_profiler_dir": str(tmp_path),
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        **fields,
    }
    return build_core(plan_of(folder, profiler_config=config))


def spans(path):
    events = json.loads(path.read_text())["traceEvents"]
    return sorted(e["name"] for e in events if str(e.get("name")).startswith("step "))


def test_a_profile_is_a_trace_of_the_steps(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "tiny")
    core = profiled(folder, tmp_path / "traces")
    run(core)
    call(core, "profile", True, "mine")
    with pytest.raises(ProfilerAlreadyActive):
        call(core, "profile", True)
    run(core)
    [path] = call(core, "profile", False)
    [file] = (tmp_path / "traces").iterdir()
    assert str(file) == path and file.name.startswith("mine_rank0_")
    assert len(spans(file)) == 16
    assert call(core, "profile", False) == [None], "none is running"
    core.shutdown()


def test_a_profile_of_some_steps_ends_itself(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "tiny")
    core = profiled(folder, tmp_path / "traces", delay_iterations=4, max_iterations=3)
    call(core, "profile", True)
    run(core)
    [path] = call(core, "profile", False)
    assert len(spans(next((tmp_path / "traces").iterdir()))) == 3
    assert path
    core.shutdown()


def test_without_a_profiler_it_is_refused(core):
    with pytest.raises(InvalidParameter, match="profiler_config"):
        call(core, "profile", True)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"profiler": "cuda", "torch_profiler_dir": "x"}, NotBuiltYet),
        ({"profiler": "torch"}, InvalidParameter),
        ({"profiler": "torch", "torch_profiler_dir": "x", "no": 1}, InvalidParameter),
        ({"profiler": "torch", "torch_profiler_dir": "x", "max_iterations": -1}, InvalidParameter),
        ({"profiler": "torch", "torch_profiler_dir": "x", "warmup_iterations": 2}, NotBuiltYet),
        ({"torch_profiler_dir": "x"}, InvalidParameter),
    ],
    ids=str,
)
def test_profiler_fields_that_cannot_be_are_refused(config, error):
    with pytest.raises(error):
        EngineArgs(profiler_config=config).create_engine_config()
