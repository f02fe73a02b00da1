"""Engines in a real Ray cluster of two and three nodes of this machine.

    python -m tests.clusters.run [--only WORD,WORD]

Prints a line for each case and exits with 1 if one fails. It needs `pip install ray` (and for two
cases ray[data,serve]); the nodes are raylets of one CPU each, on one machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("RAY_worker_niceness", "0")  # cores inherit it from Ray's workers
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # its own 40 are few on a busy machine

import psutil
import ray
import zmq
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from transformers import AutoModelForCausalLM

from quire import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    SamplingParams,
    initialize_ray_cluster,
)
from quire.engine import DPEngineCoreActor, EngineZmqAddresses
from quire.errors import InvalidParameter
from quire.params import RequestOutputKind
from quire.testing import make_checkpoint
from quire.trainers.clients import RayWeightSyncClient
from quire.trainers.senders import IPCTrainerInitInfo, WeightTransferTrainerFactory
from quire.trainers.sources import ModuleSource

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 400,
    "max_model_len": 256,
    "cpu_threads": 1,
}
RAY = {**SMALL, "data_parallel_backend": "ray", "data_parallel_size": 2}
PROMPTS = ["def add(a, b):", "import os\n\n", "class Stack:\n    def __init__(self", "x = ["]
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=20)
NUM_STREAMS, NUM_TOKENS = 32, 200
NODE_TRIES = 4


@contextmanager
def cluster(num_nodes: int) -> Iterator[Cluster]:
    """A cluster that this process is connected to."""
    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        for _ in range(num_nodes - 1):
            add_node(found)
        ray.init(address=found.address, log_to_driver=False)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def add_node(nodes: Cluster, num_cpus: int = 1) -> Any:
    """Add a node, from the main thread alone; Ray gives it 30 s, too few for a busy machine."""
    for _ in range(NODE_TRIES - 1):
        with suppress(Exception):
            return nodes.add_node(num_cpus=num_cpus)
    return nodes.add_node(num_cpus=num_cpus)


def texts(llm: LLM) -> list[str]:
    return [each.outputs[0].text for each in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def expected() -> list[str]:
    """The texts of an engine without Ray."""
    with LLM(**SMALL) as llm:
        return texts(llm)


# offline


def offline(nodes: Cluster) -> None:
    """Two cores on two nodes give the texts of one engine, and leave nothing."""
    with LLM(**RAY, data_parallel_size_local=1) as llm:
        assert texts(llm) == expected()
        client = llm.llm_engine.front_end.client
        pids = [client.core_status(rank).pid for rank in (0, 1)]
        parents = [psutil.Process(pid).ppid() for pid in pids]
        places = {actor_place(pid) for pid in parents}
        assert len(places) == 2, "one core on each node"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    wait_for(lambda: ray.available_resources().get("CPU") == 2)


def too_small(nodes: Cluster) -> None:
    """A cluster without room is refused at once, with its room."""
    for wishes in ({"data_parallel_size": 3}, {"data_parallel_size_local": 2}):
        try:
            LLM(**{**RAY, **wishes})
        except InvalidParameter as error:
            assert "room for" in str(error), error
        else:
            raise AssertionError("it started")


def two_engines(nodes: Cluster) -> None:
    """Two engines in one cluster at the same time."""
    one = {**RAY, "data_parallel_size": 1}
    with LLM(**one) as first, LLM(**one) as second:
        assert texts(first) == texts(second) == expected()


def groups(nodes: Cluster) -> None:
    """initialize_ray_cluster takes a given, the current or a new group."""

    class Config:
        world_size = 1
        placement_group = None

    config = Config()
    made = initialize_ray_cluster(config)
    assert config.placement_group is made
    assert initialize_ray_cluster(config) is made
    ray.util.remove_placement_group(made)
    given = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="SPREAD")
    ray.get(given.ready(), timeout=30)
    os.environ["QUIRE_RAY_BUNDLE_INDICES"] = "1"
    try:
        config.placement_group = given
        assert initialize_ray_cluster(config) is given
        os.environ["QUIRE_RAY_BUNDLE_INDICES"] = "2"
        try:
            initialize_ray_cluster(config)
        except InvalidParameter as error:
            assert "QUIRE_RAY_BUNDLE_INDICES" in str(error)
        else:
            raise AssertionError("there is no bundle 2")
    finally:
        del os.environ["QUIRE_RAY_BUNDLE_INDICES"]
        ray.util.remove_placement_group(given)


def environment(nodes: Cluster) -> None:
    """Variables that are named travel to cores and ranks, neither keys nor any others."""
    wanted = {"QUIRE_RAY_EXTRA_ENV_VARS_TO_COPY": "OF_A_CASE", "OF_A_CASE": "x"}
    unwanted = {"QUIRE_API_KEY": "a secret", "OF_ANOTHER": "y"}
    os.environ.update(wanted | unwanted)
    try:
        with LLM(**{**RAY, "data_parallel_size": 1}) as llm:
            processes = [psutil.Process(llm.llm_engine.front_end.client.core_status(0).pid)]
            found = [each.environ() for each in processes]
        with LLM(**WORKERS, **TWO):
            found += [rank_process(rank).environ() for rank in (0, 1)]
    finally:
        for name in wanted | unwanted:
            del os.environ[name]
    for each in found:
        assert each["OF_A_CASE"] == "x"
        assert not unwanted.keys() & each.keys()


def actor_by_hand(nodes: Cluster) -> None:
    """A core's actor that a program makes itself: the core reports to its sockets, and the actor
    tells how it has ended.
    """
    plan = EngineArgs(**SMALL).create_engine_config()
    with zmq.Context() as context, TemporaryDirectory() as folder:
        addresses = EngineZmqAddresses(f"ipc://{folder}/in", f"ipc://{folder}/out")
        with context.socket(zmq.ROUTER) as to_core, context.socket(zmq.PULL) as from_core:
            to_core.bind(addresses.input)
            from_core.bind(addresses.output)
            actor = ray.remote(DPEngineCoreActor).options(max_concurrency=2)
            handle = actor.remote(plan, True, addresses)
            pid = ray.get(handle.wait_for_init.remote(), timeout=60)
            ending = handle.run.remote()
            assert to_core.poll(120_000), "the core has connected"
            os.kill(pid, signal.SIGKILL)
            assert ray.get(ending, timeout=30).code == -signal.SIGKILL
            ray.kill(handle)


def weight_updates(nodes: Cluster) -> None:
    """Two actors that are an `LLM` get a trainer's weights, and answer as an engine of these."""
    with TemporaryDirectory() as folder:
        shape = {"num_hidden_layers": 2, "vocab_size": 300}
        first, second = (
            str(make_checkpoint(f"{folder}/{seed}", shape, "qwen3", seed, "float32"))
            for seed in (0, 1)
        )
        wishes = {**SMALL, "skip_tokenizer_init": True, "enable_multiprocessing": True}
        kind = ray.remote(LLM).options(num_cpus=0)
        updated = {**wishes, "weight_transfer_config": {"backend": "ipc"}}
        actors = [kind.remote(first, **updated) for _ in range(2)]
        before = [drawn_ids(actor) for actor in actors]
        sender = WeightTransferTrainerFactory.trainer_init(
            IPCTrainerInitInfo(),
            client=RayWeightSyncClient(actors),
            source=ModuleSource(AutoModelForCausalLM.from_pretrained(second, dtype="float32")),
        )
        sender.send_weights("second")
        after = [drawn_ids(actor) for actor in actors]
        sender.shutdown()
        for actor in actors:
            ray.get(actor.close.remote(), timeout=60)
            ray.kill(actor)
        actor = kind.remote(second, **wishes)
        right = drawn_ids(actor)
        ray.kill(actor)
        assert after == [right, right]
        assert before[0] == before[1] != right


def drawn_ids(actor: Any) -> list[int]:
    """The ids that an engine in an actor draws after a prompt of ids."""
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=20, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(3, 20))}
    [output] = ray.get(actor.generate.remote(prompt, params, use_tqdm=False), timeout=120)
    return list(output.outputs[0].token_ids)


# workers

WORKERS = {**SMALL, "distributed_executor_backend": "ray"}
TWO = {"tensor_parallel_size": 2}


def workers(nodes: Cluster) -> None:
    """One rank, two that share layers and two stages, each behind an actor, on two nodes."""
    right = expected()
    for sizes in ({}, TWO, {"pipeline_parallel_size": 2}):
        with LLM(**WORKERS, **sizes) as llm:
            assert texts(llm) == right, sizes
            assert llm.collective_rpc("check_health") == [None] * (2 if sizes else 1)
    wait_for(lambda: ray.available_resources().get("CPU") == 2)


def workers_of_placed_cores(nodes: Cluster) -> None:
    """A core that Ray places, whose ranks are behind actors, too: its CPUs are reserved once."""
    more = add_node(nodes, 2)
    try:
        wait_for(lambda: ray.available_resources().get("CPU") == 4)
        wishes = {**RAY, **TWO, "distributed_executor_backend": "ray", "data_parallel_size": 1}
        with LLM(**wishes) as llm:
            assert texts(llm) == expected()
            assert llm.collective_rpc("check_health") == [None, None]
            assert ray.available_resources().get("CPU") == 2
        wait_for(lambda: ray.available_resources().get("CPU") == 4)
    finally:
        nodes.remove_node(more)


def in_the_current_group(nodes: Cluster) -> None:
    """An engine in an actor of a placement group, whose bundles it takes as it is told."""
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}], strategy="SPREAD")
    ray.get(group.ready(), timeout=30)
    place = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0, placement_group_capture_child_tasks=True
    )
    environment = {"env_vars": {"QUIRE_RAY_BUNDLE_INDICES": "1,0"}}
    kind = ray.remote(Inside).options(
        num_cpus=0, scheduling_strategy=place, runtime_env=environment
    )
    for more in ({}, {"enable_multiprocessing": True}):
        actor = kind.remote(**WORKERS, **TWO, **more)
        assert ray.get(actor.texts.remote(), timeout=120) == expected()
        ray.get(actor.close.remote(), timeout=60)
        ray.kill(actor)
    ray.util.remove_placement_group(group)


def worker_is_killed(nodes: Cluster) -> None:
    """SIGKILL of a rank, and then of the actor that hosts one, under streams."""
    for is_actor in (False, True):

        def kill(engine: AsyncLLM, is_actor: bool = is_actor) -> None:
            rank = rank_process(1)
            (rank.parent() if is_actor else rank).send_signal(signal.SIGKILL)  # type: ignore[union-attr]

        wishes = {**WORKERS, **TWO, "data_parallel_backend": "mp", "data_parallel_size": 1}
        assert asyncio.run(streams_through(kill, **wishes)) == (0, set())


# where an engine lives


class Inside:
    """An engine inside an actor."""

    def __init__(self, **wishes: Any) -> None:
        self.llm = LLM(**wishes)

    def texts(self) -> list[str]:
        return texts(self.llm)

    def close(self) -> None:
        self.llm.close()


def in_an_actor(nodes: Cluster) -> None:
    """An engine inside an actor: its core there, and as a core that Ray places."""
    one = {**RAY, "data_parallel_size": 1}
    right = expected()
    for wishes in (SMALL, {**SMALL, "enable_multiprocessing": True}, one):
        actor = ray.remote(Inside).options(num_cpus=0).remote(**wishes)
        assert ray.get(actor.texts.remote(), timeout=120) == right
        ray.get(actor.close.remote(), timeout=60)
        ray.kill(actor)


class Answering:
    """The function of a data set's batches."""

    def __init__(self) -> None:
        self.llm = LLM(**SMALL)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        outputs = self.llm.generate(list(batch["prompt"]), PARAMS, use_tqdm=False)
        return {**batch, "text": [each.outputs[0].text for each in outputs]}


def in_ray_data(nodes: Cluster) -> None:
    """A data set whose batches an engine answers."""
    import ray.data

    rows = ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS])
    done = rows.map_batches(Answering, concurrency=1, batch_size=4, num_cpus=1).take_all()
    found = {row["prompt"]: row["text"] for row in done}
    assert [found[prompt] for prompt in PROMPTS] == expected()


def behind_serve(nodes: Cluster) -> None:
    """A deployment of Ray Serve that holds an AsyncLLM and streams."""
    from ray import serve

    @serve.deployment(ray_actor_options={"num_cpus": 1})
    class Streaming:
        def __init__(self) -> None:
            self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**SMALL))

        async def __call__(self, prompt: str) -> str:
            return "".join([part async for part in self.parts(prompt)])

        async def parts(self, prompt: str) -> Any:
            params = PARAMS.clone()
            params.output_kind = RequestOutputKind.DELTA
            async for output in self.engine.generate(prompt, params, f"r{hash(prompt)}"):
                yield output.outputs[0].text

    handle = serve.run(Streaming.bind(), route_prefix=None)
    try:
        replies = [handle.remote(prompt) for prompt in PROMPTS]
        assert [reply.result(timeout_s=120) for reply in replies] == expected()
    finally:
        serve.shutdown()


# deaths


async def streams_through(
    disturb: Callable[[AsyncLLM], None], is_sure: bool = True, **more: Any
) -> tuple[int, set[str]]:
    """Run the streams twice, the second time with a disturbance, which is sure to kill a core while
    they run; how many differ, and the errors of those that have ended with one.
    """
    args = AsyncEngineArgs(**{**RAY, **more})
    engine = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
    try:
        before = await asyncio.gather(*(stream(engine, i, "a") for i in range(NUM_STREAMS)))
        running = [asyncio.ensure_future(stream(engine, i, "b")) for i in range(NUM_STREAMS)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in running), "the streams are too short"
        await asyncio.to_thread(disturb, engine)
        after = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 150)
        errors = {str(each) for each in after if isinstance(each, BaseException)}
        wrong = sum(
            a != b for a, b in zip(before, after, strict=True) if not isinstance(b, BaseException)
        )
        assert engine.front_end.client.num_restarts or not is_sure, "nothing has died"
        return wrong, errors
    finally:
        engine.shutdown()


async def stream(
    engine: AsyncLLM,
    number: int,
    name: str,
    num_tokens: int = NUM_TOKENS,
    on_output: Callable[[], None] = lambda: None,
) -> list[int]:
    """The ids of a stream."""
    params = SamplingParams(
        temperature=0.8,
        seed=number,
        max_tokens=num_tokens,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )
    found: list[int] = []
    async for output in engine.generate(PROMPTS[number % 4], params, f"{name}{number}"):
        found += output.outputs[0].token_ids
        on_output()
    return found


def core_process(engine: AsyncLLM, rank: int) -> psutil.Process:
    return psutil.Process(engine.front_end.client.core_status(rank).pid)


def rank_process(rank: int) -> psutil.Process:
    """The process of a rank, below the raylets of this program's cluster."""
    ours = psutil.Process().children(recursive=True)
    return next(each for each in ours if each.name() == f"QuireWorker-{rank}")


def core_is_killed(nodes: Cluster) -> None:
    """SIGKILL of a core's process: all streams end with their ids."""

    def kill(engine: AsyncLLM) -> None:
        core_process(engine, 1).send_signal(signal.SIGKILL)

    assert asyncio.run(streams_through(kill)) == (0, set())


def actor_is_killed(nodes: Cluster) -> None:
    """SIGKILL of the actor that hosts a core: the same."""

    def kill(engine: AsyncLLM) -> None:
        core_process(engine, 1).parent().send_signal(signal.SIGKILL)  # type: ignore[union-attr]

    assert asyncio.run(streams_through(kill)) == (0, set())


def raylet_is_killed(nodes: Cluster) -> None:
    """SIGKILL of the raylet of a core's node alone, with which Ray ends what runs there: streams
    end with their ids, before that or after the core has come back.
    """

    def kill(engine: AsyncLLM) -> None:
        raylet_of(core_process(engine, 1)).send_signal(signal.SIGKILL)

    assert asyncio.run(streams_through(kill, is_sure=False)) == (0, set())


def node_is_lost(nodes: Cluster) -> None:
    """All processes of a core's node are killed: the core comes back on another node."""

    def kill(engine: AsyncLLM) -> None:
        kill_node(raylet_of(core_process(engine, 1)))

    wishes = {"data_parallel_size_local": 1}
    assert asyncio.run(streams_through(kill, **wishes)) == (0, set())


def node_is_lost_for_good(nodes: Cluster) -> None:
    """The same where nothing is restarted: one clear error."""

    def kill(engine: AsyncLLM) -> None:
        kill_node(raylet_of(core_process(engine, 1)))

    wishes = {"data_parallel_size_local": 1, "max_core_restarts": 0}
    wrong, errors = asyncio.run(streams_through(kill, is_sure=False, **wishes))
    assert wrong == 0
    assert len(errors) == 1, errors
    assert "core 1" in errors.pop()


def kill_node(raylet: psutil.Process) -> None:
    for process in (*raylet.children(recursive=True), raylet):
        process.kill()


def scaling(nodes: Cluster) -> None:
    """scale_elastic_ep under load: a core on another node, and back."""

    async def run() -> None:
        args = AsyncEngineArgs(**{**RAY, "data_parallel_size": 1})
        engine = await asyncio.to_thread(AsyncLLM.from_engine_args, args)
        try:
            right = await asyncio.gather(*(stream(engine, i, "a") for i in range(NUM_STREAMS)))
            running = [asyncio.ensure_future(stream(engine, i, "b")) for i in range(NUM_STREAMS)]
            await engine.scale_elastic_ep(2)
            more = [asyncio.ensure_future(stream(engine, i, "c")) for i in range(NUM_STREAMS)]
            status = engine.front_end.client.core_status
            while not status(1).num_steps:
                await asyncio.sleep(0.1)
            await engine.scale_elastic_ep(1)
            assert await asyncio.gather(*running) == right
            assert await asyncio.gather(*more) == right
        finally:
            engine.shutdown()

    asyncio.run(run())


# a cluster of our own


def own_cluster(_: Any) -> None:
    """Without a cluster one is started: with a token, without a dashboard."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)
    os.environ["RAY_ADDRESS"] = "local"
    try:
        with LLM(**{**RAY, "data_parallel_size": 1}) as llm:
            assert texts(llm) == expected()
            assert os.environ["RAY_AUTH_MODE"] == "token"
            context = ray.get_runtime_context()
            assert not ray._private.worker._global_node.webui_url
            stranger = {**os.environ, "HOME": "/nonexistent", "RAY_AUTH_TOKEN": "another"}
            code = f"import ray; ray.init(address={context.gcs_address!r}); print('in')"
            done = subprocess.run(
                [sys.executable, "-c", code], env=stranger, capture_output=True, text=True,
                timeout=60, check=False,
            )  # fmt: skip
            assert "in" not in done.stdout.split(), "who has no token was let in"
    finally:
        del os.environ["RAY_ADDRESS"]
        ray.shutdown()


def actor_place(pid: int) -> str:
    """The raylet that a worker of Ray belongs to."""
    return str(raylet_of(psutil.Process(pid)).pid)


def raylet_of(process: psutil.Process) -> psutil.Process:
    return next(each for each in process.parents() if each.name() == "raylet")


def wait_for(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.1)


CASES: dict[int, list[Callable[[Any], None]]] = {
    2: [
        *(offline, too_small, two_engines, groups, in_an_actor, core_is_killed, actor_is_killed),
        *(scaling, in_ray_data, behind_serve, workers, workers_of_placed_cores),
        *(in_the_current_group, worker_is_killed, environment, actor_by_hand, weight_updates),
    ],
    4: [node_is_lost, node_is_lost_for_good],
    3: [raylet_is_killed],
    0: [own_cluster],
}
"""The cases by the number of nodes, which is enough for those that lose one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name has one of these words")
    only = parser.parse_args().only
    failed = 0
    for num_nodes, cases in CASES.items():
        chosen = [case for case in cases if any(word in case.__name__ for word in only.split(","))]
        if not chosen:
            continue
        if not num_nodes:
            failed += sum(not passes(case, None) for case in chosen)
            continue
        with cluster(num_nodes) as nodes:
            failed += sum(not passes(case, nodes) for case in chosen)
    return 1 if failed else 0


def passes(case: Callable[[Any], None], nodes: Any) -> bool:
    began = time.monotonic()
    try:
        case(nodes)
    except Exception:
        traceback.print_exc()
        print(f"FAILED {case.__name__}", flush=True)
        return False
    print(f"ok {case.__name__} {time.monotonic() - began:.1f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
