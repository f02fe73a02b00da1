"""Counts of one completion's drafts, for its output and its reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestSpecDecodeMetrics:
    """The verified drafts of one completion, by the names of the reference.

    `num_spec_tokens` is the most drafts of a step. `histogram[j]` counts the steps in which j
    drafts were right, and `num_draft_tokens` all drafts. `per_step_accepted` and `per_step_drafted`
    have an entry for each of these steps, in order, where details are reported.
    """

    num_spec_tokens: int
    histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0
    per_step_accepted: list[int] = field(default_factory=list)
    per_step_drafted: list[int] = field(default_factory=list)

    @classmethod
    def new(cls, num_spec_tokens: int) -> RequestSpecDecodeMetrics:
        """Make the counts of a completion that has verified nothing yet."""
        return cls(num_spec_tokens, [0] * (num_spec_tokens + 1))

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Count a step in which `num_accepted` of its `num_draft_tokens` drafts were right."""
        self.histogram[num_accepted] += 1
        self.num_draft_tokens += num_draft_tokens
        if detailed:
            self.per_step_accepted.append(num_accepted)
            self.per_step_drafted.append(num_draft_tokens)

    def to_dict(self) -> dict[str, Any]:
        """The object `metrics.speculative_decoding` of a reply. A step's length includes the token
        that is drawn after the right drafts; without any step it is 1.
        """
        num_steps = sum(self.histogram)
        num_accepted = sum(count * times for count, times in enumerate(self.histogram))
        found: dict[str, Any] = {
            "mean_acceptance_length": 1 + num_accepted / max(1, num_steps),
            "draft_acceptance_rate": num_accepted / max(1, self.num_draft_tokens),
            "acceptance_histogram": self.histogram,
            "num_spec_steps": num_steps,
            "num_accepted_draft_tokens": num_accepted,
            "num_draft_tokens": self.num_draft_tokens,
            "num_spec_tokens": self.num_spec_tokens,
        }
        if self.per_step_accepted:
            found["per_step_accepted"] = self.per_step_accepted
            found["per_step_drafted"] = self.per_step_drafted
        return found
