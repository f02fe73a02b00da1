"""Trainers that die at each message of an update, by both backends, and two trainers at once:
python -m tests.trainers.deaths [BACKEND].

The engine's core is a process of its own. A trainer is a process that kills itself right before a
message, or with `nccl` also in the middle of the tensors that it has announced. Then the engine has
one clear state, which a line names: the old weights, by their checksums, after the update has ended
or a reload has ended it; or refusals with a reason. A second trainer sends everything in each case,
and afterwards the checksums are those of an engine that was started with the new weights.

Of two trainers at once the second comes with weights of its own while the update of the first is
open, before each message of it. It is refused, and the first one's update ends with its weights.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy.random  # noqa: F401  threads of make_checkpoint would import it at once
from safetensors.torch import load_file

from quire import LLM, SamplingParams
from quire.errors import EngineError, RequestError
from quire.testing import make_checkpoint
from quire.trainers import senders
from quire.trainers.senders import (
    IPCTrainerInitInfo,
    NCCLTrainerInitInfo,
    WeightTransferTrainerFactory,
)
from quire.trainers.sources import ParamMeta

SHAPE = {"num_hidden_layers": 2, "vocab_size": 300}
MESSAGES = ("init", "start", "update 1", "update 2", "finish")
PROMPT = {"prompt_token_ids": [1, 2, 3]}


class Source:
    """The tensors of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._tensors = load_file(folder / "model.safetensors")

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in self._tensors.items()]

    def __iter__(self) -> Any:
        return iter(self._tensors.items())


class Relay:
    """A client whose calls are lines to the engine's process; one that is refused ends this one."""

    def __init__(self, dies_at: str) -> None:
        self._dies_at, self._updates = dies_at, 0

    def _ask(self, message: str, method: str, *args: Any) -> None:
        if message == self._dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        print(json.dumps([method, *args]), flush=True)
        if json.loads(sys.stdin.readline()) is not None:
            # with nccl the other thread waits for the group until its time is over
            os._exit(1)

    def init_weight_transfer_engine(self, info: Any) -> None:
        self._ask("init", "init_weight_transfer_engine", {"init_info": info})

    def start_weight_update(self) -> None:
        self._ask("start", "start_weight_update")

    def update_weights(self, info: Any) -> None:
        self._updates += 1
        self._ask(f"update {self._updates}", "update_weights", {"update_info": info})

    def finish_weight_update(self, version: str | None = None) -> None:
        self._ask("finish", "finish_weight_update", version)


def train(backend: str, folder: str, port: int, dies_at: str) -> None:
    """The program of a trainer."""
    info: Any = IPCTrainerInitInfo(packed_buffer_size_bytes=1 << 18)
    if backend == "nccl":
        info = NCCLTrainerInitInfo("127.0.0.1", port, 2, packed_buffer_size_bytes=1 << 18)
        if dies_at == "tensor":
            start, count = senders.PyNcclCommunicator.start_broadcast, [0]

            def started(*given: Any) -> Any:
                count[0] += 1
                if count[0] == 9:
                    os.kill(os.getpid(), signal.SIGKILL)
                return start(*given)

            senders.PyNcclCommunicator.start_broadcast = started  # type: ignore[method-assign]
    sender = WeightTransferTrainerFactory.trainer_init(
        info, client=Relay(dies_at), source=Source(Path(folder))
    )
    sender.send_weights("new")


def serve_trainer(
    llm: LLM,
    backend: str,
    folder: Path,
    dies_at: str,
    before: Callable[[str], None] = lambda method: None,
) -> str:
    """Run a trainer against the engine; returns what the engine said last that was not success.
    `before` is called with each method that the trainer asks for.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    program = [sys.executable, "-m", "tests.trainers.deaths", backend, str(folder), port, dies_at]
    trainer = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert trainer.stdin is not None and trainer.stdout is not None
    said = ""
    for line in trainer.stdout:
        method, *args = json.loads(line)
        before(method)
        answer = None
        try:
            getattr(llm, method)(*args)
        except (EngineError, RequestError) as error:
            answer = said = str(error)
        try:
            print(json.dumps(answer), file=trainer.stdin, flush=True)
        except BrokenPipeError:
            break
    trainer.wait()
    return said


def state(llm: LLM, old: dict[str, str]) -> str:
    """The engine's state after a trainer has died, in words."""
    waits = llm._is_updating_weights()
    is_old = llm.compute_weight_checksums() == old
    found = "waits" if waits else asked(llm)
    words = f"{found[:60]}; weights: {'old' if is_old else 'others than the old'}"
    if waits:
        llm.collective_rpc("reload_weights")
        is_old = llm.compute_weight_checksums() == old
        words += f"; after reload_weights {asked(llm)[:40]}; weights: {'old' if is_old else 'bad'}"
    return words


def asked(llm: LLM) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    try:
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
    except EngineError as error:
        return str(error)
    return output.outputs[0].error or "answers"


def engine(folder: Path, backend: str) -> LLM:
    return LLM(
        str(folder), skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 22, max_model_len=64,
        dtype="float32", weight_transfer_config={"backend": backend}, enable_multiprocessing=True,
    )  # fmt: skip


def has(llm: LLM, version: str, checksums: dict[str, str]) -> bool:
    return llm.get_weight_version() == version and llm.compute_weight_checksums() == checksums


def die(backend: str, folders: list[Path], dies_at: str, right: dict[str, str]) -> bool:
    """Whether the engine is as it should be after a death and after the trainer that follows."""
    llm = engine(folders[0], backend)
    old = llm.compute_weight_checksums()
    said = serve_trainer(llm, backend, folders[1], dies_at)
    found = state(llm, old)
    again = serve_trainer(llm, backend, folders[1], "never")
    is_new = has(llm, "new", right) and not again
    print(
        f"{backend}, dies at {dies_at}: {found}; the engine said {said[:70]!r}; "
        f"a second trainer ends with the new weights: {is_new}",
        flush=True,
    )
    llm.__exit__(None, None, None)
    is_clear = "answers no request" in found or (
        "answers" in found and found.endswith("weights: old")
    )
    return is_new and is_clear


def meet(backend: str, folders: list[Path], right: dict[str, str]) -> bool:
    """Whether a second trainer is refused at each message of the first one's update."""
    llm = engine(folders[0], backend)
    refusals: list[str] = []

    def before(method: str) -> None:
        if method in ("update_weights", "finish_weight_update"):
            refusals.append(serve_trainer(llm, backend, folders[0], "never"))

    said = serve_trainer(llm, backend, folders[1], "never", before)
    is_new = has(llm, "new", right) and not said
    print(
        f"{backend}, two at once: the second is told {sorted(set(refusals))} in {len(refusals)} "
        f"places; the first one's update ends with the new weights: {is_new}",
        flush=True,
    )
    llm.__exit__(None, None, None)
    return is_new and len(refusals) > 2 and all(refusals)


def main() -> int:
    """Print a line for each case; the exit code is 1 where a state is not one of those above."""
    base = Path(tempfile.mkdtemp())
    folders = [make_checkpoint(base / str(s), SHAPE, "qwen3", s, "float32") for s in (0, 1)]
    started = engine(folders[1], "ipc")
    right = started.compute_weight_checksums()
    started.__exit__(None, None, None)
    failed = 0
    for backend in sys.argv[1:] or ("ipc", "nccl"):
        for dies_at in (*MESSAGES, *(["tensor"] if backend == "nccl" else [])):
            failed += not die(backend, folders, dies_at, right)
        failed += not meet(backend, folders, right)
    print("failed:", failed)
    return int(failed > 0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
