"""The requests of one offline caller: many prompts in, their outputs in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from quire.engine.completion import complete
from quire.engine.llm_engine import LLMEngine
from quire.engine.progress import Progress
from quire.errors import InvalidParameter
from quire.outputs import RequestOutput
from quire.params import RequestOutputKind, SamplingParams


class OfflineRequests:
    """Queues prompts under ids that count up, and waits for them.

    Invariant: `_queued` has the ids, in order, whose outputs nobody has fetched; those of them that
    are finished are keys of `_finished`.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._next_id = 0
        self._queued: dict[str, None] = {}
        self._finished: dict[str, RequestOutput] = {}

    def enqueue(
        self,
        prompts: Iterable[object],
        total: int,
        params: SamplingParams | Sequence[SamplingParams],
        *,
        priority: int | Sequence[int] | None = None,
        lora_request: object = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[str]:
        """Queue `total` prompts, taking one after the other from `prompts`, and give their ids.

        An error in one of them takes back those before it and is raised.
        """
        each_params = [_final_only(one) for one in _one_each("sampling_params", params, total)]
        priorities = _one_each("priority", 0 if priority is None else priority, total)
        ids: list[str] = []
        try:
            with Progress(use_tqdm, total, "Adding requests") as progress:
                for prompt, own, rank in zip(prompts, each_params, priorities, strict=True):
                    request_id = str(self._next_id)
                    self._next_id += 1
                    self._engine.add_request(
                        request_id,
                        prompt,
                        own,
                        lora_request=lora_request,
                        tokenization_kwargs=tokenization_kwargs,
                        priority=rank,
                    )
                    ids.append(request_id)
                    progress.tick()
        except BaseException:
            self._engine.discard_requests(ids)
            raise
        self._queued.update(dict.fromkeys(ids))
        return ids

    def outputs(
        self, ids: Sequence[str] | None, use_tqdm: bool | Callable[..., Any]
    ) -> list[RequestOutput]:
        """The outputs of these ids (None: of all that are queued) in order, as soon as all are
        there.

        When this fails, Ctrl-C included, nothing stays queued.
        """
        wanted = list(self._queued) if ids is None else ids
        with Progress(use_tqdm, len(wanted), "Processed prompts") as progress:
            try:
                complete(self._engine, wanted, self._finished, progress)
            except BaseException:
                if not self._engine.has_unfinished_requests():
                    self.forget()
                raise
        for request_id in wanted:
            self._queued.pop(request_id, None)
        return [self._finished.pop(request_id) for request_id in wanted]

    def forget(self) -> None:
        """Drop what is queued, and outputs that nobody has fetched."""
        self._queued.clear()
        self._finished.clear()


def _one_each(name: str, given: Any, total: int) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * total
    if len(given) != total:
        allowed = f"it must be one value for all, or one for each of the {total} prompts"
        raise InvalidParameter(name, f"<{len(given)} items>", allowed)
    return list(given)


def _final_only(params: Any) -> Any:
    """The same parameters (not the caller's object) with one output at the end."""
    if not isinstance(params, SamplingParams):
        return params
    own = copy.copy(params)
    own.output_kind = RequestOutputKind.FINAL_ONLY
    return own
