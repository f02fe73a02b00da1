"""Chooses the provider of each op, once, when a model is built."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from quire.errors import InvalidParameter
from quire.ops.catalog import CATALOG, Choice, Ops
from quire.ops.registry import Facts, Implementation
from quire.plugins import resolve_reference
from quire.plugins.tables import OP_PROVIDERS

PLAIN = "torch"
"""The provider that is always available: the definitions themselves."""

PROVIDERS: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {"cpu": ("cpu", PLAIN), "cuda": ("fa3", "triton", PLAIN)}
)
"""Device type -> provider names, best first. A provider's module is quire.kernels.<name>, imported
only here; its `implementations(facts)` gives a tuple of `Implementation`."""


def select(
    *,
    device: str,
    dtype: torch.dtype,
    providers: Sequence[str] = (),
    runtime: object | None = None,
    deterministic: bool = False,
) -> Ops:
    """The best ops for models of `dtype` on `device`, running on `runtime`.

    providers: "name" limits the choice to these names, best first ("torch" stays the last resort);
    "op=name" settles one op, and with it all ops that share its format. A provider that was
    requested by name and cannot serve raises InvalidParameter with its reason; others are skipped,
    and `report()` says why.
    """
    facts = Facts(torch.device(device), dtype, runtime, deterministic)
    names = [entry for entry in providers if "=" not in entry]
    forced = dict(entry.split("=", 1) for entry in providers if "=" in entry)
    order = names or [*OP_PROVIDERS, *PROVIDERS.get(facts.device.type, (PLAIN,))]
    implementations: list[Implementation] = []
    missing: dict[str, str] = {}
    for name in dict.fromkeys([*order, *forced.values()]):
        if name != PLAIN:
            found = _load(name, facts)
            implementations += found
            if not found:
                missing[name] = f"quire.kernels.{name} is not part of this installation"
    return bind(facts, implementations, order, forced, missing, asked=set(names))


def _load(provider: str, facts: Facts) -> tuple[Implementation, ...]:
    """The provider's implementations; () where the installation has no such module."""
    if provider in OP_PROVIDERS:
        return tuple(resolve_reference(OP_PROVIDERS[provider])(facts))
    module = f"quire.kernels.{provider}"
    # find_spec of a submodule raises where its package is missing
    if importlib.util.find_spec("quire.kernels") is None or not importlib.util.find_spec(module):
        return ()
    return tuple(importlib.import_module(module).implementations(facts))


def bind(
    facts: Facts,
    implementations: Iterable[Implementation],
    order: Sequence[str],
    forced: Mapping[str, str] = MappingProxyType({}),
    missing: Mapping[str, str] = MappingProxyType({}),
    asked: Iterable[str] = (),
) -> Ops:
    """Choose among given implementations: `select` without the import of providers.

    order: provider names, best first. forced: op -> provider. missing: provider -> why it offers
    nothing. asked: names that must serve at least one op.
    """
    table = {(i.provider, i.op): i for i in implementations}
    settled = _by_group(forced)
    functions: dict[str, Callable[..., Any]] = {}
    choices: list[Choice] = []
    variant: list[str] = []
    takes_rows = False
    groups = {record.group: _members(record.group) for record in CATALOG.values()}
    # as groups: ops that share a format read and write each other's memory
    for group, members in groups.items():
        wanted = [settled[group]] if group in settled else [n for n in order if n != PLAIN]
        provider, why = _first_that_serves(wanted, members, table, facts, missing)
        if group in settled and provider != settled[group]:
            raise InvalidParameter(
                "providers", f"{members[0]}={settled[group]}", why, "Leave it out."
            )
        for name in members:
            chosen = table.get((provider, name))
            functions[name] = _bound(name, chosen, facts)
            choices.append(Choice(name, provider, why))
            record = CATALOG[name]
            if chosen is not None and name == "pack_linear":
                takes_rows = chosen.takes_rows
            is_invariant = record.is_invariant if chosen is None else chosen.batch_invariant
            if not is_invariant and not record.only_for:
                variant.append(name)
    _check_asked(asked, choices, missing)
    ranks = {name: rank for rank, name in enumerate(CATALOG)}
    choices.sort(key=lambda choice: ranks[choice.op])
    return Ops(
        **functions,
        choices=tuple(choices),
        batch_invariant=not variant,
        invariance_reason=_invariance_reason(choices, variant),
        takes_rows=takes_rows,
    )


def _members(group: str) -> list[str]:
    return [name for name, record in CATALOG.items() if record.group == group]


def _by_group(forced: Mapping[str, str]) -> dict[str, str]:
    """Group -> provider for forced ops."""
    settled: dict[str, str] = {}
    for name, provider in forced.items():
        if name not in CATALOG:
            raise InvalidParameter("providers", f"{name}={provider}", "there is no such op")
        if settled.setdefault(CATALOG[name].group, provider) != provider:
            hint = f"{', '.join(_members(CATALOG[name].group))} share a format."
            raise InvalidParameter("providers", f"{name}={provider}", "another is named", hint)
    return settled


def _first_that_serves(
    wanted: Sequence[str],
    members: Sequence[str],
    table: Mapping[tuple[str, str], Implementation],
    facts: Facts,
    missing: Mapping[str, str],
) -> tuple[str, str]:
    """Return the first provider that serves all members, else plain torch; and why each provider
    before it does not. A provider without any of these ops is named only before plain torch.
    """
    refusals: list[str] = []
    others: list[str] = []
    for provider in wanted:
        if provider == PLAIN:
            break
        reason = missing.get(provider) or _refusal(provider, members, table, facts)
        if reason is None:
            return provider, "; ".join(refusals)
        others.append(f"{provider}: {reason}")
        if provider in missing or any((provider, name) in table for name in members):
            refusals.append(others[-1])
    return PLAIN, "; ".join(others)


def _refusal(
    provider: str,
    members: Sequence[str],
    table: Mapping[tuple[str, str], Implementation],
    facts: Facts,
) -> str | None:
    """The reason why the provider cannot serve all of these ops together, or None."""
    absent = [name for name in members if (provider, name) not in table]
    if absent:
        return f"has no {', '.join(absent)}"
    for name in members:
        verdict = table[provider, name].supports(facts)
        if verdict is not True:
            return f"{name}: {verdict}"
    return None


def _bound(name: str, chosen: Implementation | None, facts: Facts) -> Callable[..., Any]:
    """The function to call, with the parameters filled in that the op takes from the facts."""
    record = CATALOG[name]
    function = record.definition if chosen is None else chosen.function
    values = {parameter: getattr(facts, parameter) for parameter in record.binds}
    return partial(function, **values) if values else function


def _check_asked(
    asked: Iterable[str], choices: Sequence[Choice], missing: Mapping[str, str]
) -> None:
    serving = {choice.provider for choice in choices} | {PLAIN}
    for name in asked:
        if name not in serving:
            why = missing.get(name) or next(c.why for c in choices if c.why)
            raise InvalidParameter("providers", name, f"it serves no op here ({why})")


def _invariance_reason(choices: Sequence[Choice], variant: Sequence[str]) -> str:
    if not variant:
        return "every op computes a row in one fixed order"
    if any(choice.provider == PLAIN and choice.op in variant for choice in choices):
        return "plain torch picks other kernels for few rows"
    return f"{', '.join(variant)} may compute a row differently in another batch"
