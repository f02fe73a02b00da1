"""The head of rows that pool: gathers what pooling needs of a prompt's hidden states over its
chunks, and reports the result with the prompt's last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.models.decoder import DecoderModel, HiddenStates
from quire.models.pooling.pooler import Pooler
from quire.models.pooling.spec import PoolerSpec
from quire.params import PoolingParams, RequestParams
from quire.params.pooling import TOKEN_TASKS, VECTOR_TASKS
from quire.runner.adapters import AdapterSlots
from quire.runner.batch import StepInputs
from quire.runner.devices.device import Device
from quire.runner.pooling.finish import finished
from quire.runner.pooling.sequence_pooling import PoolingChunk, pooled
from quire.runner.pooling.term_scores import term_scores
from quire.runner.rows import Rows
from quire.step.columns import PooledOutput, RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import NewRow

_NOT_FINITE = (
    "the model's result is not finite (NaN or infinity): its weights hold such values, or they are "
    "too large for its dtype"
)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """State of a prompt between its chunks.

    `slot` is that of its adapter, or 0. `ids` are its tokens, where their places count.
    `carried_over` is what each pooling keeps of its tokens so far, () before the first; `pieces`
    [n, D] are the results of tokens so far.
    """

    handle: int
    params: PoolingParams
    length: int
    slot: int
    ids: np.ndarray | None
    carried_over: tuple[Any, ...] = ()
    pieces: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class _Part:
    """A prompt's chunk in a step: `count` tokens from position `first` on, from row `start` of the
    hidden states.
    """

    row: int
    prompt: _Prompt
    first: int
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.first + self.count == self.prompt.length


class PoolingHead:
    """Pools the prompts of rows with `PoolingParams`, whose tasks have been checked; through the
    heads that `adapters` bring, where these do.
    """

    def __init__(
        self,
        model: DecoderModel,
        rows: Rows,
        device: Device,
        adapters: AdapterSlots | None = None,
        results: Callable[[int], Tensor | None] | None = None,
    ) -> None:
        """`results`: by row, what an encoder has made of the whole prompt, which nothing else is
        made of.
        """
        assert model.pooler is not None, "a model that pools"
        self.model = model
        self.spec: PoolerSpec = model.pooler.spec
        self.ops = model.pooler.ops
        self.rows = rows
        self.device = device
        self.adapters = adapters
        self.results = results or (lambda row: None)
        self.prompts: dict[int, _Prompt] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.spec.tasks

    def needs_host_ids(self, params: RequestParams) -> bool:
        return False

    def add_row(self, new: NewRow) -> None:
        params = new.params
        assert isinstance(params, PoolingParams), "the head of rows that pool"
        terms = self.spec.terms
        by_place = params.task in TOKEN_TASKS and self.spec.token_pooling == "step"
        by_place = by_place or (terms is not None and terms.ends is not None)
        ids = np.array(new.token_ids, dtype=np.int64) if by_place else None
        self.prompts[new.row] = _Prompt(new.handle, params, new.num_prompt_tokens, new.adapter, ids)

    def pooler(self, slot: int) -> Pooler:
        """The head of prompts whose adapter is in a slot (0: of those without)."""
        own = None if self.adapters is None else self.adapters.pooler(slot)
        pooler = self.model.pooler if own is None else own
        assert pooler is not None, "the model pools"
        return pooler

    def remove_row(self, row: int) -> None:
        del self.prompts[row]

    def begin(self, inputs: StepInputs) -> PoolingStep | None:
        computed = self.rows.num_computed
        parts = [
            _Part(
                row, self.prompts[row], int(computed[row]), int(inputs.starts[i]),
                int(inputs.counts[i]),
            )
            for i, row in enumerate(inputs.rows.tolist())
            if row in self.prompts
        ]  # fmt: skip
        return PoolingStep(self, parts) if parts else None


class PoolingStep:
    """This head's part of one step. What it keeps of prompts counts after `advance`."""

    moves_rows = False

    def __init__(self, head: PoolingHead, parts: Sequence[_Part]) -> None:
        self._head = head
        self._parts = parts
        self._unfinished: dict[int, _Prompt] = {}
        self._results: list[tuple[_Part, slice | int]] = []

    def compute(self, states: HiddenStates, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Queue the head's layers on what the step completes; returns one matrix for each task
        and head that has results.
        """
        made = [(part, self._head.results(part.row)) for part in self._parts]
        of_model = [part for part, result in made if result is None]
        vectors = [part for part in of_model if part.prompt.params.task not in TOKEN_TASKS]
        tokens = [part for part in of_model if part.prompt.params.task in TOKEN_TASKS]
        found: list[Tensor] = []
        if vectors:
            has_terms = self._head.spec.terms is not None
            inputs = states.last
            if not has_terms:
                inputs = self._pool(self._before_pooling(inputs, vectors), vectors)
            ended = [part for part in vectors if part.is_last]
            kinds = [(part.prompt.params.task, part.prompt.slot) for part in ended]
            for task, slot in sorted(set(kinds)):
                mine = [i for i, kind in enumerate(kinds) if kind == (task, slot)]
                pooler = self._head.pooler(slot)
                if has_terms:
                    places = [self._counted(ended[i]) for i in mine]
                    found.append(term_scores(pooler, self._head.device.send, inputs, places))
                else:
                    layers = pooler.embed if task in VECTOR_TASKS else pooler.classify
                    found.append(layers(self._some(inputs, mine)))
                self._results += [(ended[i], at) for at, i in enumerate(mine)]
        return [*found, *self._pool_tokens(states.last, tokens), *self._of_encoders(made)]

    def _of_encoders(self, made: Sequence[tuple[_Part, Tensor | None]]) -> list[Tensor]:
        """The results that encoders have made [1, D] each; for a task of tokens it is the only
        token's.
        """
        found = []
        for part, result in made:
            if result is not None:
                found.append(result[None].clone())
                is_of_tokens = part.prompt.params.task in TOKEN_TASKS
                self._results.append((part, slice(None) if is_of_tokens else 0))
        return found

    def _counted(self, part: _Part) -> range:
        """The rows of a prompt's tokens that count for the weights of terms."""
        assert part.first == 0 and part.is_last, "a prompt in one step"
        start, end = part.start, part.start + part.count
        terms, ids = self._head.spec.terms, part.prompt.ids
        if terms is not None and terms.ends is not None and ids is not None:
            first, last = terms.ends
            start, end = start + int(ids[0] == first), end - int(ids[-1] == last)
        return range(start, end)

    def _before_pooling(self, hidden: Tensor, parts: Sequence[_Part]) -> Tensor:
        """Input of pooling from hidden [T, C]: the states, or the output of a late classifier."""
        poolers = [self._head.pooler(part.prompt.slot) for part in parts]
        if not poolers[0].is_late:
            return hidden
        whole: Tensor | None = None
        for part, pooler in zip(parts, poolers, strict=True):
            rows = slice(part.start, part.start + part.count)
            inner = pooler.inner(hidden[rows])
            if whole is None:
                whole = inner.new_zeros(len(hidden), inner.shape[1])
            whole[rows] = inner
        assert whole is not None, "some part pools"
        return whole

    def _pool(self, hidden: Tensor, parts: Sequence[_Part]) -> Tensor:
        """The pooled hidden states [M, C] of the M prompts that end in this step."""
        found: list[Tensor] = []
        carried_over: list[list[Any]] = [[] for _ in parts]
        for i, pooling in enumerate(self._head.spec.poolings):
            chunks = [
                PoolingChunk(
                    p.first, p.start, p.count, p.prompt.length,
                    p.prompt.carried_over[i] if p.prompt.carried_over else None,
                )
                for p in parts
            ]  # fmt: skip
            vectors, state_of = pooled(
                self._head.ops, self._head.device.send, pooling, hidden, chunks
            )
            found.append(vectors)
            for row, part in enumerate(parts):
                if not part.is_last:
                    carried_over[row].append(state_of(row))
        for part, states in zip(parts, carried_over, strict=True):
            if not part.is_last:
                self._unfinished[part.row] = replace(part.prompt, carried_over=tuple(states))
        whole = found[0] if len(found) == 1 else torch.cat([v.float() for v in found], dim=1)
        return self._some(whole, [row for row, part in enumerate(parts) if part.is_last])

    def _some(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """These rows of x, without waiting for the device; x itself if they are all."""
        if len(rows) == len(x):
            return x
        return x[self._head.device.send(np.array(rows, dtype=np.int64))]

    def _pool_tokens(self, hidden: Tensor, parts: Sequence[_Part]) -> list[Tensor]:
        """The results [n, D] of the prompts that end in this step, one tensor for each."""
        found = []
        for part in parts:
            pieces = (*part.prompt.pieces, self._tokens(hidden, part))
            if part.is_last:
                found.append(torch.cat(pieces))
                self._results.append((part, slice(None)))
            else:
                self._unfinished[part.row] = replace(part.prompt, pieces=pieces)
        return found

    def _tokens(self, hidden: Tensor, part: _Part) -> Tensor:
        """The results of a chunk's tokens, or of those that are asked for."""
        prompt = part.prompt
        pooler = self._head.pooler(prompt.slot)
        x = hidden[part.start : part.start + part.count]
        if prompt.ids is not None:
            ids = prompt.ids[part.first : part.first + part.count]
            chosen = np.flatnonzero(ids == prompt.params.step_tag_id)
            x = x[self._head.device.send(chosen)]
        layers = pooler.embed if prompt.params.task in VECTOR_TASKS else pooler.classify
        # without any token a matrix of no rows, whose width the layers know
        results = layers(x) if len(x) else layers(hidden[:1])[:0]
        columns = prompt.params.returned_token_ids
        if not columns:
            # layers may give back the step's hidden states, which the next step overwrites
            return results.clone()
        return results[:, self._head.device.send(np.array(columns, dtype=np.int64))]

    def advance(self) -> None:
        """Keep what the step has found of prompts that go on."""
        self._head.prompts.update(self._unfinished)

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        """Add the results of complete prompts, or errors for those that are not finite."""
        left = iter(values)
        matrix: Tensor | None = None
        for part, place in self._results:
            if place == 0 or isinstance(place, slice):
                matrix = next(left)
            assert matrix is not None
            prompt = part.prompt
            found = finished(matrix[place].float().numpy(), self._head.spec, prompt.params)
            if np.isfinite(found).all():
                output.parts.append(PooledOutput(prompt.handle, found))
            else:
                output.result.errors[part.row] = _NOT_FINITE
