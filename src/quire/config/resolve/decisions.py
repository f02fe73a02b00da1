"""An unfinished plan: values with reasons, each decided once."""

from __future__ import annotations

from typing import Any

from quire.config.args.engine_options import EngineOptions
from quire.config.facts import ModelFacts
from quire.config.plan import EnginePlan
from quire.hardware.facts import MachineFacts


class Decisions:
    """Arguments, facts and decisions. Invariant: a field is decided once, and with a reason."""

    def __init__(self, args: EngineOptions, model: ModelFacts, machine: MachineFacts) -> None:
        self.args, self.model, self.machine = args, model, machine
        self._values: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}
        self._notes: list[str] = []

    def decide(self, name: str, value: Any, reason: str) -> Any:
        """Fix one field of the plan, and return its value."""
        assert name not in self._values, f"{name} is decided twice"
        assert reason, f"{name} has no reason"
        self._values[name], self._reasons[name] = value, reason
        return value

    def value(self, name: str) -> Any:
        return self._values[name]

    def reason(self, name: str) -> str:
        return self._reasons[name]

    def requested(self, name: str, field: str | None = None) -> Any:
        """Fix a field to the argument of that name, which is never None, and return it."""
        value = vars(self.args)[name]
        is_default = value == EngineOptions.__dataclass_fields__[name].default
        return self.decide(
            field or name, value, "the default" if is_default else f"{name} was given"
        )

    def note(self, sentence: str) -> None:
        """Keep a sentence to be shown to the user."""
        self._notes.append(sentence)

    def plan(self) -> EnginePlan:
        return EnginePlan.of(self._values, self._reasons, self._notes)
