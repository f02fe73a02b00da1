"""The messages between a core and the ranks of its model.

A rank works on one task after the other, in the order of their serial numbers, which all ranks get
alike. A step's task is answered by the rank that samples, and where it failed by every rank; other
tasks are answered by every rank. `settled` says of the steps that have ended since the
last task of all ranks whether they have succeeded.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from quire.distributed.mesh import Mesh
from quire.executor.worker_config import WorkerFacts
from quire.params import RequestParams
from quire.processes.start_message import ChildStart
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import StepPlan
from quire.step.result import NewTokens


class DistantRank(msgspec.Struct, frozen=True):
    """Addresses of a rank's core and of the others: what the core's listeners have told for its
    `link`, its `signs` of life and calls `aside` of steps, and the store at `address`:`port`, where
    the ranks meet.
    """

    link: bytes
    signs: bytes
    aside: bytes
    address: str
    port: int


class RankStart(ChildStart, kw_only=True):
    """The start message of a rank. `plan` is the engine's, `cpus` lists the logical CPUs of its
    threads ("": any). The others are descriptors that it inherits, -1 where there is nothing: the
    `link` to its core, the `board` of signs of life, the memory of the `exchange` with the workers
    of its stage, links to the stages `before` and `after`, one for calls `aside` of steps. A rank
    that is reached over a network inherits none: `distant` says where it finds them.
    """

    protocol_version: int = 1
    plan: Any
    rank: int
    mesh: Mesh
    cpus: str
    link: int = -1
    board: int = -1
    exchange: int = -1
    before: int = -1
    after: int = -1
    aside: int = -1
    distant: DistantRank | None = None


class Launch(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Run a step, whose mask follows. `tokens`: those of earlier steps that the rank has not
    drawn itself. `num_aborts`: after how many aborts of the exchanges. `follows`: it goes on where
    a step leaves rows whose end is not known, and does not run if one before it has failed.
    """

    serial: int
    settled: dict[int, bool]
    plan: StepPlan
    tokens: list[NewTokens]
    num_aborts: int = 0
    follows: bool = False


class Sample(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Draw the tokens of the step that runs; or where `is_dropped` give it up."""

    serial: int
    mask: GrammarMask | None = None
    is_dropped: bool = False


class Call(msgspec.Struct, tag=True, frozen=True):
    """Call a method of the worker by name, or a function with the worker in front. `num_aborts`: as
    that of `Launch`.
    """

    serial: int
    settled: dict[int, bool]
    method: Any
    args: list[Any]
    kwargs: dict[str, Any]
    num_aborts: int = 0


class AskHostIds(msgspec.Struct, tag=True, frozen=True):
    """Ask whether requests with these parameters need their ids on the host."""

    serial: int
    params: RequestParams


Task: TypeAlias = Launch | Sample | Call | AskHostIds


class FailedTask(msgspec.Struct, frozen=True):
    """An error of a rank: the name of its class, its text, and for `RowFailures` the rows."""

    kind: str
    text: str
    rows: dict[int, str] = {}


class RankAnswer(msgspec.Struct, frozen=True):
    """The end of a task on a rank. `serial` 0: the rank has started, and has these `facts`.

    A step has an `output`, and the `tokens` that other ranks need: where it `moves_rows` by its
    results, and where stages come before. `unread`: why its results could not be read. `waited_s`:
    how long the step's rounds have waited for other cores to begin, in all stages.
    """

    serial: int
    failure: FailedTask | None = None
    output: RunnerOutput | None = None
    tokens: NewTokens | None = None
    moves_rows: bool = False
    unread: str = ""
    value: Any = None
    facts: WorkerFacts | None = None
    waited_s: float = 0.0
