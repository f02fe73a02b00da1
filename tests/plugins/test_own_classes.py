"""Classes of the user's own for scheduler and executor, behind the interfaces that are there."""

import pytest

from quire import LLM, SamplingParams
from quire.config.args.engine_args import EngineArgs
from quire.errors import InvalidParameter
from quire.executor.backends import executor_class_of
from quire.executor.uniproc import open_uniproc
from quire.scheduling.scheduler import Scheduler

PARAMS = SamplingParams(temperature=0, max_tokens=3)


class CountingScheduler(Scheduler):
    num_steps = 0

    def schedule(self, *arguments):
        type(self).num_steps += 1
        return super().schedule(*arguments)


def open_noted(config, **named):
    executor = open_uniproc(config, **named)
    executor.mark = "own"
    return executor


def own_executor(llm):
    return llm.llm_engine.model_executor


def test_own_scheduler_and_executor_run_the_steps():
    module = __name__
    llm = LLM(scheduler_cls=CountingScheduler, distributed_executor_backend=f"{module}.open_noted")
    plan = llm.llm_engine.vllm_config
    assert plan.parallel.scheduler_cls == f"{module}:CountingScheduler"
    assert plan.parallel.distributed_executor_backend == f"{module}:open_noted"
    assert executor_class_of(plan) is open_noted
    [found] = llm.generate("The sun", PARAMS)
    assert CountingScheduler.num_steps >= len(found.outputs[0].token_ids) == 3
    assert own_executor(llm).mark == "own"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "scheduler_cls.*cannot be"),
        ({"scheduler_cls": dict}, "must be a subclass of quire.scheduling.scheduler.Scheduler"),
        ({"scheduler_cls": "json:JSONDecoder"}, "that were written for vLLM have no counterpart"),
        ({"distributed_executor_backend": "json:absent"}, "json has no absent"),
        ({"distributed_executor_backend": "json.__name__"}, "must be an executor's class"),
        ({"distributed_executor_backend": dict}, "must be an executor's class"),
    ],
)
def test_other_classes_are_refused(given, why):
    with pytest.raises(InvalidParameter, match=why):
        LLM(**given)


@pytest.mark.parametrize(
    "option",
    ["scheduler_cls", "worker_cls", "worker_extension_cls", "distributed_executor_backend"],
)
def test_modules_that_are_not_there_are_refused_before_anything_starts(option):
    with pytest.raises(InvalidParameter, match=f"{option}=.*no module named 'json.absent'"):
        EngineArgs(**{option: "json.absent.Class"}).create_engine_config()


@pytest.mark.parametrize("name", ["Worker", "", ".Worker", "json."])
def test_workers_of_a_class_without_a_module_are_refused(name):
    with pytest.raises(InvalidParameter, match="worker_cls"):
        EngineArgs(worker_cls=name).create_engine_config()


def test_a_class_without_a_name_is_refused():
    class Local(Scheduler):
        """Nobody else can import it."""

    with pytest.raises(InvalidParameter, match="must be able to import it by name"):
        EngineArgs(scheduler_cls=Local).create_engine_config()


def test_names_that_are_not_of_classes_are_refused_as_before():
    with pytest.raises(InvalidParameter, match="a class, or its name as 'module.Class'"):
        EngineArgs(scheduler_cls="fcfs").create_engine_config()
    with pytest.raises(InvalidParameter, match="one of uni, mp, external_launcher, ray"):
        EngineArgs(distributed_executor_backend="slurm").create_engine_config()
