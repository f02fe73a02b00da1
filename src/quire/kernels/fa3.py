"""FlashAttention 3 for prompts on Hopper GPUs, where its package is installed.

It reads the paged memory of the Triton kernels, so everything else on that memory is theirs, and so
are the calls that do not suit it (`why_not`): `attend` asks for each call, since layers differ.
Steps of decodes alone stay with Triton, which is as fast there, and so no graph captures a kernel
whose launches depend on numbers of the host.

The function is the package's own, `flash_attn_interface.flash_attn_with_kvcache` (Dao et al. 2024,
Shah et al. 2024), and not `torch.nn.attention.varlen`: torch's built-in kernel refuses a block
table, so for paged memory torch imports this same package, only from 2.12 on, without the soft cap,
and puts it under every scaled_dot_product_attention of the process.

Its sums depend on the tiles that it chooses for a step, so it is not invariant and steps back where
bits must not depend on the batch. One split of the keys (num_splits=1) would free a row from its
neighbours, but not from how its prompt was cut.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels import triton
from quire.kernels.triton.attention.attend import attend as triton_attend
from quire.kernels.triton.attention.paged_kv import PagedKV
from quire.kernels.triton.attention.triton_plan import TritonPlan
from quire.kernels.triton.launch import dense
from quire.ops.attention import AttentionArgs
from quire.ops.catalog import CATALOG
from quire.ops.registry import Facts, Implementation
from quire.ops.step_rows import StepRows

PACKAGE = "flash_attn_interface"
FUNCTION = "flash_attn_with_kvcache"
HOPPER = (9, 0)
DTYPES = (torch.float16, torch.bfloat16)
MOST_HEAD_DIM = 256

PARAMETERS = (
    *("q", "k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"),
    *("softmax_scale", "causal", "softcap"),
)
"""Arguments of the function; a package whose function lacks one is another generation."""

Kernel = Callable[..., Tensor]


def implementations(facts: Facts) -> tuple[Implementation, ...]:
    """All ops on KV memory: they share its format."""
    found = find_kernel()

    def supports(facts: Facts) -> bool | str:
        return found if isinstance(found, str) else _serves(facts)

    # listed without a kernel, too: `supports` says why, and so does the report
    kernel = _refuse if isinstance(found, str) else found
    return offered(facts, kernel, supports)


def offered(
    facts: Facts, kernel: Kernel, supports: Callable[[Facts], bool | str]
) -> tuple[Implementation, ...]:
    """The Triton kernels' implementations, with prompts handed to `kernel`."""
    theirs = {i.op: i for i in triton.implementations(facts) if CATALOG[i.op].group == "kv"}

    def plan_attention(**given: Any) -> Fa3Plan:
        return Fa3Plan.of(theirs["plan_attention"].function(**given))

    def attend(q: Tensor, kv: PagedKV, plan: Fa3Plan, args: AttentionArgs) -> Tensor:
        if why_not(q, kv, plan, args):
            return triton_attend(q, kv, plan.inner, args)
        return _attend(kernel, q, kv, plan, args)

    ours: dict[str, Callable[..., Any]] = {"plan_attention": plan_attention, "attend": attend}
    return tuple(
        replace(
            implementation,
            provider="fa3",
            function=ours.get(name, implementation.function),
            supports=supports,
            batch_invariant=implementation.batch_invariant and name not in ours,
        )
        for name, implementation in theirs.items()
    )


def find_kernel() -> Kernel | str:
    """Return the package's function, or why it is missing."""
    if importlib.util.find_spec(PACKAGE) is None:
        return f"the package {PACKAGE} (FlashAttention 3) is not installed"
    try:
        function: Kernel | None = getattr(importlib.import_module(PACKAGE), FUNCTION, None)
    except Exception as error:  # built for another torch: whatever its loader raises
        return f"{PACKAGE} cannot be imported ({type(error).__name__}: {error})"
    if function is None:
        return f"{PACKAGE} has no {FUNCTION}"
    missing = [name for name in PARAMETERS if name not in inspect.signature(function).parameters]
    return f"{PACKAGE}.{FUNCTION} takes no {', '.join(missing)}" if missing else function


def _serves(facts: Facts) -> bool | str:
    """Whether models of this kind are served, or why not."""
    if facts.device.type != "cuda":
        return f"is for GPUs, not for {facts.device.type}"
    if facts.dtype not in DTYPES:
        return f"has no {str(facts.dtype).removeprefix('torch.')}"
    if facts.is_deterministic:
        return "its sums depend on how a prompt is cut, and bits must not"
    capability = torch.cuda.get_device_capability(facts.device)
    if capability != HOPPER:
        return f"is for compute capability 9.0, not {'.'.join(map(str, capability))}"
    return True


@dataclass(frozen=True, slots=True)
class Fa3Plan:
    """A plan of the Triton kernels, and the block table in the order of the step's rows, which the
    first layer makes that needs it.
    """

    window: int | None
    inner: TritonPlan
    most_new: int
    longest: int
    """The largest of the rows' counts of new tokens, and of their lengths."""
    _tables: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, inner: TritonPlan) -> Fa3Plan:
        """The plan around one of the Triton kernels."""
        most_new, longest = (int(counts.max(initial=0)) for counts in inner.lengths)
        return cls(inner.window, inner, most_new, longest)

    @property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """See `AttentionPlan`."""
        return self.inner.lengths

    def refill(self, step: StepRows) -> Fa3Plan:
        """A plan for another step; see `quire.ops.attention.AttentionPlan`."""
        return Fa3Plan.of(self.inner.refill(step))

    def table(self) -> Tensor:
        """[R, B] int32. Asked for by a layer and not before: until then the rows are on their way
        to the device.
        """
        if not self._tables:
            inner = self.inner
            self._tables.append(inner.block_table.index_select(0, inner.table_rows))
        return self._tables[0]


def why_not(q: Tensor, kv: PagedKV, plan: Fa3Plan, args: AttentionArgs) -> str:
    """The reason to leave a call to the Triton kernels; empty if there is none."""
    if plan.most_new <= 1:
        return "no row has more than one new token"
    if args.sinks is not None or args.alibi is not None:
        return "it has neither sinks nor ALiBi"
    if kv.dtype != q.dtype or q.dtype not in DTYPES:
        return "KV memory and queries are not of one 16-bit type"
    if q.shape[2] % 8 or q.shape[2] > MOST_HEAD_DIM:
        return f"the head dim is not a multiple of 8 up to {MOST_HEAD_DIM}"
    if args.window is not None and args.window < plan.longest:
        return "it reads blocks before the window, which may hold anything, with weight 0"
    return ""


def _attend(kernel: Kernel, q: Tensor, kv: PagedKV, plan: Fa3Plan, args: AttentionArgs) -> Tensor:
    assert args.window == plan.window, "the plan was made for another window"
    y = kernel(
        q=dense(q),
        k_cache=kv.keys,
        v_cache=kv.values,
        cache_seqlens=plan.inner.seq_lens,
        page_table=plan.table(),
        cu_seqlens_q=plan.inner.query_start,
        max_seqlen_q=plan.most_new,
        softmax_scale=args.scale,
        causal=True,
        softcap=args.softcap or 0.0,
    )
    return y.reshape(q.shape[0], -1)


def _refuse(**_: Any) -> Tensor:
    raise AssertionError("selected although there is no kernel")
