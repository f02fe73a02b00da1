"""The largest steps that can come, run before any request is there.

They take the memory that steps take at most, and compile every kernel that steps use, so that
neither happens while somebody waits. They go through the runner like any other step; all their
tokens share one block of KV memory, whose contents nobody reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from quire.params import SamplingParams
from quire.runner.faults import ProcessorFailure
from quire.runner.grammar_mask import GrammarMask
from quire.runner.runner import ModelRunner
from quire.scheduling.step import Chunk, NewRow, StepPlan

logger = logging.getLogger(__name__)

SCRATCH_BLOCK = 1
"""The block that warm-up writes; a pool has it beside the null block at least."""


class _OneWord:
    """A tokenizer that makes the same two tokens of everything."""

    vocab_size = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0, 1]


def _edited() -> SamplingParams:
    """Everything that edits logits; one token is left."""
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
        allowed_token_ids=[0],
        bad_words=["any"],
    )
    params.update_from_tokenizer(_OneWord())
    return params


_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, logprobs=0),
    _edited(),
)
"""What rows ask for in turn; the first step of each shape is greedy alone."""


def warm_up(runner: ModelRunner, *, num_tokens: int, num_rows: int, max_len: int) -> None:
    """Run prompts of `num_tokens` in all and `num_rows` decodes: greedy, with everything, and with
    the memory that penalties of all rows take.
    """
    plans = _Plans(runner, max_len)
    decodes = [min(2, max_len)] * num_rows
    for kinds in (_KINDS[:1], _KINDS):
        plans.run(list(_prompts(num_tokens, num_rows, max_len)), kinds, decodes=False)
        plans.run(decodes, kinds, decodes=max_len > 1)
    plans.run(decodes, _KINDS[-1:], decodes=max_len > 1)


class _Plans:
    """Steps that nobody scheduled, with numbers that no scheduled step has."""

    def __init__(self, runner: ModelRunner, max_len: int) -> None:
        self._runner = runner
        self._width = -(-max_len // runner.rows.block_size)
        self._step_id = -2

    def run(self, lengths: list[int], kinds: tuple[SamplingParams, ...], *, decodes: bool) -> None:
        """One step of new rows with so many tokens, all of them computed or the last alone."""
        rows = range(len(lengths))
        added = [
            self._new_row(row, length, length - 1 if decodes else 0, kinds[row % len(kinds)])
            for row, length in zip(rows, lengths, strict=True)
        ]
        chunks = [Chunk(row, length, True) for row, length in zip(rows, lengths, strict=True)]
        decode_rows, chunks = (list(rows), []) if decodes else ([], chunks)
        mask = self._mask() if len(kinds) > 1 else None
        self._launch(StepPlan(self._next(), [], added, [], decode_rows, chunks), mask)
        self._launch(StepPlan(self._next(), list(rows), [], [], [], []))

    def _launch(self, plan: StepPlan, mask: GrammarMask | None = None) -> None:
        step = self._runner.launch(plan)
        try:
            step.sample(mask)
        except ProcessorFailure:  # it need not serve requests that nobody has sent
            logger.info("a logits processor failed in warm-up, which leaves its steps out")
            return
        step.result()

    def _mask(self) -> GrammarMask:
        """For the first sampled row; it allows everything."""
        width = -(-self._runner.model.spec.vocab // 32)
        return GrammarMask([0], np.full((1, width), -1, dtype=np.int32))

    def _new_row(self, row: int, length: int, computed: int, params: SamplingParams) -> NewRow:
        return NewRow(
            row=row,
            handle=row,
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=computed,
            block_ids=tuple([SCRATCH_BLOCK] * self._width for _ in self._runner.rows.tables),
            params=params,
            seed=0,
        )

    def _next(self) -> int:
        self._step_id -= 1
        return self._step_id


def _prompts(num_tokens: int, num_rows: int, max_len: int) -> Iterator[int]:
    """Lengths of as few prompts as have so many tokens, with room for one more in each."""
    longest = max(1, max_len - 1)
    for _ in range(num_rows):
        if num_tokens <= 0:
            return
        yield min(num_tokens, longest)
        num_tokens -= longest
