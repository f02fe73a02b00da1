"""Runs the largest possible steps, and those that have kernels of their own, before the first
request.

They allocate the most memory that steps take, and compile every kernel that steps use, so that
neither delays a request. They go through the runner like any other step; all their tokens share one
block of KV memory, whose contents are never read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from quire.params import PoolingParams, RequestParams, SamplingParams
from quire.runner.forward.decode_graphs import decode_sizes
from quire.runner.runner import ModelRunner
from quire.step.faults import ProcessorFailure
from quire.step.grammar_mask import GrammarMask
from quire.step.plan import NO_REQUEST, Chunk, NewRow, StepPlan

logger = logging.getLogger(__name__)

SCRATCH_BLOCK = 1
"""The block that warm-up writes; every pool has it in addition to the null block."""


class _OneWord:
    """A tokenizer that encodes every text as the same two tokens."""

    vocab_size = 2

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0, 1]


def _edited() -> SamplingParams:
    """Parameters with everything that edits logits; one token is left."""
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


_GREEDY = SamplingParams(temperature=0.0)
_FIRST_TOKENS = 8
_MOST_COLUMNS = 128
"""Columns of log-probabilities for every row of a step; more are expected for few rows only."""


def _drawn(num_columns: int) -> SamplingParams:
    """Parameters with everything that draws, and log-probabilities with `num_columns` columns."""
    return SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        logprobs=num_columns,
        prompt_logprobs=num_columns,
    )


def warm_up(
    runner: ModelRunner, *, num_tokens: int, num_rows: int, max_len: int, max_logprobs: int
) -> None:
    """Run prompts of `num_tokens` in all and decodes of up to `num_rows` rows: greedy; with all
    features; with the memory that penalties and log-probabilities of all rows take; prompts
    together with decodes; and prompts with an adapter, whose decodes have been recorded.
    """
    plans = _Plans(runner)
    drawn, edited = _drawn(min(max_logprobs, _MOST_COLUMNS)), _edited()
    prompts = list(_prompts(num_tokens, num_rows, max_len))
    decodes = [min(2, max_len)] * num_rows
    for kinds in ((_GREEDY,), (_GREEDY, drawn, edited)):
        plans.run(prompts, kinds, decodes=0)
        plans.run(decodes, kinds, decodes=num_rows)
    for kind in (drawn, edited):
        plans.run(decodes, (kind,), decodes=num_rows)
    for size in decode_sizes(num_rows)[:-1]:
        plans.run(decodes[:size], (_GREEDY,), decodes=size)
        if size + max(decodes) <= num_tokens:
            plans.run(decodes[: size + 1], (_GREEDY,), decodes=size)
    for power in range(num_rows.bit_length(), num_tokens.bit_length()):  # tiles go by tokens, too
        if 1 << power < num_tokens:
            plans.run(list(_prompts(1 << power, num_rows, max_len)), (_GREEDY,), decodes=0)
    if runner.adapters is not None:
        for power in range(num_tokens.bit_length()):
            lengths = list(_prompts(1 << power, num_rows, max_len))
            plans.run(lengths, (_GREEDY,), decodes=0, adapter=1)


def run_first_steps(
    runner: ModelRunner, *, max_len: int, tasks: Sequence[str], generates: bool
) -> None:
    """Run a short prompt and a decode, and a prompt for each pooling task: weights and memory are
    touched, and threads started, as the first request would do. Nothing is compiled.
    """
    plans = _Plans(runner)
    length = min(_FIRST_TOKENS, max_len)
    for task in tasks:
        plans.run([length], (PoolingParams(task=task),), decodes=0)
    if generates:
        plans.run([length], (_GREEDY,), decodes=0)
        plans.run([min(2, max_len)], (_GREEDY,), decodes=1)


def warm_up_pooling(
    runner: ModelRunner, *, tasks: Sequence[str], num_tokens: int, num_rows: int, max_len: int
) -> None:
    """Run prompts of `num_tokens` in all, and of powers of two below, that are pooled for each of
    the tasks.
    """
    plans = _Plans(runner)
    for task in tasks:
        kind = PoolingParams(task=task)
        plans.run(list(_prompts(num_tokens, num_rows, max_len + 1)), (kind,), decodes=0)
        plans.run([1] * min(num_rows, num_tokens), (kind,), decodes=0)
        for power in range(num_tokens.bit_length()):
            if 1 << power < num_tokens:
                lengths = list(_prompts(1 << power, num_rows, max_len + 1))
                plans.run(lengths, (kind,), decodes=0)


class _Plans:
    """Steps made without the scheduler, with ids that no scheduled step has."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._step_id = -2

    def run(
        self,
        lengths: list[int],
        kinds: tuple[RequestParams, ...],
        *,
        decodes: int,
        adapter: int = 0,
    ) -> None:
        """Run one step of new rows with these numbers of tokens: of the first `decodes` rows only
        the last token is computed, of the others all. `adapter`: their slot.
        """
        rows = range(len(lengths))
        decodes = decodes if min(lengths) > 1 else 0
        added = [
            self._new_row(row, n, n - 1 if row < decodes else 0, kinds[row % len(kinds)], adapter)
            for row, n in zip(rows, lengths, strict=True)
        ]
        decode_rows = list(rows[:decodes])
        draws = isinstance(kinds[0], SamplingParams)
        chunks = [Chunk(row, lengths[row], draws) for row in rows[decodes:]]
        mask = self._mask() if len(kinds) > 1 else None
        plan = StepPlan(self._next(), [], added, [], decode_rows, chunks)
        plan.zero_blocks = [SCRATCH_BLOCK]  # recurrent states are read before they are written
        try:
            self._launch(plan, mask)
        finally:
            self._launch(StepPlan(self._next(), list(rows), [], [], [], []))

    def _launch(self, plan: StepPlan, mask: GrammarMask | None = None) -> None:
        step = self._runner.launch(plan)
        try:
            step.sample(mask)
        except ProcessorFailure:  # it need not serve requests that no client has sent
            logger.info(
                "a logits processor failed during warm-up; steps that use it are not warmed up"
            )
            return
        step.result()

    def _mask(self) -> GrammarMask:
        """A mask for the first sampled row that allows everything."""
        width = -(-self._runner.model.spec.vocab // 32)
        return GrammarMask([0], np.full((1, width), -1, dtype=np.int32))

    def _new_row(
        self, row: int, length: int, computed: int, params: RequestParams, adapter: int
    ) -> NewRow:
        return NewRow(
            row=row,
            handle=NO_REQUEST,
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=computed,
            block_ids=tuple([SCRATCH_BLOCK] * t.shape[1] for t in self._runner.rows.tables),
            params=params,
            seed=0,
            adapter=adapter,
        )

    def _next(self) -> int:
        self._step_id -= 1
        return self._step_id


def _prompts(num_tokens: int, num_rows: int, max_len: int) -> Iterator[int]:
    """Split `num_tokens` into the fewest prompts, each with room for one more token."""
    longest = max(1, max_len - 1)
    for _ in range(num_rows):
        if num_tokens <= 0:
            return
        yield min(num_tokens, longest)
        num_tokens -= longest
