"""The plan of a step: what a scheduler has an executor's workers compute.

Plans refer to *rows* (a running request's stable index in the runner's state) and contain only
changes. In a steady decode of R rows, a plan is nothing but the same `decode_rows` list object in
every step.

Drafts are guesses of a row's next tokens. They live in the runner's rows, and a plan says only how
many of them a step verifies: the row computes its newest token and the drafts, each of these
positions gives a token, and drafts are accepted up to the first that differs from its token. K/V of
wrong drafts stays where it is until the next step overwrites it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.params import RequestParams
from quire.step.media import EmbeddedSpan, MediaItem, Source

NULL_BLOCK = 0
"""The block in table entries that no query may read (before a window); never allocated."""


NO_REQUEST = 2**62
"""The handle of rows of steps that run before the first request."""


class NewRow(msgspec.Struct, frozen=True, gc=False):
    """A new or resumed request in a row; the runner builds the row's state from this alone.

    `token_ids` are prompt and output so far, the first `num_computed_tokens` of which have their
    K/V in the cache; there are no drafts. `adapter` is the slot of its LoRA adapter,
    which `StepPlan.adapter_loads` has filled, or 0.
    The type of `params` determines which head computes the row's results.

    `block_ids[g]` is the row's table of KV group g. Its entry i is the block of tokens
    [i*S, (i+1)*S), where S is the group's block size. A group of recurrent state has a ring of
    blocks instead: the state is in entry 0 now. A step that reads entry i leaves the state after
    its last token in the entry after i; with d drafts it leaves the state before the first draft
    there, those after each draft in the d entries that follow, and goes on from that of the last
    draft that was right. So a step never overwrites the state that it reads.

    `positions`, int32 [P, n], are those of the prompt's first n tokens on each of a model's P axes,
    made from the whole prompt; None: each token's place in the row. After them a token's position
    is its place plus `position_offset`, on every axis.
    """

    row: int
    handle: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[list[int], ...]
    params: RequestParams
    seed: int
    prompt_logprobs_done: bool = False
    adapter: int = 0
    embedded: Sequence[EmbeddedSpan] = ()
    """Positions at which rows of encoders' outputs stand, ascending."""
    positions: Any = None
    position_offset: int = 0
    source: Source | None = None
    """The content of the row's tables of groups of cross-attention; they never grow."""


class NewBlocks(msgspec.Struct, frozen=True, gc=False):
    """Blocks appended to one group's table of a row, from table index `first` on."""

    row: int
    group: int
    first: int
    block_ids: list[int]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """The next `num_tokens` tokens of a row, the last `num_drafts` of them drafts. `samples`: they
    reach its last known token, so that this one and each draft give a new token. A row that pools
    its prompt never samples.
    """

    row: int
    num_tokens: int
    samples: bool
    num_drafts: int = 0


class BlockTransfer(msgspec.Struct, frozen=True, gc=False):
    """A block whose content is copied from a tier or to it, under the key of the content in a KV
    group. The blocks of a load have one `number`, by which its end is told.
    """

    number: int
    block: int
    key: bytes
    group: int


class PromptAllowance(msgspec.Struct, frozen=True, gc=False):
    """Allowance of prompt tokens of a step while streams wait for it. A token at position
    p counts as 1 + `pair_cost` * p: `tokens` would all be at the start of their prompts.
    """

    tokens: float
    pair_cost: float = 0.0

    def cost(self, first: int, count: int) -> float:
        """The cost of `count` tokens from position `first` on."""
        return count + self.pair_cost * count * (first + count / 2)

    def fitting(self, first: int, used: float) -> int:
        """The most tokens from position `first` on that fit after what is `used`."""
        left = max(0.0, self.tokens - used)
        linear = 1 + self.pair_cost * first
        # the root of the quadratic in the form that does not divide by pair_cost, which may be 0
        return int(2 * left / (linear + math.sqrt(linear**2 + 2 * self.pair_cost * left)))


class StepPlan(msgspec.Struct, gc=False):
    """One step's work. Order of application: `removed`, `added`, `new_blocks`, `copies`,
    `zero_blocks`, `adapter_loads`, `dropped_outputs`, `encodings`, then the tokens. Loads and
    stores begin with the step, and the step does not wait for their end. A plan may have no tokens.

    The step's tokens are ordered: those of each of `decode_rows`, then those of each chunk. A
    decode row has one token, the one sampled last in that row, which only the runner may know
    yet, and `decode_drafts[i]` drafts (None: no row has any). The rows that sample, in order:
    `decode_rows`, then the chunks with `samples`.

    A row may have fewer drafts than its plan says, where the plan was made before the last step's
    result was known. The missing ones count as wrong.
    """

    step_id: int
    removed: list[int]
    added: list[NewRow]
    new_blocks: list[NewBlocks]
    decode_rows: Sequence[int]
    chunks: list[Chunk]
    copies: list[tuple[int, int]] = []
    """(from, to): blocks copied one after the other before the step reads or writes any."""
    zero_blocks: list[int] = []
    """Blocks of recurrent state that start from zero."""
    decode_drafts: Sequence[int] | None = None
    adapter_loads: list[tuple[int, int]] = []
    """(slot, number): LoRA adapters whose weights are copied into a slot, 1 or above, before the
    step computes. No row of a step that is in flight has an adapter in that slot.
    """
    loads: list[BlockTransfer] = []
    """Blocks to be filled. This step and those before its end do not read them."""
    stores: list[BlockTransfer] = []
    """Blocks written by earlier steps whose content is kept; not written before its end."""
    dropped_outputs: list[bytes] = []
    """Outputs of encoders that are forgotten, by the digests of their items."""
    encodings: list[MediaItem] = []
    """Items that encoders make rows of, which are kept under the items' digests for this step and
    later ones, until they are dropped.
    """
    allowance: PromptAllowance | None = None
    """The bound on the tokens of prompts that the step was planned with."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the step computes, including drafts."""
        chunked = sum(chunk.num_tokens for chunk in self.chunks)
        return len(self.decode_rows) + sum(self.decode_drafts or ()) + chunked

    @property
    def sampled_rows(self) -> list[int]:
        """The rows that get new tokens, in the order of `StepResult`."""
        return [*self.decode_rows, *(chunk.row for chunk in self.chunks if chunk.samples)]

    @property
    def sampled_drafts(self) -> list[int]:
        """The number of drafts that each of `sampled_rows` verifies."""
        decode = self.decode_drafts or [0] * len(self.decode_rows)
        return [*decode, *(chunk.num_drafts for chunk in self.chunks if chunk.samples)]
