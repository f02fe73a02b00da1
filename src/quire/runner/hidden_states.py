"""Writes the hidden states of prompts to files: what enters some layers, for each token."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.config.hidden_states import HiddenStatesPlan
from quire.errors import InvalidParameter
from quire.models.decoder import HiddenStates
from quire.models.loading.sharded_state import write_tensors
from quire.runner.batch import StepInputs
from quire.runner.rows import Rows
from quire.step.columns import RunnerOutput
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import NO_REQUEST, NewRow

logger = logging.getLogger(__name__)


class PromptRecord:
    """A prompt on the way: `token_ids`, and its `states` [n, L, C] on the host so far."""

    __slots__ = ("handle", "states", "token_ids")

    def __init__(self, handle: int, token_ids: Sequence[int]) -> None:
        self.handle = handle
        self.token_ids = token_ids
        self.states: Tensor | None = None


class HiddenStatesRecorder:
    """Watches the steps of all rows. A prompt's states are collected chunk by chunk; its file is
    written when the last chunk is on the host, before the request's first token goes out. No token
    of a prompt may come out of the prefix cache.
    """

    def __init__(self, plan: HiddenStatesPlan, rows: Rows) -> None:
        """Raises InvalidParameter for a folder that cannot be made."""
        self._plan, self._rows = plan, rows
        self._prompts: dict[int, PromptRecord] = {}
        try:
            os.makedirs(plan.folder, exist_ok=True)
        except OSError as error:
            name, allowed = "kv_transfer_config['shared_storage_path']", "it is or can be a folder"
            raise InvalidParameter(name, plan.folder, allowed, f"{error.strerror}.") from error

    def add_row(self, new: NewRow) -> None:
        if new.handle == NO_REQUEST:
            return  # nobody asked for this prompt's file
        if len(new.token_ids) > new.num_prompt_tokens:
            return  # a token has gone out, so that the file is there
        assert new.num_computed_tokens == 0, "every token of the prompt is computed"
        self._prompts[new.row] = PromptRecord(new.handle, new.token_ids[: new.num_prompt_tokens])

    def remove_row(self, row: int) -> None:
        self._prompts.pop(row, None)

    def begin(self, inputs: StepInputs) -> PromptStates | None:
        """The part of a step; None where no prompt is computed."""
        chunks = []
        columns = (inputs.rows, self._rows.num_computed[inputs.rows], inputs.counts, inputs.starts)
        for row, first, count, place in zip(*(column.tolist() for column in columns), strict=False):
            prompt = self._prompts.get(row)
            if prompt is not None and first < len(prompt.token_ids):
                chunks.append((row, prompt, first, count, place))
        return PromptStates(self, chunks) if chunks else None

    def write(self, prompt: PromptRecord) -> None:
        """Write the file of a whole prompt. Raises OSError."""
        assert prompt.states is not None, "a prompt has tokens"
        path = self._plan.path(prompt.handle, prompt.token_ids)
        ids = torch.tensor(prompt.token_ids, dtype=torch.int64)
        part = f"{path}.{os.getpid()}.part"
        try:
            write_tensors({"hidden_states": prompt.states, "token_ids": ids}, part)
            os.replace(part, path)
        finally:
            if os.path.exists(part):
                os.unlink(part)


class PromptStates:
    """The states of the prompts' tokens in one step. `chunks`: (row, prompt, its first position in
    the step, number of tokens, place of the first one in the step).
    """

    moves_rows = False

    def __init__(
        self,
        recorder: HiddenStatesRecorder,
        chunks: Sequence[tuple[int, PromptRecord, int, int, int]],
    ) -> None:
        self._recorder, self._chunks = recorder, chunks

    def compute(self, states: HiddenStates, mask: GrammarMask | None) -> Sequence[Tensor]:
        """Take the states of these tokens [n, L, C]."""
        places = [np.arange(place, place + count) for *_, count, place in self._chunks]
        at = torch.from_numpy(np.concatenate(places)).to(states.last.device)
        return [torch.stack([layer.index_select(0, at) for layer in states.aux], 1)]

    def advance(self) -> None:
        """Do nothing: states are kept when they are on the host."""

    def report(self, values: Sequence[Tensor], output: RunnerOutput) -> None:
        """Keep the states, and write the prompts that are whole. A file that cannot be written
        fails its request.
        """
        [states], start = values, 0
        for row, prompt, first, count, _ in self._chunks:
            size = len(prompt.token_ids)
            if prompt.states is None:
                prompt.states = states.new_empty((size, *states.shape[1:]), device="cpu")
            prompt.states[first : first + count] = states[start : start + count]
            start += count
            if first + count < size:
                continue
            try:
                self._recorder.write(prompt)
            except Exception as error:
                logger.exception("failed to write hidden states of request %d", prompt.handle)
                output.result.errors[row] = f"the hidden states could not be written: {error}"
            prompt.states = None
