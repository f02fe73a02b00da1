"""The model's forward pass, run as it is or as a recorded program: the CPU twin of a CUDA graph.

The runner does not depend on which. Recording happens once, when the engine is built, over the
tensors that every step's batch is a part of, for as many tokens as a step may have; a replay serves
any number up to that, so there is one program and no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.kernels.cpu.plain_ops import CurrentPlan
from quire.kernels.cpu.program import CpuPlan, Program
from quire.kernels.cpu.runtime import CpuRuntime
from quire.models.decoder import HiddenStates
from quire.ops import Batch, GroupBatch, LayerBatch, PromptBatch, StateBatch
from quire.ops.formats.lora import NO_ADAPTER
from quire.runner.model import StepModel


class Forward(Protocol):
    """Runs steps through a model. Results are valid until the next call of the same function.

    Recordings contain the addresses of weights and KV memory: call `release` before either is
    released, and `record` when both are back.
    """

    def release(self) -> None:
        """Drop the recordings; no step can run until `record`."""
        ...

    def record(self) -> None:
        """Record over the weights and the KV memory that there are now."""
        ...

    def __call__(self, batch: Batch, *, samples_all: bool) -> HiddenStates:
        """Return the step's hidden states; `samples_all`: `logits` of all of them comes next."""
        ...

    def logits(self, hidden: Tensor, last: Tensor | None) -> Tensor:
        """Return fp32 logits [M, V] of hidden[last], `last` [M] int64 ascending; None: of all."""
        ...


class EagerForward:
    """Runs the model directly."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self._slots: Tensor | None = None

    def release(self) -> None:
        """Do nothing: nothing is recorded."""

    def record(self) -> None:
        """Do nothing: nothing has to be recorded."""

    def __call__(self, batch: Batch, *, samples_all: bool) -> HiddenStates:
        self._slots = batch.adapter_slots
        return self._model.forward(batch)

    def logits(self, hidden: Tensor, last: Tensor | None) -> Tensor:
        return self._model.logits(*rows_of_step(hidden, self._slots, last))


def rows_of_step(
    hidden: Tensor, slots: Tensor | None, last: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The hidden states [M, C] of a step that `last` names, and the slots of their adapters."""
    if last is None:
        return hidden, None if slots is None else slots[: len(hidden)]
    return hidden.index_select(0, last), None if slots is None else slots.index_select(0, last)


class RecordedForward:
    """A model's steps as programs: hidden states of up to T tokens, logits of up to R rows, and
    both in one for the steps that sample all of their tokens. A model that pools has the first. A
    model with adapters has each twice: steps in which no token has an adapter run the programs of
    a model without.

    One replay instead of two saves a tenth of a small model's decode step, because threads go to
    sleep between two replays. The programs own the memory of the logits, since allocating it in
    every step costs as much as computing them.
    """

    def __init__(
        self, model: StepModel, runtime: CpuRuntime, inputs: Batch, *, num_rows: int
    ) -> None:
        """inputs: the whole tensors whose first entries are the steps' batches, with plans for no
        rows. num_rows: how many rows a step may sample; 0 for a model without logits.
        """
        self._model = model
        self._runtime = runtime
        self._num_rows = num_rows
        self._plans = [_stand_in(group) for group in inputs.groups]
        self._inputs = inputs
        self._plain: _Programs | None = None
        self._adapted: _Programs | None = None
        self._now: _Programs | None = None
        self._slots: Tensor | None = None
        self.record()

    def release(self) -> None:
        """Forget the programs, which hold the addresses of weights and KV memory, and their
        activations.
        """
        self._plain = self._adapted = self._now = None

    def record(self) -> None:
        self._runtime.expect_weights(sum(x.nbytes for x in self._model.weight_tensors()))
        self._plain = self._record(has_adapters=False)
        if self._inputs.adapter_slots is not None:
            self._adapted = self._record(has_adapters=True)

    def _record(self, *, has_adapters: bool) -> _Programs:
        body = Program(self._runtime, self._inputs.num_tokens)
        with body.recording():
            hidden = self._model.forward(self._first_inputs(body.capacity, has_adapters))
        embedded = None
        if self._inputs.embeds is not None:
            embedded = self._record_embedded(has_adapters)
        sampling = self._record_sampling(hidden, has_adapters) if self._num_rows else None
        return _Programs(body, _FirstStates(hidden), sampling, embedded)

    def _record_embedded(self, has_adapters: bool) -> tuple[Program, _FirstStates]:
        """Record the steps with media, which begin after the look-up of embeddings."""
        body = Program(self._runtime, self._inputs.num_tokens)
        with body.recording():
            batch = self._first_inputs(body.capacity, has_adapters, is_embedded=True)
            hidden = self._model.forward(batch)
        return body, _FirstStates(hidden)

    def _record_sampling(self, hidden: HiddenStates, has_adapters: bool) -> _SamplingPrograms:
        head = Program(self._runtime, self._num_rows)
        both = Program(self._runtime, min(self._inputs.num_tokens, self._num_rows))
        last = hidden.last.new_zeros((self._num_rows, hidden.last.shape[1]))
        slots = torch.full((self._num_rows,), NO_ADAPTER, dtype=torch.int32)
        with head.recording():
            logits = self._model.logits(last, slots if has_adapters else None)
        with both.recording():
            batch = self._first_inputs(both.capacity, has_adapters)
            decoded = self._model.forward(batch)
            scores = self._model.logits(decoded.last, batch.adapter_slots)
        return _SamplingPrograms(
            head, both, _FirstStates(decoded), *map(_First, (last, slots, logits, scores))
        )

    def _first_inputs(self, count: int, has_adapters: bool, *, is_embedded: bool = False) -> Batch:
        """The inputs of up to `count` tokens, with slots of adapters or without; `is_embedded`:
        with embeddings in place of those of their ids.
        """
        whole = self._inputs
        slots = whole.adapter_slots if has_adapters else None
        assert whole.ids is not None
        groups: list[LayerBatch] = []
        for group, plan in zip(whole.groups, self._plans, strict=True):
            if isinstance(group, GroupBatch):
                groups.append(GroupBatch(group.slots[:count], plan or group.plan))
            elif isinstance(group, PromptBatch):
                groups.append(PromptBatch(plan or group.plan))
            else:
                groups.append(StateBatch(group.reads[:count], group.writes[:count]))
        return Batch(
            ids=whole.ids[:count],
            embeds=whole.embeds[:count] if is_embedded and whole.embeds is not None else None,
            deep=tuple(part[:count] for part in whole.deep) if is_embedded else (),
            positions=whole.positions[:, :count],
            groups=groups,
            kv=whole.kv,
            layer_groups=whole.layer_groups,
            num_tokens=count,
            token_types=None if whole.token_types is None else whole.token_types[:count],
            adapter_slots=None if slots is None else slots[:count],
            states=None if whole.states is None else whole.states[:count],
        )

    def __call__(self, batch: Batch, *, samples_all: bool) -> HiddenStates:
        self._slots = batch.adapter_slots
        self._now = self._plain if batch.adapter_slots is None else self._adapted
        programs, count = self._now, batch.num_tokens
        assert programs is not None, "the memory is released"
        for plan, group in zip(self._plans, batch.groups, strict=True):
            # a program knows the stand-in alone, whose calls go to the step's plan
            if plan is not None and not isinstance(group, StateBatch):
                plan.plan = group.plan
        if batch.embeds is not None:
            assert programs.embedded is not None, "a model without media"
            body, hidden = programs.embedded
            body.replay(count)
            return hidden.of(count)
        sampling = programs.sampling
        if samples_all and sampling is not None and count <= sampling.both.capacity:
            sampling.both.replay(count)
            return sampling.decoded.of(count)
        programs.body.replay(count)
        return programs.hidden.of(count)

    def logits(self, hidden: Tensor, last: Tensor | None) -> Tensor:
        assert self._now is not None, "no step has run since the memory was released"
        programs = self._now.sampling
        assert programs is not None, "a model without logits"
        if last is None:
            # the program of the step has computed them already
            if programs.decoded.last.is_part(hidden):
                return programs.scores.of(len(hidden))
            return self._model.logits(*rows_of_step(hidden, self._slots, None))
        torch.index_select(hidden, 0, last, out=programs.last.of(len(last)))
        if self._slots is not None:
            torch.index_select(self._slots, 0, last, out=programs.slots.of(len(last)))
        programs.head.replay(len(last))
        return programs.logits.of(len(last))


class _First:
    """A tensor's first entries; a steady decode uses the same view in every step."""

    def __init__(self, whole: Tensor) -> None:
        self._whole = whole
        self._part = whole

    def is_part(self, tensor: Tensor) -> bool:
        """Whether the tensor is the view that `of` returned last."""
        return tensor is self._part

    def of(self, count: int) -> Tensor:
        if len(self._part) != count:
            self._part = self._whole[:count]
        return self._part


class _FirstStates:
    """The first entries of a pass's hidden states."""

    def __init__(self, whole: HiddenStates) -> None:
        self.last = _First(whole.last)
        self._aux = [_First(state) for state in whole.aux]
        self._experts = [_First(chosen) for chosen in whole.experts]

    def of(self, count: int) -> HiddenStates:
        return HiddenStates(
            self.last.of(count),
            tuple([aux.of(count) for aux in self._aux]),
            tuple([chosen.of(count) for chosen in self._experts]),
        )


@dataclass(frozen=True, slots=True)
class _SamplingPrograms:
    """Programs that end with logits, and where each one's inputs and results are."""

    head: Program
    both: Program
    decoded: _FirstStates
    last: _First
    slots: _First
    logits: _First
    scores: _First


@dataclass(frozen=True, slots=True)
class _Programs:
    """The recorded programs; `sampling` None: of a model without logits. `embedded`: of steps with
    media; None: the model has no encoders.
    """

    body: Program
    hidden: _FirstStates
    sampling: _SamplingPrograms | None
    embedded: tuple[Program, _FirstStates] | None


def _stand_in(group: LayerBatch) -> Any:
    """A stand-in for the group's attention plan in the program; None for one that is changed in
    place, and where there is none.
    """
    if isinstance(group, StateBatch) or isinstance(group.plan, CpuPlan):
        return None
    return CurrentPlan(group.plan)
