"""The parts of a plan that workers are built from, wherever they run."""

from __future__ import annotations

from functools import partial

from quire.config.plan import EnginePlan
from quire.executor.worker_config import WorkerConfig
from quire.hardware.cpu_list import parse_cpus
from quire.runner.sampling import find_logits_processors, make_logits_processors


def of_core(plan: EnginePlan, core: int) -> EnginePlan:
    """The plan of a core by its number: of its own workers' CPUs alone."""
    parallel = plan.parallel
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    first = core * size % len(parallel.thread_cpus)
    return plan.changed(thread_cpus=parallel.thread_cpus[first : first + size])


def cpus_of_core(plan: EnginePlan) -> frozenset[int]:
    """The logical CPUs of all workers of a core, whose own plan this is; empty: any."""
    lists = [parse_cpus(cpus) for cpus in plan.parallel.thread_cpus]
    return frozenset[int]().union(*lists) if all(lists) else frozenset()


def worker_config(plan: EnginePlan) -> WorkerConfig:
    """The part of a plan that the workers are built from. Raises InvalidParameter for a logits
    processor that cannot be imported.
    """
    processors = find_logits_processors(plan.sampling.logits_processors)
    return WorkerConfig(
        model=plan.model,
        parallel=plan.parallel,
        memory=plan.memory,
        steps=plan.steps,
        speculation=plan.speculation,
        adapters=plan.adapters,
        sampling=plan.sampling,
        make_processors=partial(make_logits_processors, processors, plan),
        plan=plan,
    )
