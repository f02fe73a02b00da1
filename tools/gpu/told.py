"""What a report consists of: lines of one table, and the same as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

WIDTHS = (46, 14, 14, 10)
HEAD = ("what", "measured", "target", "")


@dataclass(frozen=True)
class Line:
    """One figure. target: the bound it should keep, `is_least` says which side; None: no bound.

    value None: not measured, and `note` says why.
    """

    what: str
    value: float | None
    unit: str = ""
    target: float | None = None
    is_least: bool = True
    note: str = ""

    @property
    def verdict(self) -> str:
        """Whether the bound is kept; nothing where there is none."""
        if self.value is None:
            return "not measured"
        if self.target is None:
            return ""
        holds = self.value >= self.target if self.is_least else self.value <= self.target
        return "ok" if holds else "MISSED"

    def as_json(self) -> str:
        """The line as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Line:
        """The line of `as_json`. Raises ValueError for any other text."""
        fields = json.loads(text)
        if not isinstance(fields, dict) or "what" not in fields:
            raise ValueError(text)
        return Line(**fields)

    def text(self) -> str:
        """A row of the table."""
        bound = "" if self.target is None else f"{'>=' if self.is_least else '<='} {self.target:g}"
        value = "-" if self.value is None else f"{self.value:.4g} {self.unit}"
        cells = zip((self.what, value, bound, self.verdict), WIDTHS, strict=True)
        return " ".join(f"{cell:{width}}" for cell, width in cells) + (
            self.note and f"  {self.note}"
        )


@dataclass
class Report:
    """All lines, and facts of the machine beside them."""

    facts: dict[str, Any]
    lines: list[Line] = field(default_factory=list)

    def add(self, line: Line) -> None:
        """Keep a line, and print it at once: a report that is cut off is still one."""
        if not self.lines:
            print(" ".join(f"{cell:{width}}" for cell, width in zip(HEAD, WIDTHS, strict=True)))
        self.lines.append(line)
        print(line.text(), flush=True)

    def write(self, path: Path) -> None:
        """The whole report as JSON."""
        lines = [asdict(line) | {"verdict": line.verdict} for line in self.lines]
        path.write_text(json.dumps({"facts": self.facts, "lines": lines}, indent=1) + "\n")
