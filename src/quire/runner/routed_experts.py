"""The experts that tokens were sent to, kept for as long as the blocks with the tokens' keys and
values, so that a prefix hit brings those of its tokens along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.models.decoder import HiddenStates
from quire.models.spec import Decoder
from quire.ops import GroupBatch
from quire.params import SamplingParams
from quire.runner.batch import StepInputs
from quire.runner.devices.device import Device
from quire.runner.kv_cache import KVCache
from quire.runner.rows import Rows
from quire.step.columns import RoutedExperts, RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import NewRow


class ExpertRecorder:
    """Watches the steps of all rows: what was chosen is stored by slot of the first KV group with
    keys and values, and reported for the tokens of each step and those before it that no step has
    computed.
    """

    def __init__(self, spec: Decoder, rows: Rows, kv_cache: KVCache, device: Device) -> None:
        mixtures = {i: b.experts for i, b in enumerate(spec.blocks) if b.experts is not None}
        self._shape = len(spec.blocks), max(m.top_k for m in mixtures.values())
        assert all(m.experts < 2**15 for m in mixtures.values()), "numbers of experts in 16 bits"
        self._layers = torch.tensor(list(mixtures), device=device.torch)
        self._rows, self._kv_cache, self._device = rows, kv_cache, device
        sizes = [(group, size) for group, size in enumerate(rows.block_sizes) if size is not None]
        self._group, self._block_size = sizes[0]
        self._reported = np.zeros(rows.pad_row, dtype=np.int64)
        self._chosen = torch.empty(0, *self._shape, dtype=torch.int16)

    def add_row(self, new: NewRow) -> None:
        start = 0
        if isinstance(new.params, SamplingParams):
            start = new.params.routed_experts_prompt_start
        self._reported[new.row] = start

    def remove_row(self, row: int) -> None:
        """Do nothing: the next request in the row sets its own start."""

    def begin(self, inputs: StepInputs) -> RoutedStep:
        return RoutedStep(self, inputs)

    def store(self, inputs: StepInputs, experts: Sequence[Tensor]) -> None:
        """Keep the choices of a step's tokens, one tensor [T, k] for each layer with experts."""
        num_slots = self._kv_cache.num_blocks * self._block_size
        if len(self._chosen) != num_slots:  # the memory was sized anew
            shape = (num_slots, *self._shape)
            self._chosen = torch.zeros(shape, dtype=torch.int16, device=self._device.torch)
        num_tokens = int(inputs.starts[-1])
        group = inputs.batch.groups[self._group]
        assert isinstance(group, GroupBatch), "a group with keys and values"
        slots = group.slots[:num_tokens]
        chosen = torch.stack([layer[:num_tokens] for layer in experts], 1)
        self._chosen[slots[:, None], self._layers] = chosen.to(torch.int16)

    def spans(self, inputs: StepInputs) -> list[_Span]:
        """The span that each row of the step has to report: from the first token not reported, or
        that is computed again, to the last of the step.
        """
        rows, starts = inputs.rows, self._rows.num_computed[inputs.rows]
        firsts = np.minimum(starts, self._reported[rows]).tolist()
        ends = (starts + inputs.counts).tolist()
        return [_Span(*span) for span in zip(rows.tolist(), firsts, ends, strict=True)]

    def take(self, spans: Sequence[_Span]) -> Tensor:
        """The choices of these tokens [n, L, k], one span after the other."""
        table, size = self._rows.tables[self._group], self._block_size
        slots = [np.zeros(0, dtype=np.int64)]
        for span in spans:
            places, within = np.divmod(np.arange(span.first, span.end), size)
            slots.append(table[span.row, places].astype(np.int64) * size + within)
        return self._chosen.index_select(0, self._device.send(np.concatenate(slots)))

    def note(self, spans: Sequence[_Span]) -> None:
        for span in spans:
            self._reported[span.row] = span.end

    def handle(self, row: int) -> int:
        return int(self._rows.handles[row])


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens of a row."""

    row: int
    first: int
    end: int


class RoutedStep:
    """The choices of one step."""

    moves_rows = False

    def __init__(self, routed: ExpertRecorder, inputs: StepInputs) -> None:
        self._routed, self._inputs = routed, inputs
        self._spans: list[_Span] = []
        self._handles: list[int] = []

    def compute(self, states: HiddenStates, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Store the step's choices, and look up what its rows report."""
        self._routed.store(self._inputs, states.experts)
        self._spans = self._routed.spans(self._inputs)
        self._handles = [self._routed.handle(span.row) for span in self._spans]
        return [self._routed.take(self._spans)]

    def advance(self) -> None:
        """The tokens of this step need not be reported again."""
        self._routed.note(self._spans)

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        lengths = [span.end - span.first for span in self._spans]
        parts: Any = values[0].numpy()
        ends = np.cumsum(lengths).tolist()
        for handle, span, length, end in zip(
            self._handles, self._spans, lengths, ends, strict=True
        ):
            output.parts.append(RoutedExperts(handle, span.first, parts[end - length : end]))
