"""Abilities of the served model, which decide what routes there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.engine.frontend.pooling_input import PoolingFacts
from quire.params.pooling import VECTOR_TASKS
from quire.server.http.failures import Refusal

Ability = Literal["generate", "pool", "embed", "classify", "score"]

_APIS: dict[Ability, str] = {
    "generate": "Completions, Chat Completions, Responses and Messages APIs",
    "pool": "Pooling API",
    "embed": "Embeddings API",
    "classify": "Classification API",
    "score": "Score and Rerank APIs",
}
_GENERATES = "it generates text: /v1/chat/completions, /v1/completions, /v1/responses"


@dataclass(frozen=True, slots=True)
class Abilities:
    """Abilities of a model that `generates`, pools (`pooling`) and serves one task, or both."""

    pooling: PoolingFacts | None = None
    generates: bool = True

    @property
    def facts(self) -> PoolingFacts:
        """The pooler, for routes that need a model that pools."""
        assert self.pooling is not None, "such routes are there for models that pool only"
        return self.pooling

    @property
    def tasks(self) -> tuple[str, ...]:
        pooled = () if self.pooling is None else self.pooling.pooler.tasks
        return (*(("generate",) if self.generates else ()), *pooled)

    @property
    def task(self) -> str:
        return "generate" if self.pooling is None else self.pooling.pooler.tasks[0]

    def have(self, ability: Ability) -> bool:
        if ability == "generate":
            return self.generates
        if self.pooling is None:
            return False
        if ability == "pool":
            return True
        return self._scores if ability == "score" else ability == self.task

    def refusal_of(self, ability: Ability) -> Refusal:
        """The reply (501) to a request for an API that needs what the model cannot do."""
        known = () if self.pooling is None else self.pooling.pooler.tasks
        hint = f" (--pooler-config.task {ability} changes that)" if ability in known else ""
        return self.refusal(_APIS[ability], hint)

    def refusal(self, api: str, hint: str = "") -> Refusal:
        """The reply (501) to a request for what the model cannot do."""
        if self.pooling is None:
            serves = _GENERATES
        else:
            serves = f"it serves the pooling task {self.task!r}"
            serves = f"{_GENERATES}; {serves}" if self.generates else serves
        return Refusal(501, f"The model does not support the {api}: {serves}{hint}.")

    @property
    def _scores(self) -> bool:
        """Vectors are compared, and a classifier with one label scores pairs."""
        classifier = self.facts.pooler.classifier
        if self.task == "classify":
            return classifier is not None and classifier.num_labels == 1
        return self.task in VECTOR_TASKS
