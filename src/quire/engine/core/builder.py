"""Builds an engine core from a plan; the parts get values from the plan, never the plan itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.config.adapter_plan import num_slots
from quire.config.plan import EnginePlan
from quire.distributed.expert_exchange import ExpertExchange, Group, Rounds
from quire.engine.core.core import EngineCore
from quire.engine.core.features import CoreFeature
from quire.engine.core.features.adapters import AdaptersOff, AdapterStore
from quire.engine.core.features.alike import ReadyFirst
from quire.engine.core.features.constrained_outputs import ConstrainedOutputs
from quire.engine.core.features.prompt_media import MediaOfPrompts
from quire.engine.core.step_pace import StepPace
from quire.engine.core.structured_outputs import vocabulary_source
from quire.engine.core.worker_program import worker_config
from quire.errors import InvalidParameter, NotBuiltYet
from quire.executor.abstract import BuiltExecutor
from quire.executor.backends import find_executor
from quire.executor.platform import Platform
from quire.executor.uniproc import LocalWorkers
from quire.grammar.compiler import GrammarCompiler
from quire.models.kv_pool import SNAPSHOT_SHARE
from quire.plugins import class_of_option
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import SchedulerConfig
from quire.step.transfers import CPU, STORAGE
from quire.tiers.kv_transfer_config import KVTransferConfig
from quire.tiers.plan import KVTierPlan

if TYPE_CHECKING:
    from quire.distributed.kv_connector.base import KVConnectorBase_V1
    from quire.engine.core.features.kv_connection import KVConnection
    from quire.engine.core.features.kv_tier import SharedIndex
    from quire.executor.kv_tier.connected_ranks import ConnectedRanks
    from quire.executor.kv_tier.connected_worker import ConnectedWorker


def build_core(
    plan: EnginePlan, target: Platform | None = None, group: Group | None = None
) -> EngineCore:
    """Build scheduler, executor and core; the executor loads the model.

    `target` None: the device that the plan names. `group` are the cores that share the experts,
    with expert parallelism; those of ranks meet where the plan says.
    """
    exchange = _exchange(plan, group) if plan.parallel.is_lock_step else None
    return core_over(plan, open_executor(plan, target, exchange), exchange)


def open_executor(
    plan: EnginePlan, target: Platform | None = None, exchange: ExpertExchange | None = None
) -> BuiltExecutor:
    """Start the workers of a plan, which load the model."""
    backend = find_executor(plan.parallel)
    return backend(worker_config(plan), platform=target, exchange=exchange)


def core_over(
    plan: EnginePlan, executor: BuiltExecutor, exchange: ExpertExchange | None = None
) -> EngineCore:
    """Build the core of a plan on existing workers."""
    core = EngineCore(**core_parts(plan, executor, exchange))
    if isinstance(executor, LocalWorkers):  # programs reach the models of these
        for worker in executor.workers:
            worker.weights.on_change = core.note_changed_weights
    return core


def core_parts(
    plan: EnginePlan, executor: BuiltExecutor, exchange: ExpertExchange | None = None
) -> dict[str, Any]:
    """Parts of an `EngineCore`, by the names of its arguments."""
    facts, worker = executor.facts, worker_config(plan)
    tier = plan.memory.kv_tier
    index = None
    if tier is not None:
        from quire.engine.core.features.kv_tier import SharedIndex  # few engines have a tier

        index = SharedIndex(executor, tier.store_threshold, tier.max_tracker_size)
    connector = plan.memory.kv_connector
    connected = None if connector is None else _connection(plan, connector, executor)
    connection = None if connected is None else connected[0]
    scheduler = _scheduler_class(plan.parallel.scheduler_cls)(
        SchedulerConfig(
            steps=plan.steps,
            max_len=worker.max_len,
            key_size=worker.key_size,
            num_blocks=facts.num_blocks,
            groups=facts.kv_groups,
            shares_blocks=plan.memory.enable_prefix_caching,
            snapshot_interval=plan.memory.snapshot_interval or worker.max_len,
            num_snapshot_blocks=int(SNAPSHOT_SHARE * facts.num_blocks),
            num_adapter_slots=num_slots(plan.adapters),
            num_drafts=worker.num_drafts,
            max_drafts=None if plan.speculation is None else plan.speculation.max_drafts,
            reports_drafts=plan.sampling.draft_reports != "none",
            encoder_rows=facts.media.num_rows,
            micro_batches=plan.parallel.mesh.pp,
        ),
        tier=index,
        connection=connection,
    )
    if connected is not None:
        connected[0].attach(scheduler, connected[1])
    is_alike = plan.parallel.launched is not None
    adapters: CoreFeature = AdaptersOff()
    if plan.adapters is not None:
        most = plan.adapters.max_cpu_loras
        # launched engines read adapters in the same step, as they have to plan the same
        adapters = AdapterStore(scheduler, executor, most, reads_aside=not is_alike)
    grammars = GrammarCompiler(
        vocabulary_source(plan.model, plan.sampling),
        plan.sampling.structured_outputs,
        plan.parallel.num_threads,
    )
    grammars.prepare()
    features = [
        ConstrainedOutputs(grammars, scheduler),
        adapters,
        MediaOfPrompts(facts.media),
        *_kv_tier(tier, scheduler, executor, index),
        *([] if connection is None else [connection]),
        *_kv_events(plan, scheduler, adapters, index, connection),
    ]
    return {
        "scheduler": scheduler,
        "executor": executor,
        "depth": plan.steps.max_steps_in_flight,
        "log_stats": plan.serving.log_stats,
        "has_own_memory": facts.has_own_memory,
        "features": [*features, ReadyFirst(scheduler, features)] if is_alike else features,
        "lock_step": _rounds(plan, executor, exchange),
        "pace": None if plan.steps.max_stall_s is None else StepPace(plan.steps.max_stall_s),
    }


def _kv_tier(
    plan: KVTierPlan | None,
    scheduler: Scheduler,
    executor: BuiltExecutor,
    index: SharedIndex | None,
) -> list[CoreFeature]:
    if plan is None or index is None:
        return []
    from quire.engine.core.features.kv_tier import KVTier

    return [KVTier(scheduler, executor, index, fails=plan.fails)]


def _connection(
    plan: EnginePlan, config: KVTransferConfig, executor: BuiltExecutor
) -> tuple[KVConnection, ConnectedWorker | ConnectedRanks]:
    from quire.engine.core.features.kv_connection import KVConnection  # few engines have one

    first: KVConnectorBase_V1
    connected: ConnectedWorker | ConnectedRanks
    if isinstance(executor, LocalWorkers) and len(executor.workers) == 1:
        [(first, connected)] = executor.collective_rpc("open_connector", (plan,), {})
    else:
        from quire.executor.kv_tier.connected_ranks import connect_ranks

        first, connected = connect_ranks(plan, config, executor, worker_config(plan).key_size)
    if first.reads_steps and plan.speculation is not None:
        hint = (
            "What a step computes is not known before drafts are verified. Leave one of them out."
        )
        raise NotBuiltYet("kv_transfer_config", f"{config.kv_connector} with drafts", hint)
    fails = config.kv_load_failure_policy == "fail"
    return KVConnection(first, fails=fails), connected


def _kv_events(
    plan: EnginePlan,
    scheduler: Scheduler,
    adapters: CoreFeature,
    index: SharedIndex | None,
    connection: KVConnection | None,
) -> list[CoreFeature]:
    events, tier = plan.memory.kv_events, plan.memory.kv_tier
    if events is None:
        return []
    from quire.engine.core.features.kv_events import KVEvents, open_publisher

    publishes_files = tier is not None and tier.disk is not None and tier.disk.publishes
    feature = KVEvents(
        scheduler,
        open_publisher(events),
        rank=events.rank,
        is_cleared=events.num_deaths > 0,
        adapter_of=adapters.asked_by if isinstance(adapters, AdapterStore) else None,
        tier_contents=tuple if index is None else index.contents,
        media=(CPU, STORAGE) if publishes_files else (CPU,),
        of_connector=tuple if connection is None else connection.take_events,
    )
    if index is not None:
        index.listeners.append(feature)
    return [feature]


def _scheduler_class(name: str | None) -> type[Scheduler]:
    """The class that plans steps. Raises InvalidParameter for what is not one."""
    if name is None:
        return Scheduler
    hint = "Schedulers that were written for vLLM have no counterpart."
    return class_of_option("scheduler_cls", name, Scheduler, hint)


def _exchange(plan: EnginePlan, group: Group | None) -> ExpertExchange | None:
    """The exchange of a core's one worker; None where its ranks have theirs."""
    if group is not None:
        from quire.executor.ranks.rounds import exchange_of  # few cores share experts

        return exchange_of(worker_config(plan), group)
    if plan.parallel.experts_at is None:
        raise InvalidParameter(
            "enable_expert_parallel", True, "cores that share experts are processes of their own",
            "Use LLM, AsyncLLM or quire serve, which start them.",
        )  # fmt: skip
    return None


def _rounds(
    plan: EnginePlan, executor: BuiltExecutor, exchange: ExpertExchange | None
) -> Rounds | None:
    """The rounds of a core that shares experts; None: it steps independently."""
    if exchange is not None or not plan.parallel.is_lock_step:
        return exchange
    from quire.executor.ranks.multiproc import MultiprocExecutor  # cores without ranks need neither
    from quire.executor.ranks.rounds import RoundsOfRanks

    assert isinstance(executor, MultiprocExecutor), "no other executor has ranks that share experts"
    return RoundsOfRanks(executor)
