"""What travels between the scheduler and the runner: a plan goes down, a result comes up.

Plans speak in *rows* (a running request's stable index in the runner's state) and carry changes
only. A steady decode of R rows is the same `decode_rows` list object step after step, and nothing
else.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.params import SamplingParams

NULL_BLOCK = 0
"""The block that fills table entries which no query may read (behind a sliding window); it is
never allocated.
"""


class NewRow(msgspec.Struct, frozen=True, gc=False):
    """A request enters a row, fresh or resumed; the runner builds the row's state from this alone.

    `token_ids` are prompt and output so far, the first `num_computed_tokens` of which have their
    K/V in the cache.
    `block_ids[g][i]` is the block of KV group g that holds tokens [i*S, (i+1)*S).
    """

    row: int
    handle: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    params: SamplingParams
    seed: int
    prompt_logprobs_done: bool = False


class NewBlocks(msgspec.Struct, frozen=True, gc=False):
    """Blocks appended to one group's table of a row, from table index `first` on."""

    row: int
    group: int
    first: int
    block_ids: list[int]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """`num_tokens` next tokens of a row; `samples` when they reach its last known token, so that a
    new one is drawn.
    """

    row: int
    num_tokens: int
    samples: bool


class StepPlan(msgspec.Struct, gc=False):
    """One step's work. Order of application: `removed`, `added`, `new_blocks`, then the tokens.

    The step's tokens are ordered: one for each of `decode_rows`, then those of each chunk. A
    decode row's input token is the one sampled last in that row, which only the runner may know
    yet. The rows that sample, in order: `decode_rows`, then the chunks with `samples`.
    """

    step_id: int
    removed: list[int]
    added: list[NewRow]
    new_blocks: list[NewBlocks]
    decode_rows: Sequence[int]
    chunks: list[Chunk]
    copies: list[tuple[int, int]] = []
    """(from, to) block copies that happen before the step reads or writes K/V (copy on write)."""
    zero_blocks: list[int] = []
    """Blocks of recurrent state that start from zero."""

    @property
    def num_tokens(self) -> int:
        """How many tokens the step computes."""
        return len(self.decode_rows) + sum(chunk.num_tokens for chunk in self.chunks)

    @property
    def sampled_rows(self) -> list[int]:
        """The rows that get a new token, in the order of `StepResult.token_ids`."""
        return [*self.decode_rows, *(chunk.row for chunk in self.chunks if chunk.samples)]


class StepResult(msgspec.Struct, gc=False):
    """What the runner learned: one id for each sampled row of the plan, in order.

    A row named in `errors` failed alone; the id in its place, if it sampled, is void.
    """

    step_id: int
    token_ids: list[int]
    errors: dict[int, str] = {}
