"""Cases of the ops on KV memory: attention, rotary embedding with the KV write, and moving blocks.

Every slot that a step may not read holds NaN: other blocks, slots beyond a row's length, slots
behind its window. Table entries beyond the length hold numbers that are not blocks at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from quire.ops.attention import AttentionArgs
from quire.ops.catalog import Ops
from quire.ops.fp8 import FP8
from quire.ops.kv import KVShape, LayerKV, StateShape
from quire.ops.rotary import QKNorm, RotaryTable
from tests.support.op_cases.case import Arguments, Case, Draw, Prepared, by_row
from tests.support.op_cases.rows import norm_weight

NO_BLOCK = 2**30
SPARE_BLOCKS = 3


StepPart = tuple[int, Any, Any, slice]
"""Some rows of a step, or a token: place of the first token, query_start, seq_lens, rows."""


@dataclass(frozen=True)
class PagedShape:
    """Heads H and K, head dim D, block size S."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4


@dataclass(frozen=True)
class PagedRows:
    """Rows of a step in KV memory: (new tokens, length with them) of each, blocks in no order."""

    lengths: tuple[tuple[int, int], ...]
    shape: PagedShape
    window: int | None = None

    @property
    def query_start(self) -> np.ndarray:
        return np.cumsum([0, *(new for new, _ in self.lengths)], dtype=np.int32)

    @property
    def seq_lens(self) -> np.ndarray:
        return np.array([length for _, length in self.lengths], dtype=np.int32)

    def first_seen(self, row: int) -> int:
        """The first position that a new token of the row sees."""
        new, length = self.lengths[row]
        return 0 if self.window is None else max(0, length - new + 1 - self.window)

    def whole_step(self) -> StepPart:
        return 0, self.query_start, self.seq_lens, slice(None)

    def each_row(self) -> Iterator[StepPart]:
        for row, (count, length) in enumerate(self.lengths):
            yield int(self.query_start[row]), [0, count], [length], slice(row, row + 1)

    def each_token(self) -> Iterator[StepPart]:
        """A step of each new token alone."""
        for row, (count, length) in enumerate(self.lengths):
            for i in range(count):
                at = int(self.query_start[row]) + i
                yield at, [0, 1], [length - count + i + 1], slice(row, row + 1)


def plan_of(
    make: Callable[..., Any], draw: Draw, table: np.ndarray, size: int, part: StepPart, **facts: Any
) -> Any:
    """The plan that an op makes of a part of a step, whose rows have these tables."""
    _, starts, lengths, rows = part
    return make(
        query_start=np.array(starts, dtype=np.int32),
        seq_lens=np.array(lengths, dtype=np.int32),
        block_table=torch.from_numpy(table[rows]).to(draw.device),
        block_size=size,
        **facts,
    )


def tables(rows: PagedRows, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Block table [R, B] int32 and the number of blocks in the pool."""
    size = rows.shape.block_size
    counts = [-(-length // size) for _, length in rows.lengths]
    pool = sum(counts) + SPARE_BLOCKS
    order = iter(rng.permutation(pool).tolist())
    table = np.full((len(counts), max(counts, default=0) + 1), NO_BLOCK, dtype=np.int32)
    for row, count in enumerate(counts):
        table[row, :count] = [next(order) for _ in range(count)]
        table[row, : rows.first_seen(row) // size] = -1
    return table, pool


def _fill(
    ops: Ops,
    draw: Draw,
    rows: PagedRows,
    table: np.ndarray,
    pool: int,
    stored: torch.dtype | None,
    size: float = 1.0,
    is_shared: bool = False,
    odd_values: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> LayerKV:
    """KV memory of type `stored` (None: the case's) with values of about `size` where the rows may
    read and NaN everywhere else. odd_values: (row, position) -> what all its values are instead.
    """
    s = rows.shape
    data = np.full((pool, 2, s.block_size, s.kv_heads, s.head_dim), np.nan)
    for row, (_, length) in enumerate(rows.lengths):
        for position in range(rows.first_seen(row), length):
            block, offset = table[row, position // s.block_size], position % s.block_size
            # lengths of very different sizes, since memory with scales has one for each
            each = size if stored is None else size * 2.0 ** draw.rng.integers(-9, 2)
            data[block, :, offset] = draw.rng.standard_normal((2, s.kv_heads, s.head_dim)) * each
    for (row, position), value in odd_values.items():
        data[table[row, position // s.block_size], 1, position % s.block_size] = value
    kv = _allocate(ops, pool, s, stored or draw.dtype, is_shared)
    ops.import_kv(kv, range(pool), draw.of(data))
    return kv


def _allocate(
    ops: Ops, num_blocks: int, s: PagedShape, dtype: torch.dtype, is_shared: bool
) -> LayerKV:
    """KV memory of its own, or shared with larger blocks, so that a part of each page is unused and
    holds NaN.
    """
    kv: LayerKV
    if not is_shared:
        kv = ops.allocate_kv(num_blocks, s.block_size, s.kv_heads, s.head_dim, dtype)
        return kv
    own = KVShape(s.block_size, s.kv_heads, s.head_dim)
    larger = KVShape(s.block_size + 1, s.kv_heads + 1, s.head_dim)
    others, kv, _ = ops.allocate_shared_kv(num_blocks, [larger, own, StateShape(1000)], dtype)
    blank = torch.full((num_blocks, 2, *astuple(larger)), float("nan"))
    ops.import_kv(others, range(num_blocks), blank)
    return kv


def _attend(
    name: str,
    lengths: Sequence[tuple[int, int]],
    shape: PagedShape = PagedShape(),  # noqa: B008  (frozen)
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    is_strided: bool = False,
    is_bench: bool = False,
    stored: torch.dtype | None = None,
    size: float = 1.0,
    is_shared: bool = False,
) -> Case:
    rows = PagedRows(tuple(lengths), shape, window)

    def prepare(ops: Ops, draw: Draw) -> Prepared:
        table, pool = tables(rows, draw.rng)
        kv = _fill(ops, draw, rows, table, pool, stored, size, is_shared)
        make = draw.strided if is_strided else draw.normal
        q = make(int(rows.query_start[-1]), shape.heads * shape.head_dim, scale=1.5)
        q = q.unflatten(1, (shape.heads, shape.head_dim))
        args = AttentionArgs(
            scale=0.6,
            softcap=softcap,
            window=window,
            sinks=draw.normal(shape.heads, mean=1.0) if sinks else None,
            alibi=draw.wide(2.0 ** -np.arange(1, shape.heads + 1)) if alibi else None,
        )

        def arguments(part: StepPart) -> Arguments:
            first, starts, *_ = part
            plan = plan_of(ops.plan_attention, draw, table, shape.block_size, part, window=window)
            own = q[first : first + int(starts[-1])]
            return {"q": own, "kv": kv, "plan": plan, "args": args}

        singles = () if is_bench else tuple(map(arguments, rows.each_row()))
        return Prepared(arguments(rows.whole_step()), singles)

    return Case("attend", name, prepare, is_bench=is_bench)


MIXED = ((1, 1), (1, 9), (3, 3), (1, 4), (5, 13), (1, 12), (2, 11))
DECODE = ((1, 7), (1, 7), (1, 7))
RAGGED = ((1, 3), (1, 40), (1, 5), (1, 4), (1, 900), (1, 30), (1, 2), (1, 500), (1, 260))
LONG = ((520, 640), (130, 130), (1, 1030))
FEATURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("plain", {}),
    ("window", {"window": 5}),
    ("window1", {"window": 1}),
    ("wide_window", {"window": 100}),
    ("softcap", {"softcap": 0.9}),
    ("sinks", {"sinks": True}),
    ("alibi", {"alibi": True}),
    ("all", {"window": 6, "softcap": 1.3, "sinks": True, "alibi": True}),
)


def _attends() -> list[Case]:
    cases = [_attend("no_tokens", ())]
    for feature, options in FEATURES:
        cases += [
            _attend(f"mixed-{feature}", MIXED, **options),
            _attend(f"decode-{feature}", DECODE, **options),
            _attend(f"one_row-{feature}", ((1, 10),), is_strided=True, **options),
            _attend(f"one_chunk-{feature}", ((6, 10),), is_strided=True, **options),
        ]
    small = PagedShape(2, 1, 8, 16)
    cases += [
        _attend("mixed-mha-odd", MIXED, PagedShape(3, 3, 5, 1)),
        _attend("mixed-mqa", MIXED, PagedShape(6, 1, 16, 3), is_strided=True),
        _attend("row_without_new_tokens", ((1, 4), (0, 6), (3, 8))),
        _attend("ragged", RAGGED, small),
        _attend("ragged-all", RAGGED, small, window=300, softcap=2.0, sinks=True),
        _attend("long", LONG, small),
        _attend("long-window", LONG, small, window=70),
        _attend("long-softcap", LONG, small, softcap=1.1),
        _attend("mixed-shared", MIXED, is_shared=True),
        _attend("decode-shared-all", DECODE, window=6, softcap=1.3, sinks=True, is_shared=True),
        _attend("mixed-shared-mha-odd", MIXED, PagedShape(3, 3, 5, 1), is_shared=True),
    ]
    return cases + _attends_scaled("int8", torch.int8)


def _attends_scaled(name: str, stored: torch.dtype) -> list[Case]:
    cases = []
    for feature, options in FEATURES:
        cases += [
            _attend(f"{name}-mixed-{feature}", MIXED, stored=stored, **options),
            _attend(f"{name}-decode-{feature}", DECODE, stored=stored, **options),
        ]
    small = PagedShape(2, 1, 16, 16)
    return [
        *cases,
        _attend(f"{name}-no_tokens", (), stored=stored),
        _attend(f"{name}-decode-small", ((1, 70), (1, 30)), stored=stored, size=2.0**-11),
        _attend(f"{name}-mixed-mha-odd", MIXED, PagedShape(3, 3, 5, 1), stored=stored),
        _attend(
            f"{name}-mixed-mqa", MIXED, PagedShape(6, 1, 16, 3), stored=stored, is_strided=True
        ),
        _attend(f"{name}-ragged", RAGGED, small, stored=stored),
        _attend(f"{name}-ragged-window", RAGGED, small, window=300, sinks=True, stored=stored),
        _attend(f"{name}-long-window", LONG, small, window=70, stored=stored),
        _attend(f"{name}-mixed-shared", MIXED, stored=stored, is_shared=True),
    ]


def _benches() -> list[Case]:
    shape = PagedShape(16, 8, 128, 16)
    return [
        _attend("decode_0.6b_32x160", ((1, 160),) * 32, shape, is_bench=True),
        _attend("decode_0.6b_8x4096", ((1, 4096),) * 8, shape, is_bench=True),
        _attend("prefill_0.6b_512", ((512, 512),), shape, is_bench=True),
        _attend("chunk_0.6b_512_of_4096", ((512, 4096),), shape, is_bench=True),
        _attend(
            "decode_0.6b_8x4096-int8", ((1, 4096),) * 8, shape, is_bench=True, stored=torch.int8
        ),
    ]


def _rope_store(
    name: str,
    num_tokens: int,
    shape: PagedShape = PagedShape(),  # noqa: B008  (frozen)
    *,
    dim: int | None = None,
    interleaved: bool = False,
    has_rotary: bool = True,
    norm: str | None = None,
    over: str = "head",
    after_rope: bool = False,
    clip: float | None = None,
    has_nan: bool = False,
    padding: int = 0,
    is_strided: bool = False,
    stored: torch.dtype | None = None,
    is_shared: bool = False,
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        s, pool, max_positions = shape, num_tokens // shape.block_size + SPARE_BLOCKS, 50
        kv = _allocate(ops, pool, s, stored or draw.dtype, is_shared)
        blank = np.full((pool, 2, s.block_size, s.kv_heads, s.head_dim), np.nan)
        ops.import_kv(kv, range(pool), draw.of(blank))
        slots = draw.rng.permutation(pool * s.block_size)[:num_tokens]
        slots[num_tokens - padding :] = -1
        width = (s.heads + 2 * s.kv_heads) * s.head_dim
        normal = draw.with_nan if has_nan else draw.strided if is_strided else draw.normal
        arguments = {
            "qkv": normal(num_tokens, width),
            "kv": kv,
            "slots": draw.integers(slots),
            "positions": draw.integers(draw.rng.integers(0, max_positions, (1, num_tokens))),
            "heads": s.heads,
            "kv_heads": s.kv_heads,
            "head_dim": s.head_dim,
            "rotary": None,
            "qk_norm": _qk_norm(draw, s, norm, over, after_rope) if norm else None,
            "clip": clip,
        }
        if has_rotary:
            angles = draw.rng.uniform(-3, 3, (max_positions, (dim or s.head_dim) // 2))
            cos_sin = draw.wide(1.2 * np.concatenate((np.cos(angles), np.sin(angles)), 1))
            arguments["rotary"] = RotaryTable(cos_sin, dim or s.head_dim, interleaved)
        return by_row("rope_store", arguments)

    return Case("rope_store", name, prepare)


def _rope_queries(
    name: str,
    num_tokens: int,
    *,
    dim: int | None = 8,
    interleaved: bool = False,
    norm: str | None = None,
    is_strided: bool = False,
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        heads, head_dim, max_positions = 3, 8, 50
        normal = draw.strided if is_strided else draw.normal
        arguments = {
            "q": normal(num_tokens, heads * head_dim),
            "positions": draw.integers(draw.rng.integers(0, max_positions, (1, num_tokens))),
            "heads": heads,
            "head_dim": head_dim,
            "rotary": None,
            "q_norm": norm_weight(draw, norm, head_dim) if norm else None,
        }
        if dim is not None:
            angles = draw.rng.uniform(-3, 3, (max_positions, dim // 2))
            cos_sin = draw.wide(np.concatenate((np.cos(angles), np.sin(angles)), 1))
            arguments["rotary"] = RotaryTable(cos_sin, dim, interleaved)
        return by_row("rope_queries", arguments)

    return Case("rope_queries", name, prepare)


def _qk_norm(draw: Draw, s: PagedShape, kind: str, over: str, after_rope: bool) -> QKNorm:
    shapes = {
        "head": ((s.head_dim,), (s.head_dim,)),
        "full": ((s.heads * s.head_dim,), (s.kv_heads * s.head_dim,)),
        "per_head": ((s.heads, s.head_dim), (s.kv_heads, s.head_dim)),
    }[over]
    q, k = (norm_weight(draw, kind, *shape) for shape in shapes)
    return QKNorm(q, k, over, after_rope)


def _rope_stores() -> list[Case]:
    return [
        *(_rope_store(f"halves-{rows}", rows) for rows in (0, 1, 9)),
        _rope_store("interleaved", 5, interleaved=True),
        _rope_store("partial", 5, dim=4),
        _rope_store("partial-interleaved", 5, dim=6, interleaved=True),
        _rope_store("none", 5, has_rotary=False),
        _rope_store("padding", 7, padding=3),
        _rope_store("strided-mha", 5, PagedShape(3, 3, 6, 2), is_strided=True),
        _rope_store("clip", 5, clip=0.7),
        _rope_store("clip-nan", 5, clip=0.7, has_nan=True),
        *(_rope_store(f"{k}-head", 5, norm=k) for k in ("rms", "rms1p", "layer")),
        _rope_store("rms-head-after_rope", 5, norm="rms", after_rope=True),
        _rope_store("rms-full-clip-strided", 5, norm="rms", over="full", clip=1.0, is_strided=True),
        _rope_store("layer-per_head-partial", 5, norm="layer", over="per_head", dim=4),
        _rope_store("shared-padding", 9, padding=3, is_shared=True),
        *_rope_stores_scaled("int8", torch.int8),
    ]


def _rope_stores_scaled(name: str, stored: torch.dtype) -> list[Case]:
    return [
        _rope_store(name, 9, stored=stored),
        _rope_store(f"{name}-none-padding", 7, has_rotary=False, padding=3, stored=stored),
        _rope_store(f"{name}-mha-odd", 5, PagedShape(3, 3, 6, 2), stored=stored, is_strided=True),
        _rope_store(f"{name}-wide-norm", 5, PagedShape(2, 1, 40, 16), norm="rms", stored=stored),
        _rope_store(f"{name}-shared-padding", 9, padding=3, stored=stored, is_shared=True),
    ]


def _move(
    op: str,
    name: str,
    stored: torch.dtype | None = None,
    *,
    is_shared: bool = False,
    **ids: Sequence[int],
) -> Case:
    def prepare(ops: Ops, draw: Draw) -> Prepared:
        s = PagedShape()
        kv = _allocate(ops, 6, s, stored or draw.dtype, is_shared)
        block = (2, s.block_size, s.kv_heads, s.head_dim)
        ops.import_kv(kv, range(6), draw.normal(6, *block))
        arguments: Arguments = {"kv": kv, **ids}
        if op == "import_kv":
            arguments["data"] = draw.strided(len(ids["block_ids"]), *block)
        return Prepared(arguments)

    return Case(op, name, prepare)


def _moves() -> list[Case]:
    cases = []
    for op in ("export_kv", "import_kv", "zero_kv"):
        cases += [_move(op, "none", block_ids=[]), _move(op, "three", block_ids=[4, 0, 5])]
        cases += [_move(op, "three-shared", is_shared=True, block_ids=[4, 0, 5])]
    return [
        *cases,
        _move("copy_kv", "none", src_ids=[], dst_ids=[]),
        _move("copy_kv", "apart", src_ids=[0, 4], dst_ids=[3, 1]),
        _move("copy_kv", "swap", src_ids=[2, 5, 1], dst_ids=[5, 1, 2]),
        _move("copy_kv", "swap-shared", is_shared=True, src_ids=[2, 5, 1], dst_ids=[5, 1, 2]),
        *_moves_scaled("int8", torch.int8),
    ]


def _moves_scaled(name: str, stored: torch.dtype) -> list[Case]:
    return [
        _move("export_kv", name, stored, block_ids=[4, 0, 5]),
        _move("import_kv", name, stored, block_ids=[4, 0, 5]),
        _move("zero_kv", name, stored, block_ids=[4, 0]),
        _move("copy_kv", f"{name}-swap", stored, src_ids=[2, 5, 1], dst_ids=[5, 1, 2]),
        _move("copy_kv", f"{name}-shared", stored, is_shared=True, src_ids=[2, 5], dst_ids=[5, 1]),
    ]


QUERIES = (
    *(_rope_queries(f"halves-{rows}", rows) for rows in (0, 1, 9)),
    _rope_queries("interleaved-partial", 5, dim=6, interleaved=True),
    _rope_queries("norm-none", 5, dim=None, norm="rms_late_cast"),
    _rope_queries("norm-strided", 5, norm="rms", is_strided=True),
)
CASES = (*_rope_stores(), *QUERIES, *_attends(), *_moves(), *_benches())
FP8_CASES = (
    *_rope_stores_scaled("fp8", FP8),
    *_attends_scaled("fp8", FP8),
    *_moves_scaled("fp8", FP8),
)
