"""A model without tensors whose every token depends on every KV slot that it reads, so that a
wrong block is a wrong text.

The K/V of a token is a hash chained over the K/V before it, read through the block table; a
recurrent state is a hash chained over the tokens; the next token is a hash of all slots that a
query at the last position sees, and of the state. The adapter in a row's slot of adapters, with the
number of the model's weights, is the beginning of every chain, and a part of every token's hash. At
the places of an item of media are other values than its placeholders: the rows that an encoder
makes of its content, with the model's weights.
`oracle` computes the same from a plain list of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from quire.params import PoolingParams
from quire.scheduling.settings import KVGroupSpec
from quire.step.media import MediaItem
from quire.step.plan import NULL_BLOCK, NewRow, StepPlan
from quire.step.result import StepResult

EOS = 0
WRONG = -1
"""A draft that is never right: no sampled id is negative."""


_WEIGHTS = 1000
"""More than there are adapters."""
_STATE = 0x57A7E
"""Keeps hashes of states apart from those of K/V; a number, since hashes of text differ by process.
"""
_SOURCE = 0x50CE


def _slot_value(previous: int, token: int, position: int) -> int:
    return hash((previous, token, position))


def _next_state(state: int, token: int, adapter: int) -> int:
    return hash((state, token, _STATE, adapter))


def _next_token(seen: Sequence[Sequence[int]], seed: int, vocab_size: int, adapter: int = 0) -> int:
    head = (seed, adapter) if adapter else (seed,)
    return hash((*map(tuple, seen), *head)) % vocab_size


def oracle(
    prompt: Sequence[int],
    *,
    seed: int,
    num_tokens: int,
    vocab_size: int,
    groups: Sequence[KVGroupSpec] = (KVGroupSpec(),),
    adapter: int = 0,
    weights: int = 0,
    media: Sequence[MediaItem] = (),
    source: Sequence[int] | None = None,
) -> list[int]:
    """The output that follows `prompt`, up to `num_tokens` ids, the first EOS included. source:
    the slots of the second content, if they are known; else they follow from `media`.
    """
    tokens, slots, state = list(prompt), list[int](), 0
    for item in media:
        rows = iter(encode(item, weights))
        for start, end in item.places:
            tokens[start:end] = [next(rows) for _ in range(start, end)]
    adapter += weights * _WEIGHTS
    if source is None:
        source = [
            v for i in media if not i.places for v in source_slots(encode(i, weights), adapter)
        ]
    output: list[int] = []
    while len(output) < num_tokens:
        for position in range(len(slots), len(tokens)):
            previous = slots[-1] if slots else adapter
            slots.append(_slot_value(previous, tokens[position], position))
            state = _next_state(state, tokens[position], adapter)
        seen = [
            source if group.kind == "source" else _visible(group, slots, state) for group in groups
        ]
        output.append(_next_token(seen, seed, vocab_size, adapter))
        tokens.append(output[-1])
        if output[-1] == EOS:
            break
    return output


def _visible(group: KVGroupSpec, slots: list[int], state: int) -> list[int]:
    if group.kind == "state":
        return [state]
    return slots if group.window is None else slots[max(0, len(slots) - group.window) :]


def source_slots(rows: Sequence[int], adapter: int) -> list[int]:
    """The slots of a second content whose encoder makes `rows`."""
    return [hash((adapter, value, place, _SOURCE)) for place, value in enumerate(rows)]


def encode(item: MediaItem, weights: int) -> list[int]:
    """The rows of an item: negative, as no id is."""
    content = int(item.inputs["content"])
    return [-2 - abs(hash((content, weights, row))) for row in range(item.num_rows)]


class HashRow:
    """A row's state as a runner keeps it: its tokens, how many have K/V, its block tables, where
    its recurrent state is in the ring, and the drafts of its next tokens.
    """

    def __init__(self, new: NewRow, adapters: Mapping[int, int], weights: int) -> None:
        """adapters: what the slots of adapters have; weights: the number of the model's."""
        self.tokens = list(new.token_ids)
        """Its ids; where it has computed them, the rows of media in place of placeholders."""
        self.embedded = list(new.embedded)
        self._weights = weights * _WEIGHTS
        self.num_computed = new.num_computed_tokens
        self.tables = [list(table) for table in new.block_ids]
        self.seed = new.seed
        self._slot = new.adapter
        self._adapters = adapters
        self.pools = isinstance(new.params, PoolingParams)
        self.source = new.source
        self.source_is_written = new.source is None or new.source.is_written
        self.state_index = 0
        self.drafts: list[int] = []

    @property
    def adapter(self) -> int:
        """The number of the adapter that its slot has now, 0 without a slot, and of the weights
        that the model had when it got its row.
        """
        return self._weights + (self._adapters[self._slot] if self._slot else 0)


Drafter = Callable[[HashRow], list[int]]
"""Guesses a row's next tokens, right or wrong."""


class HashEncoder:
    """Keeps the rows of items as plans say, no more than `num_rows` of them."""

    FAILURE = "injected"

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._outputs: dict[bytes, list[int] | None] = {}
        """Digest -> rows; None: they could not be made."""

    def change(self, plan: StepPlan, weights: int) -> None:
        """Drop and encode what a plan says."""
        for digest in plan.dropped_outputs:
            del self._outputs[digest]
        for item in plan.encodings:
            assert item.digest not in self._outputs, "rows are made that are there"
            self._outputs[item.digest] = self._encode(item, weights)
        kept = sum(len(rows) for rows in self._outputs.values() if rows is not None)
        assert kept <= self._num_rows, "more rows are kept than there is room for"

    def rows(self, digest: bytes) -> list[int] | None:
        """The rows of an item that are there; None if they could not be made."""
        assert digest in self._outputs, "an output is used that is not there"
        return self._outputs[digest]

    def failed_in_step(self, plan: StepPlan) -> list[bytes]:
        """What could not be made of the plan's items."""
        return [i.digest for i in plan.encodings if self._outputs.get(i.digest, ()) is None]

    def _encode(self, item: MediaItem, weights: int) -> list[int] | None:
        return encode(item, weights)


class HashRunner:
    """Executes step plans on the hash model, trusting nothing but the plan.

    Slots that were never written hold a value that no right text contains. Raises AssertionError
    when a plan contradicts the state that earlier plans built.
    """

    UNWRITTEN = -0x5EED

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        groups: Sequence[KVGroupSpec] = (KVGroupSpec(),),
        vocab_size: int = 50,
        drafter: Drafter | None = None,
        encoder: HashEncoder | None = None,
    ) -> None:
        """encoder: keeps the rows of media; None: there are none."""
        self.encoder = encoder
        self.groups = tuple(groups)
        self.vocab_size = vocab_size
        self._drafter = drafter
        self._sizes = [group.block_size or block_size for group in groups]
        # All groups share the pool: a block id belongs to one group at a time.
        self._slots = [[self.UNWRITTEN] * max(self._sizes) for _ in range(num_blocks)]
        self._rows: dict[int, HashRow] = {}
        self._adapters: dict[int, int] = {}
        self._step_id = -1
        self.weights = 0
        """The number of the model's weights."""

    @property
    def has_drafts(self) -> bool:
        return self._drafter is not None

    def drafts(self, row: int) -> list[int]:
        """The drafts of a row's next tokens."""
        return self._rows[row].drafts

    def execute(self, plan: StepPlan, read: Sequence[int] | None = None) -> StepResult:
        """Run one step. Sampled ids stay in the rows too, as on a device, so a later plan needs no
        ids. The changes of a step that is run in parts are made with its first part. read: the
        ids of the step's tokens as somebody else has read them, who must be right.
        """
        if plan.step_id != self._step_id:
            self._step_id = plan.step_id
            self._change(plan)
        if read is not None:
            pairs = zip(read, self._ids(plan), strict=True)
            assert all(right in (None, own) for own, right in pairs), "other ids were read"
        errors = self._embed(plan)
        self._write_sources(plan, errors)
        # All K/V of a step is written before any of it is read, as in a batched attention.
        drafts = plan.decode_drafts or [0] * len(plan.decode_rows)
        for number, count in zip(plan.decode_rows, drafts, strict=True):
            self._write(self._rows[number], 1, count)
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            self._write(row, chunk.num_tokens - chunk.num_drafts, chunk.num_drafts)
            if not chunk.samples:
                row.num_computed += chunk.num_tokens
                row.state_index += 1
                is_end = row.num_computed >= len(row.tokens)
                assert row.pools or not is_end, "a chunk that ends a prompt samples"
        sampled = zip(plan.sampled_rows, plan.sampled_drafts, strict=True)
        ids = [self._sample(self._rows[number], count) for number, count in sampled]
        flat = [token for tokens in ids for token in tokens]
        result = StepResult(plan.step_id, flat, errors)
        if self.encoder is not None:
            result.failed_encodings = self.encoder.failed_in_step(plan)
        if self._drafter is not None:
            result.counts = [len(tokens) for tokens in ids]
            result.num_drafts = [len(self._rows[number].drafts) for number in plan.sampled_rows]
        return result

    def _ids(self, plan: StepPlan) -> list[int | None]:
        """The ids of a step's tokens, drafts among them; None for drafts that a row lacks."""
        drafts = plan.decode_drafts or [0] * len(plan.decode_rows)
        parts = [(row, 1, count) for row, count in zip(plan.decode_rows, drafts, strict=True)]
        parts += [(c.row, c.num_tokens - c.num_drafts, c.num_drafts) for c in plan.chunks]
        found: list[int | None] = []
        for number, count, num_drafts in parts:
            row = self._rows[number]
            found += row.tokens[row.num_computed : row.num_computed + count]
            found += [*row.drafts, *[None] * num_drafts][:num_drafts]
        return found

    def _change(self, plan: StepPlan) -> None:
        for number in plan.removed:
            self._rows.pop(number, None)
        for new in plan.added:
            assert new.row not in self._rows, f"row {new.row} is taken"
            self._rows[new.row] = HashRow(new, self._adapters, self.weights)
        for grown in plan.new_blocks:
            table = self._rows[grown.row].tables[grown.group]
            assert len(table) == grown.first, "blocks go to a table's end"
            table += grown.block_ids
        for source, target in plan.copies:
            self._slots[target] = list(self._slots[source])
        for block in plan.zero_blocks:
            self._slots[block] = [0] * len(self._slots[block])
        self._adapters.update(plan.adapter_loads)
        if self.encoder is not None:
            self.encoder.change(plan, self.weights)

    def _embed(self, plan: StepPlan) -> dict[int, str]:
        """Put rows of media where chunks have placeholders. Returns an error for each row that
        needs what could not be encoded.
        """
        errors = {}
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            first, end = row.num_computed, row.num_computed + chunk.num_tokens
            for span in row.embedded:
                positions = range(max(first, span.start), min(end, span.end))
                if not positions:
                    continue
                is_split = len(positions) < span.end - span.start
                assert not (span.is_bidirectional and is_split), "an item is split"
                assert self.encoder is not None, "media without an encoder"
                rows = self.encoder.rows(span.digest)
                if rows is None:
                    errors[chunk.row] = self.encoder.FAILURE
                for position in positions:
                    value = WRONG if rows is None else rows[span.first_row + position - span.start]
                    row.tokens[position] = value
        return errors

    def _write_sources(self, plan: StepPlan, errors: dict[int, str]) -> None:
        """Fill the blocks of second contents that rows begin to read in this step."""
        for chunk in plan.chunks:
            row = self._rows[chunk.row]
            if row.source is None or row.source_is_written:
                continue
            assert self.encoder is not None, "a source without an encoder"
            rows = self.encoder.rows(row.source.digest)
            if rows is None:
                errors[chunk.row] = self.encoder.FAILURE
            values = [WRONG] * row.source.num_rows if rows is None else rows
            for number, group in enumerate(self.groups):
                if group.kind == "source":
                    self._fill_source(number, row, source_slots(values, row.adapter))
            row.source_is_written = True

    def _fill_source(self, number: int, row: HashRow, slots: Sequence[int]) -> None:
        size, table = self._sizes[number], row.tables[number]
        for place, value in enumerate(slots):
            self._slots[table[place // size]][place % size] = value

    def source_of(self, row: HashRow) -> list[int]:
        """What a row reads of its second content, in the first group that reads any."""
        kinds = [group.kind for group in self.groups]
        if row.source is None or "source" not in kinds:
            return []
        number = kinds.index("source")
        size, table = self._sizes[number], row.tables[number]
        assert len(table) == -(-row.source.num_rows // size), (
            "a source has blocks of its own length"
        )
        return [self._slots[table[p // size]][p % size] for p in range(row.source.num_rows)]

    # Transfers

    def content(self, block: int) -> list[int]:
        """What a block holds now."""
        return list(self._slots[block])

    def fill(self, block: int, content: list[int] | None) -> None:
        """Something outside writes a block; None: nothing of use."""
        unwritten = [self.UNWRITTEN] * len(self._slots[block])
        self._slots[block] = unwritten if content is None else list(content)

    # K/V and state

    def _write(self, row: HashRow, count: int, num_drafts: int) -> None:
        """Write `count` known tokens and the drafts; a draft that the row lacks is a wrong one."""
        drafts = [*row.drafts, *[WRONG] * num_drafts][:num_drafts]
        end = row.num_computed + count
        assert end <= len(row.tokens), "a token is computed before it is known"
        ids = [*row.tokens[:end], *drafts]
        for number, group in enumerate(self.groups):
            if group.kind == "state":
                self._write_state(row, number, ids, num_drafts)
            elif group.kind not in ("none", "source"):
                self._write_slots(row, number, ids)

    def _write_slots(self, row: HashRow, number: int, ids: list[int]) -> None:
        size, table = self._sizes[number], row.tables[number]
        for position in range(row.num_computed, len(ids)):
            if position > 0 and self.groups[number].window != 1:
                place = position - 1
                previous = self._slots[table[place // size]][place % size]
            else:
                previous = self._chained(row, ids, position)
            block = table[position // size]
            assert block != NULL_BLOCK, "K/V is written to the null block"
            self._slots[block][position % size] = _slot_value(previous, ids[position], position)

    def _write_state(self, row: HashRow, number: int, ids: list[int], num_drafts: int) -> None:
        """One block further for the state before the drafts, and one for each draft."""
        ring = row.tables[number]
        state = self._slots[ring[row.state_index % len(ring)]][0]
        for position in range(row.num_computed, len(ids)):
            state = _next_state(state, ids[position], row.adapter)
            further = position - (len(ids) - num_drafts) + 2
            if further > 0:
                self._slots[ring[(row.state_index + further) % len(ring)]][0] = state

    @staticmethod
    def _chained(row: HashRow, ids: list[int], position: int) -> int:
        """The value before `position` from the ids alone: a window of one token reads nothing
        before.
        """
        value = row.adapter
        for index in range(position):
            value = _slot_value(value, ids[index], index)
        return value

    # Sampling

    def _sample(self, row: HashRow, num_drafts: int) -> list[int]:
        """The token after the known ones, and after each draft as long as the drafts are right."""
        drafts, first = row.drafts[:num_drafts], row.num_computed
        sampled: list[int] = []
        while True:
            accepted = len(sampled)
            sampled.append(self._token_after(row, accepted, first))
            row.tokens.append(sampled[-1])
            if drafts[accepted : accepted + 1] != sampled[-1:]:
                break
        row.num_computed = len(row.tokens) - 1
        row.state_index += len(sampled)
        row.drafts = [] if self._drafter is None else self._drafter(row)
        return sampled

    def _token_after(self, row: HashRow, accepted: int, first: int) -> int:
        """The token that follows the row's tokens, after `accepted` drafts of this step; `first`:
        the first position of the step.
        """
        seen = []
        for number, group in enumerate(self.groups):
            table, size = row.tables[number], self._sizes[number]
            if group.kind == "state":
                ring = table[(row.state_index + 1 + accepted) % len(table)]
                seen.append([self._slots[ring][0]])
                continue
            if group.kind == "source":
                seen.append(self.source_of(row))
                continue
            length = len(row.tokens)
            if group.kind == "none":  # a query sees the tokens of its own step
                slots = [self._chained(row, row.tokens, p + 1) for p in range(first, length)]
                seen.append(slots)
                continue
            start = 0 if group.window is None else max(0, length - group.window)
            slots = [self._slots[table[p // size]][p % size] for p in range(start, length)]
            seen.append(slots)
        return _next_token(seen, row.seed, self.vocab_size, row.adapter)
