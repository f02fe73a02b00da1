"""What every provider of ops must hold, checked case by case (`quire.ops.cases`).

`check` runs one case and raises AssertionError with the first broken rule:

1. error against the oracle in float64 at most twice that of plain torch in the same dtype, or one
rounding of a result that came from a sum in fp32, or one step in KV memory of a byte per number;
2. no NaN from memory that the call may not read, no value in memory that it did not set; 3. memory
around each output, and KV memory outside the written slots, unchanged; 4. inputs unchanged, except
what the op declares to mutate; 5. the same bits in a second run, and, where the provider claims it,
from each row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops import CATALOG, Ops
from quire.ops.cases import Case, Draw, Prepared
from quire.ops.fp8 import FP8, LARGEST
from quire.ops.kv import LARGEST_NUMBER, numbers_and_scales

MARGIN = 64
"""Elements of guard band on either side of an allocation."""

STEPS = {torch.int8: 1.001 / 127, FP8: 1.001 * 32 / LARGEST}
"""Of KV memory, over its largest number: a value in the middle of two may become either."""

Results = dict[str, Tensor]


class Fenced(TorchDispatchMode):
    """While active, memory that Python code allocates through torch is NaN and lies between guard
    bands.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket not in _ALLOCATIONS or not result.is_contiguous():
            return result
        has_memory = result.numel() and result.device.type != "meta"
        return self._fence(result) if has_memory else result

    def _fence(self, like: Tensor) -> Tensor:
        poison = float("nan") if like.is_floating_point() else 0x55
        count = like.numel() + 2 * MARGIN
        buffer = torch.full((count,), poison, dtype=like.dtype, device=like.device)
        self._buffers.append((buffer, buffer.clone()))
        return buffer[MARGIN:-MARGIN].view(like.shape)

    def check(self) -> None:
        """Raise AssertionError if somebody wrote into a guard band."""
        for buffer, before in self._buffers:
            for band in (slice(None, MARGIN), slice(-MARGIN, None)):
                assert _same(buffer[band], before[band]), "wrote outside of its output"


_ALLOCATIONS = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,
)


def check(
    case: Case, dtype: torch.dtype, ops: Ops, plain: Ops, oracle: Ops, device: str = "cpu"
) -> None:
    """Raise AssertionError if `ops`, which run on `device`, break a rule on the case; see the
    module. `plain` and `oracle` run on the CPU.
    """
    draw = case.draw(dtype, device)
    prepared = case.prepare(ops, draw)
    before = [tensor.clone() for tensor in draw.tensors]
    kv_before = _kv(ops, prepared)
    fence = Fenced()
    with fence:
        result = case.run(ops, prepared.arguments)
    fence.check()
    results = _named(result) | _kv(ops, prepared)
    _check_inputs(draw, before)
    _check_mutation(case, kv_before, results)
    _check_error(case, dtype, results, plain, oracle)
    _check_repeatable(case, dtype, ops, results, device)
    if ops.batch_invariant:
        _check_singles(case, ops, prepared, result)


def results_of(case: Case, dtype: torch.dtype, ops: Ops, device: str = "cpu") -> Results:
    """A fresh run of the case: what the op returned ("0", "1", ...) and the KV memory after it
    ("kv"), on the CPU.
    """
    prepared = case.prepare(ops, case.draw(dtype, device))
    result = case.run(ops, prepared.arguments)
    return _named(result) | _kv(ops, prepared)


def relative_error(value: Tensor, truth: Tensor) -> float:
    """Largest error over largest true value; inf where one is not finite and the other is not the
    same.
    """
    value, truth = value.double(), truth.double()
    known, endless = truth.isfinite(), truth.isinf()
    if not torch.equal(value.isnan(), truth.isnan()) or (value != truth)[endless].any():
        return float("inf")
    if not known.any():
        return 0.0
    largest = truth[known].abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float((value[known] - truth[known]).abs().max() / largest)


def _named(result: Any) -> Results:
    if result is None:
        return {}
    parts = result if isinstance(result, tuple) else (result,)
    return {str(i): _numbers(part) for i, part in enumerate(parts)}


def _kv(ops: Ops, prepared: Prepared) -> Results:
    kv = prepared.arguments.get("kv")
    return {} if kv is None else {"kv": _numbers(ops.export_kv(kv, range(kv.num_blocks)))}


def _numbers(data: Tensor) -> Tensor:
    """What blocks with scales in the neutral form stand for, exactly; anything else as it is."""
    data = data.cpu()
    if data.dtype not in LARGEST_NUMBER:
        return data
    numbers, scales = numbers_and_scales(data, data.dtype)
    return numbers.double() * scales.double().unsqueeze(-1)


def _same(a: Tensor, b: Tensor) -> bool:
    """Bitwise, so that NaN equals NaN."""
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _one_nan(t: Tensor) -> Tensor:
    """All NaN with the same bits: what a processor makes depends on which operand was first."""
    return t.masked_fill(t.isnan(), float("nan")) if t.is_floating_point() else t


def _bits(t: Tensor) -> Tensor:
    return t.flatten().view(-1, 1).contiguous().view(torch.uint8)


def _check_inputs(draw: Draw, before: list[Tensor]) -> None:
    for tensor, copy in zip(draw.tensors, before, strict=True):
        assert _same(tensor, copy), f"wrote to an input of shape {tuple(tensor.shape)}"


def _check_mutation(case: Case, kv_before: Results, results: Results) -> None:
    if "kv" not in kv_before:
        return
    is_declared = "kv" in CATALOG[case.op].mutates
    if not is_declared:
        assert _same(kv_before["kv"], results["kv"]), "wrote to KV memory that it only reads"


def _check_error(case: Case, dtype: torch.dtype, results: Results, plain: Ops, oracle: Ops) -> None:
    truths, plains = results_of(case, dtype, oracle), results_of(case, dtype, plain)
    kv = case.prepare(plain, case.draw(dtype)).arguments.get("kv")
    step = STEPS.get(kv.dtype, 0.0) if kv is not None else 0.0
    assert results.keys() == truths.keys()
    for name, truth in truths.items():
        value = results[name]
        assert value.shape == truth.shape, f"{name}: shape {value.shape} is not {truth.shape}"
        assert value.dtype == plains[name].dtype, f"{name}: dtype {value.dtype}"
        error, allowed = relative_error(value, truth), relative_error(plains[name], truth)
        limit = max(2 * allowed, torch.finfo(dtype).eps + torch.finfo(torch.float32).eps)
        if name == "kv":
            limit = max(limit, step)
        assert error <= limit, f"{name}: error {error:.3g}, plain torch's is {allowed:.3g}"


def _check_repeatable(
    case: Case, dtype: torch.dtype, ops: Ops, results: Results, device: str
) -> None:
    for name, again in results_of(case, dtype, ops, device).items():
        assert _same(again, results[name]), f"{name}: other bits in a second run"


def _check_singles(case: Case, ops: Ops, prepared: Prepared, result: Any) -> None:
    if not prepared.singles:
        return
    run: Callable[[Any], Results] = lambda arguments: _named(case.run(ops, arguments))  # noqa: E731
    singles = [run(arguments) for arguments in prepared.singles]
    for name, whole in _named(result).items():
        joined = torch.cat([single[name] for single in singles])
        assert _same(*map(_one_nan, (joined, whole))), f"{name}: other bits for a row alone"
