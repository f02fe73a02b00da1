"""The plan names the executor; what is built states what the scheduler and the core need."""

import ast
from pathlib import Path

import pytest

import quire
from quire.engine.core.builder import build_core, worker_config
from quire.errors import InvalidParameter, LoadError, NotBuiltYet
from quire.executor.backends import EXECUTORS, find_executor
from quire.models import read_spec
from quire.testing import make_checkpoint
from tests.executor.worker_cores import plan_of

SOURCE = Path(quire.__file__).parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "tiny", "gemma2", dtype="float32")


@pytest.mark.parametrize("given", [None, "uni", "mp", "external_launcher"])
def test_the_plan_says_which_executor_runs_it(folder, given):
    plan = plan_of(folder, distributed_executor_backend=given)
    assert plan.parallel.distributed_executor_backend == "uni"
    assert plan.parallel.distributed_executor_backend in EXECUTORS


def test_ray_runs_one_worker_as_it_runs_many(folder):
    plan = plan_of(folder, distributed_executor_backend="ray")
    assert plan.parallel.distributed_executor_backend == "ray"
    assert plan.parallel.ray is not None


@pytest.mark.parametrize(
    "wish",
    [
        {"decode_context_parallel_size": 2},
    ],
    ids=str,
)
def test_what_no_executor_does_is_refused_by_name(folder, wish):
    name = next(iter(wish))
    with pytest.raises(NotBuiltYet, match=f"^{name}="):
        plan_of(folder, **wish)


def groups_of(plan):
    memories = (block.mixer.memory for block in read_spec(plan.model.hf_config).blocks)
    return {(memory.kind, memory.window) for memory in memories}


def test_workers_state_what_the_core_is_made_for(folder):
    plan = plan_of(folder)
    executor = find_executor(plan.parallel)(worker_config(plan))
    facts = executor.facts
    assert facts.num_blocks == plan.memory.num_blocks and not facts.has_own_memory
    assert {(group.kind, group.window) for group in facts.kv_groups} == groups_of(plan)
    assert executor.needs_host_ids(quire.SamplingParams()) is False
    with pytest.raises(NotBuiltYet, match="no head for such requests"):
        executor.needs_host_ids(quire.PoolingParams())
    executor.shutdown()


def test_a_start_that_fails_leaves_torch_as_it_was(folder, tmp_path):
    import torch

    before = torch.get_num_threads()
    core = build_core(plan_of(folder))
    core.shutdown()
    assert torch.get_num_threads() == before
    broken = make_checkpoint(tmp_path, "tiny", "gemma2", dtype="float32")
    plan = plan_of(broken)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(LoadError):
        build_core(plan)
    assert torch.get_num_threads() == before


def test_logits_processors_that_cannot_be_are_refused_before_the_model_is_read(folder):
    plan = plan_of(folder, logits_processors=["no_such_module:Processor"], load_format="dummy")
    with pytest.raises(InvalidParameter, match="cannot be imported"):
        build_core(plan)


def names_in(path):
    tree = ast.parse(path.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return attributes | modules


def test_engines_see_workers_through_the_executor_and_workers_no_plan():
    for path in (SOURCE / "engine").rglob("*.py"):
        assert "model_runner" not in names_in(path), path
    for folder in ("executor", "runner", "models", "ops", "scheduling"):
        for path in (SOURCE / folder).rglob("*.py"):
            assert "quire.config.plan" not in names_in(path), path


WHOLE_PLAN = {
    *("as_vllm.stand_ins", "config.args.engine_args", "config.planning"),
    *("config.resolve.decisions", "config.resolve.resolve", "server.assemble"),
    *(
        "engine.launcher",
        "engine.core.builder",
        "engine.core.worker_program",
        "engine.core.documented_core",
        "engine.arguments",
    ),
    *("engine.llm_engine", "engine.async_llm", "engine.frontend.frontend"),
    *("engine.frontend.engine_attributes", "engine.stats.loggers", "engine.stats.engine_stats"),
    *("engine.process.core_main", "engine.process.core_pool", "engine.process.start_message"),
    *("engine.data_parallel.handshake", "engine.data_parallel.headless"),
    "engine.data_parallel.core_actor",
    "engine.client.inproc",
    *("server.fleet.api_server", "server.fleet.fleet"),
    *("server.fleet.port_server", "server.fleet.port_servers"),
}
"""Who may have the whole plan: they make it, send it, assemble from it, or show it to programs."""


def test_components_take_parts_of_the_plan():
    """A component that took the whole would depend on every option; see config/plan_parts.py."""
    taking = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for path in SOURCE.rglob("*.py")
        if "quire.config.plan" in names_in(path)
    }
    assert {name for name in taking if not name.startswith("bench.")} <= WHOLE_PLAN
