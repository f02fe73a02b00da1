"""Base of the views of the plan: names that read a field of the plan, or a value that is fixed."""

from __future__ import annotations

from functools import cache
from typing import Any, NoReturn


class Fact:
    """Reads a `field` (None: of its own name) of a part of the plan (None: the view's first)."""

    def __init__(self, field: str | None = None, part: str | None = None) -> None:
        self.field, self.part = field or "", part

    def __set_name__(self, owner: type, name: str) -> None:
        self.field = self.field or name

    def __get__(self, view: Any, owner: type) -> Any:
        if view is None:
            return self
        return getattr(getattr(view.plan, self.part or view.parts[0]), self.field)


class Fixed:
    """An attribute of a view that is the same in every plan; it can only be read."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __get__(self, view: Any, owner: type) -> Any:
        return self if view is None else self._value


class Tuned:
    """Shows an option that only tunes other engines as it was given, else `default`."""

    def __init__(self, default: Any) -> None:
        self._default, self._name = default, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: Any, owner: type) -> Any:
        if view is None:
            return self
        return view.plan.serving.foreign_tuning.get(self._name, self._default)


@cache
def option_fields(part: Any) -> frozenset[str]:
    """The fields of a kind of part of the plan that have an option's name."""
    from quire.config.args.engine_options import EngineOptions  # not imported by core processes
    from quire.config.args.option import options_of

    return frozenset(options_of(EngineOptions)) & set(part.__struct_fields__)


class PlanView:
    """A read-only view of `plan`. Views of one plan are equal. A view has the options whose values
    are in its parts, by their names, and what it declares: other names, and what follows from them.
    """

    __slots__ = ("plan",)

    name = ""
    """The attribute of the plan that it is."""
    parts: tuple[str, ...] = ()
    """The parts of the plan that it reads, the main one first."""

    def __init__(self, plan: Any) -> None:
        # past this class's own __setattr__, which refuses everything
        object.__setattr__(self, "plan", plan)

    def __getattr__(self, name: str) -> Any:
        if name != "plan" and not name.startswith("_"):  # asked for while a copy is made
            for part in self.parts:
                if name in self._options(part):
                    return getattr(getattr(self.plan, part), name)
        raise AttributeError(
            f"{self.name} has no {name!r}. What an engine decided is in the parts of its plan: "
            f"vllm_config.explain() shows them.",
            name=name,
            obj=self,
        )

    def _options(self, part: str) -> frozenset[str]:
        kind: Any = type(getattr(self.plan, part))
        return option_fields(kind)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{self.name}.{name} cannot be set: a plan does not change. Give EngineArgs the value.",
            name=name,
            obj=self,
        )

    # pickle's own way sets the slot, which `__setattr__` refuses
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plan,)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.plan == self.plan

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        names = [n for n, value in vars(type(self)).items() if isinstance(value, Fact)]
        for part in self.parts:
            names += sorted(self._options(part))
        return f"{self.name}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"
