"""What every provider of ops must hold, checked case by case (`tests.support.op_cases`).

`check` runs one case and raises AssertionError with the first broken rule:

1. every entry within the op's bound of that of the oracle in float64 (`op_contracts`); 2. no NaN
from memory that the call may not read, no value in memory that it did not set; 3. memory around
each output, and KV memory outside the written slots, unchanged; 4. inputs unchanged, except what
the op declares to mutate; 5. the same bits in a second run, and, where the provider or the
definition claims it, from each row alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.ops import CATALOG, Facts, Ops, bind, select
from quire.ops.kv import LARGEST_NUMBER, numbers_and_scales
from tests.support.op_cases import Case, Draw, Prepared
from tests.support.op_contracts import CONTRACTS, ORACLE
from tests.support.running_error import Approx

MARGIN = 64
"""Elements of guard band on either side of an allocation."""

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Expected:
    """The oracle's results, how far others may be from each entry, and the dtypes."""

    results: Results
    limits: Results
    dtypes: dict[str, torch.dtype]


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


def check(case: Case, dtype: torch.dtype, ops: Ops, device: str = "cpu") -> None:
    """Raise AssertionError if `ops`, which run on `device`, break a rule on the case; see the
    module.
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
    check_error(case, dtype, results)
    _check_repeatable(case, dtype, ops, results, device)
    if ops.batch_invariant or _is_invariant_definition(case.op, ops):
        _check_singles(case, ops, prepared, result)


def _is_invariant_definition(name: str, ops: Ops) -> bool:
    """Whether plain torch serves an op, and claims the same bits for each row alone."""
    provider = next((choice.provider for choice in ops.report() if choice.op == name), None)
    return provider == "torch" and CATALOG[name].is_invariant


def results_of(case: Case, dtype: torch.dtype, ops: Ops, device: str = "cpu") -> Results:
    """A fresh run of the case: what the op returned ("0", "1", ...) and the KV memory after it
    ("kv"), on the CPU.
    """
    return _results(case, ops, case.prepare(ops, case.draw(dtype, device)))


def _results(case: Case, ops: Ops, prepared: Prepared) -> Results:
    result = case.run(ops, prepared.arguments)
    return _named(result) | _kv(ops, prepared)


def check_error(case: Case, dtype: torch.dtype, results: Results) -> None:
    """Raise AssertionError if results of the case, as `results_of` returns them, are not within the
    op's bound.
    """
    wanted = expected(case, dtype)
    assert results.keys() == wanted.results.keys()
    for name, truth in wanted.results.items():
        value, limits = results[name], wanted.limits[name]
        assert value.shape == truth.shape, f"{name}: shape {value.shape} is not {truth.shape}"
        assert value.dtype == wanted.dtypes[name], f"{name}: dtype {value.dtype}"
        share = share_of_bound(value, truth, limits)
        assert share <= 1, f"{name}: error is {share:.3g} times what is allowed"


def share_of_bound(value: Tensor, truth: Tensor, limits: Tensor) -> float:
    """Largest error over its limit; inf where one number is not finite and the other is not the
    same.
    """
    value, truth = value.double(), truth.double()
    known = truth.isfinite()
    if not torch.equal(value.isnan(), truth.isnan()) or (value != truth)[truth.isinf()].any():
        return math.inf
    error = (value - truth).abs()[known]
    shares = torch.where(error == 0, 0.0, error / limits[known])
    return float(shares.nan_to_num(math.inf, math.inf).max()) if shares.numel() else 0.0


@cache
def expected(case: Case, dtype: torch.dtype) -> Expected:
    """What the oracle says of the case, and which dtypes plain torch returns; computed once for all
    providers.
    """
    oracle, plain = _references(dtype)
    prepared = case.prepare(oracle, case.draw(dtype))
    for name in CATALOG[case.op].mutates:
        if isinstance(changed := prepared.arguments[name], Tensor):
            prepared.arguments[name] = changed.double()  # what the oracle writes is not rounded
    results = _results(case, oracle, prepared)
    found = CONTRACTS[case.op].limits(dtype, prepared.arguments)
    limits = {name: _limits(found.get(name), truth) for name, truth in results.items()}
    dtypes = {name: result.dtype for name, result in results_of(case, dtype, plain).items()}
    return Expected(results, limits, dtypes)


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


@cache
def _references(dtype: torch.dtype) -> tuple[Ops, Ops]:
    oracle = bind(Facts(torch.device("cpu"), dtype), ORACLE, ["oracle"])
    return oracle, select(device="cpu", dtype=dtype, providers=["torch"])


def _limits(approx: Approx | None, truth: Tensor) -> Tensor:
    """How far each entry may be off, once the bound is known to be of what the oracle computes."""
    if approx is None:
        return torch.zeros(truth.shape)
    torch.testing.assert_close(
        torch.from_numpy(approx.value), truth, rtol=1e-9, atol=1e-12, equal_nan=True
    )
    return torch.from_numpy(approx.error)


def _named(result: Any) -> Results:
    if result is None:
        return {}
    parts = result if isinstance(result, tuple) else (result,)
    return {str(i): _numbers(part) for i, part in enumerate(parts)}


def _kv(ops: Ops, prepared: Prepared) -> Results:
    kv, latents = (prepared.arguments.get(name) for name in ("kv", "latents"))
    found = {} if kv is None else {"kv": _numbers(ops.export_kv(kv, range(kv.num_blocks)))}
    return found if latents is None else found | {"latents": torch.cat(latents.parts, 2).cpu()}


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
    for name, before in kv_before.items():
        if name not in CATALOG[case.op].mutates:
            assert _same(before, results[name]), "wrote to KV memory that it only reads"


def _check_repeatable(
    case: Case, dtype: torch.dtype, ops: Ops, results: Results, device: str
) -> None:
    for name, again in results_of(case, dtype, ops, device).items():
        assert _same(again, results[name]), f"{name}: other bits in a second run"


def _check_states(before: Tensor, singles: list[Results], together: Tensor) -> None:
    """Each block that a row has written by itself is the same after all rows together."""
    before = _one_nan(before)
    for single in singles:
        alone = _one_nan(single["1"])
        written = [block for block in range(len(alone)) if not _same(alone[block], before[block])]
        for block in written:
            assert _same(alone[block], _one_nan(together)[block]), "other bits of a state alone"


def _check_singles(case: Case, ops: Ops, prepared: Prepared, result: Any) -> None:
    if not prepared.singles:
        return
    run: Callable[[Any], Results] = lambda arguments: _named(case.run(ops, arguments))  # noqa: E731
    singles = [run(arguments) for arguments in prepared.singles]
    wholes = _named(result)
    if "states" in CATALOG[case.op].mutates:  # the rows' states are in blocks, not in order
        _check_states(prepared.arguments["states"].cpu(), singles, wholes.pop("1"))
    for name, whole in wholes.items():
        joined = torch.cat([single[name] for single in singles])
        assert _same(*map(_one_nan, (joined, whole))), f"{name}: other bits for a row alone"
