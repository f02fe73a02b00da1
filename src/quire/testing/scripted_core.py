"""A core client without a model: it plays the tokens that a script gives for each request.

It stops requests by the same rules as the scheduler, gives logprobs that can be predicted, and cuts
the stream into steps as it is told, so that front ends are tested without weights and without
torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from quire.engine.client.client import CoreStatus
from quire.engine.control_verbs import perform
from quire.engine.wire.control_calls import PauseMode, Utility
from quire.engine.wire.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from quire.engine.wire.output_parts import Finished, FinishReason, Started
from quire.params import SamplingParams
from quire.step.columns import LogprobColumns, PromptLogprobs

T = TypeVar("T")

Script = Callable[[EngineCoreRequest], Sequence[int]]
LogprobRow = tuple[list[int], list[float], int]


class ScriptedCore:
    """Serves `script(request)` token by token; a script that runs out stands still.

    `tokens_per_step(handle)` says how many tokens a request gets in a step; a step in which no
    request gets one is skipped. `before_step` is called first in every `get_output`. `requests` are
    those not ended, by handle; `seen` all that ever came; `aborted` the handles that were aborted,
    in order.
    """

    def __init__(
        self,
        script: Script,
        *,
        tokens_per_step: Callable[[int], int] = lambda handle: 1,
        before_step: Callable[[], None] = lambda: None,
        vocab_size: int = 1024,
        max_model_len: int = 2**20,
    ) -> None:
        self._script = script
        self._tokens_per_step = tokens_per_step
        self._before_step = before_step
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._is_paused = False
        self._before_pause: set[int] = set()
        self._lora_ids: set[int] = set()
        self._ended: list[Finished] = []
        self._given: dict[int, int] = {}
        self.requests: dict[int, EngineCoreRequest] = {}
        self.seen: list[EngineCoreRequest] = []
        self.aborted: list[int] = []
        self.is_shut_down = False

    def add_request(self, request: EngineCoreRequest) -> None:
        self.requests[request.handle] = request
        self.seen.append(request)
        self._given[request.handle] = len(request.output_token_ids)

    def abort_requests(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.aborted.append(handle)
            self.requests.pop(handle, None)

    def get_output(self) -> EngineCoreOutputs:
        self._before_step()
        outputs = EngineCoreOutputs(counts=[], stats=SchedulerStats(len(self.requests)))
        outputs.finished, self._ended = self._ended, []
        if self._is_paused:
            return outputs
        rows: list[tuple[int, LogprobRow]] = []
        for request in list(self.requests.values()):
            for token_id in self._advance(request, outputs):
                params = _sampling(request)
                if params.num_logprobs is not None:
                    row = logprob_row(token_id, params, self._vocab_size)
                    rows.append((len(outputs.token_ids), row))
                outputs.token_ids.append(token_id)
        outputs.logprobs = _columns(rows)
        return outputs

    @property
    def engine_indices(self) -> Sequence[int]:
        return (0,)

    def survives(self, handle: int) -> bool:
        return True

    def engine_of(self, handle: int) -> int | None:
        """It has all requests that have not ended."""
        return 0 if handle in self.requests else None

    def core_status(self, engine_index: int) -> CoreStatus:
        """It lives as long as this process."""
        return CoreStatus(engine_index, 0, os.getpid(), True, True, bool(self.requests))

    def shutdown(self, timeout_s: float | None = None) -> None:
        self.is_shut_down = True

    def call(self, utility: Utility[T]) -> T:
        """Ask this object, by the same names as a core."""
        return cast(T, perform(self, utility.method, utility.args))

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """There is no cache: it is reset unless requests run."""
        return reset_running_requests or not self.requests

    def reset_mm_cache(self) -> None:
        """Do nothing: there is no such cache."""

    def reset_encoder_cache(self) -> None:
        """Do nothing: there is no such cache."""

    def pause_scheduler(self, mode: PauseMode = "keep", clear_cache: bool = False) -> None:
        """Stand still; with "abort" the requests end first, with that reason, that came before."""
        if not self._is_paused:
            self._before_pause = set(self.requests)
        if mode == "abort":
            for handle in sorted(self._before_pause & self.requests.keys()):
                self._ended.append(Finished(handle, FinishReason.ABORT))
                del self.requests[handle]
        self._is_paused = True

    def resume_scheduler(self) -> None:
        self._is_paused = False

    def is_scheduler_paused(self) -> bool:
        return self._is_paused

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Stand still; there is no memory to give back."""
        self.pause_scheduler(mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """Go on, if "scheduling" is among the tags."""
        if tags is None or "scheduling" in tags:
            self.resume_scheduler()
        return not self._is_paused

    def is_sleeping(self) -> bool:
        return self._is_paused

    def release_kv_cache_memory(self) -> None:
        """Do nothing: there is no such memory."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    origin = ("scripted", "scripted")
    """The root and the model that it says it has."""

    def get_origin(self) -> list[str]:
        """The names of all that tokens depend on."""
        return list(self.origin)

    def hand_over(self, handles: Sequence[int]) -> list[tuple[int, dict[str, Any]]]:
        """Forget requests that go on elsewhere; there is no K/V."""
        for handle in handles:
            self.requests.pop(handle, None)
        return []

    weight_version = "default"
    _is_updating = False

    def get_weight_version(self) -> str:
        return self.weight_version

    def set_weight_version(self, weight_version: str) -> None:
        self.weight_version = weight_version

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing: there are no weights."""

    def shutdown_weight_transfer_engine(self) -> None:
        """Do nothing."""

    def start_weight_update(self, is_draft: bool = False) -> None:
        """Note that an update is open."""
        self._is_updating = True

    def is_updating_weights(self) -> bool:
        return self._is_updating

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Do nothing."""

    def prepare_weight_update(self) -> int:
        """No tensor has come."""
        return 0

    def commit_weight_update(
        self, weight_version: str | None = None, is_lost: bool = False, token: str = ""
    ) -> None:
        """Note the name, and that none is open."""
        self._is_updating = False
        self.weight_version = weight_version or self.weight_version

    def abandon_weight_update(self, reason: str) -> bool:
        """Note that none is open."""
        self._is_updating = False
        return False

    def spoil_weights(self, reason: str, is_draft: bool = False) -> None:
        """Do nothing: there are no weights."""

    def compute_weight_checksums(self) -> dict[str, str]:
        return {}

    def check_lora(self, folder: str) -> None:
        """Do nothing: every adapter can be used."""

    def add_lora(self, name: str, lora_id: int, folder: str, again: bool = False) -> bool:
        """Note its id."""
        self._lora_ids.add(lora_id)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        is_known = lora_id in self._lora_ids
        self._lora_ids.discard(lora_id)
        return is_known

    def pin_lora(self, lora_id: int) -> bool:
        """Whether the id is known."""
        return lora_id in self._lora_ids

    def list_loras(self) -> list[int]:
        return sorted(self._lora_ids)

    def save_sharded_state(self, path: str, pattern: str | None, max_size: int | None) -> list[str]:
        """There are no weights, so no file is written."""
        return []

    def profile(
        self, is_start: bool, prefix: str | None = None, *steps: int | None
    ) -> list[str | None]:
        """There is nothing to look at."""
        return [None]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> list[Any]:
        """Functions are called with this object; a method's name comes back with its arguments."""
        if callable(method):
            return [method(self, *args, **kwargs)]
        return [(method, tuple(args), kwargs)]

    def _advance(self, request: EngineCoreRequest, outputs: EngineCoreOutputs) -> list[int]:
        """The request's next tokens, entered into all columns of `outputs` but the ids."""
        start = self._given[request.handle]
        wanted = self._script(request)[start : start + self._tokens_per_step(request.handle)]
        tokens: list[int] = []
        for token_id in wanted:
            tokens.append(token_id)
            end = self._end(request, token_id, start + len(tokens))
            if end is not None:
                outputs.finished.append(end)
                del self.requests[request.handle]
                break
        if not tokens:
            return tokens
        if start == 0:
            outputs.started.append(Started(request.handle, 0, 0.0))
            if _sampling(request).prompt_logprobs is not None:
                outputs.parts.append(prompt_logprobs(request, self._vocab_size))
        self._given[request.handle] += len(tokens)
        outputs.handles.append(request.handle)
        assert outputs.counts is not None
        outputs.counts.append(len(tokens))
        return tokens

    def _end(
        self, request: EngineCoreRequest, token_id: int, num_output_tokens: int
    ) -> Finished | None:
        params, handle = _sampling(request), request.handle
        if token_id == params.eos_token_id:
            return Finished(handle, FinishReason.STOP)
        if token_id in (params.stop_token_ids or ()):
            return Finished(handle, FinishReason.STOP, token_id)
        num_tokens = len(request.prompt_token_ids) + num_output_tokens
        assert params.max_tokens is not None, "the input processor resolves max_tokens"
        if num_tokens >= self._max_model_len or num_output_tokens >= params.max_tokens:
            return Finished(handle, FinishReason.LENGTH)
        return None


def logprob_row(token_id: int, params: SamplingParams, vocab_size: int) -> LogprobRow:
    """Ids, values and the first one's rank, for a drawn token: a function of the token alone."""
    listed = params.logprob_token_ids
    others = (
        _likeliest(token_id, params.num_logprobs or 0, vocab_size) if listed is None else listed
    )
    ids = [token_id, *others]
    return ids, [value(one, token_id) for one in ids], rank(token_id)


def _sampling(request: EngineCoreRequest) -> SamplingParams:
    assert isinstance(request.params, SamplingParams), "the core generates only"
    return request.params


def prompt_logprobs(request: EngineCoreRequest, vocab_size: int) -> PromptLogprobs:
    """The log-probabilities of a prompt as a core reports them."""
    most = _sampling(request).prompt_logprobs or 0
    prompt = request.prompt_token_ids[1:]
    ids = [[one, *_likeliest(one, most, vocab_size)] for one in prompt]
    values = [[value(one, row[0]) for one in row] for row in ids]
    shape = (len(prompt), most + 1)
    return PromptLogprobs(
        request.handle,
        np.array(ids, dtype=np.int32).reshape(shape),
        np.array(values, dtype=np.float32).reshape(shape),
        np.array([rank(one) for one in prompt], dtype=np.int32),
    )


def rank(token_id: int) -> int:
    """The rank that a drawn token is said to have."""
    return token_id % 5 + 1


def value(token_id: int, drawn: int) -> float:
    """The logprob of a token where `drawn` was drawn; exact in float32."""
    return -((token_id * 3 + drawn) % 64) / 8


def _likeliest(token_id: int, count: int, vocab_size: int) -> list[int]:
    """The `count` likeliest ids. The drawn one stands a place before its rank: it is tied."""
    others = [(token_id + 1 + place) % vocab_size for place in range(count)]
    others.insert(max(0, rank(token_id) - 2), token_id)
    return others[:count]


def _columns(rows: Sequence[tuple[int, LogprobRow]]) -> LogprobColumns | None:
    if not rows:
        return None
    width = max(len(ids) for _, (ids, _, _) in rows)
    columns = LogprobColumns(
        index=[place for place, _ in rows],
        token_ids=np.full((len(rows), width), -1, dtype=np.int32),
        values=np.full((len(rows), width), -math.inf, dtype=np.float32),
        ranks=np.array([first for _, (_, _, first) in rows], dtype=np.int32),
        counts=[len(ids) for _, (ids, _, _) in rows],
    )
    for at, (_, (ids, values, _)) in enumerate(rows):
        columns.token_ids[at, : len(ids)] = ids
        columns.values[at, : len(ids)] = values
    return columns
