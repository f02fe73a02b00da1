"""Base of the views of the plan: names that read a field of the plan, or a value that is fixed."""

from __future__ import annotations

from typing import Any, NoReturn


class Fact:
    """An attribute of a view that reads a `field` (None: the one of its own name) of a part of the
    plan (None: the part of the view).
    """

    def __init__(self, field: str | None = None, part: str | None = None) -> None:
        self.field, self.part = field or "", part

    def __set_name__(self, owner: type, name: str) -> None:
        self.field = self.field or name

    def __get__(self, view: Any, owner: type) -> Any:
        if view is None:
            return self
        return getattr(getattr(view.plan, self.part or view.part), self.field)


class Fixed:
    """An attribute of a view that is the same in every plan; it can only be read."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __get__(self, view: Any, owner: type) -> Any:
        return self if view is None else self._value


class Tuned:
    """An attribute of a view that shows an option as it was given which only tunes other engines;
    `default` where it was left out.
    """

    def __init__(self, default: Any) -> None:
        self._default, self._name = default, ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: Any, owner: type) -> Any:
        if view is None:
            return self
        return view.plan.serving.foreign_tuning.get(self._name, self._default)


class PlanView:
    """A read-only view of `plan`. Views of one plan are equal."""

    __slots__ = ("plan",)

    name = ""
    """The attribute of the plan that it is."""
    part = ""
    """The part of the plan that it mostly reads."""

    def __init__(self, plan: Any) -> None:
        object.__setattr__(self, "plan", plan)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"{self.name} has no {name!r}. What an engine decided is in the parts of its plan: "
            f"vllm_config.explain() shows them.",
            name=name,
            obj=self,
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(
            f"{self.name}.{name} cannot be set: a plan does not change. Give EngineArgs the value.",
            name=name,
            obj=self,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.plan,)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.plan == self.plan

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind = type(self)
        names = [n for n, value in vars(kind).items() if isinstance(value, Fact)]
        return f"{self.name}({', '.join(f'{n}={getattr(self, n)!r}' for n in names)})"
