"""The parameters of a pooling request."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import msgspec

from quire.errors import InvalidParameter, InvalidType, NotBuiltYet
from quire.params import checks
from quire.params.checks import MAX_INT
from quire.params.kinds import RequestOutputKind
from quire.params.pydantic_schema import PydanticField

SECOND_TEXT = "compressed_token_type_ids"
"""The key of `extra_kwargs` for `PoolingParams.second_text_at`."""

MOST_READ = ("max_tokens_per_query", "max_tokens_per_doc")
"""The keys of `extra_kwargs` for how many tokens of a pair's first and second text are read."""
_EXTRA = (SECOND_TEXT, *MOST_READ)
_MUTABLE = ("returned_token_ids", "late_interaction_params", "extra_kwargs")
"""The fields whose values can change."""


class Task(NamedTuple):
    """The result of a task: vectors or labels, of a prompt or of each token; and what a caller is
    told whose model does not serve it, with vLLM's name for the API, which programs look for.
    """

    has_vectors: bool
    is_of_tokens: bool
    api: str
    hint: str = ""


_VECTORS, _LABELS = "the Embedding API", "the Classification API"

TASKS = {
    "embed": Task(True, False, _VECTORS, "Start it with convert='embed', or a model of vectors."),
    "token_embed": Task(True, True, _VECTORS),
    "classify": Task(
        False, False, _LABELS, "Start it with convert='classify', or a model of labels."
    ),
    "token_classify": Task(False, True, _LABELS),
}
VECTOR_TASKS = tuple(name for name, task in TASKS.items() if task.has_vectors)
TOKEN_TASKS = tuple(name for name, task in TASKS.items() if task.is_of_tokens)
"""Tasks of tokens: a request without a task asks for the first one that its model can do."""
_NAMES = (*TASKS, "plugin", "embed&token_classify")

GONE_TASKS = {"score": "classify", "encode": "token_embed or token_classify"}
"""Tasks of earlier releases of the reference -> those of today."""


class QueryVectors(msgspec.Struct, frozen=True):
    """A query's result: fp32 `data` in native byte order, [D], or [n, D] for its n tokens."""

    shape: tuple[int, ...]
    data: bytes


class PoolingParams(
    msgspec.Struct, PydanticField, omit_defaults=True, tag="pooling", metaclass=checks.CheckedMeta
):
    """The parameters of a pooling request.

    `task` None: the first of token_embed and token_classify that the model can do. `use_activation`
    (whether a vector is normalised, or labels are activated) and `dimensions` (to how many numbers
    a vector is cut) are the model's where they are None; so are `step_tag_id`, the token whose
    places are returned, and `returned_token_ids`, the columns, which belong to STEP pooling.
    `skip_reading_prefix_cache`: every token is computed. `requires_token_ids` is set by the engine.
    `extra_kwargs` bound the texts of a scored pair: `max_tokens_per_query`, `max_tokens_per_doc`
    (0: not). With `compared_with` the result is one number, the score of the prompt for this query:
    the similarity of vectors, or of token vectors the sum of the query's largest products.
    """

    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    truncate_prompt_tokens: int | None = None
    """At most as many tokens of the prompt; -1: as many as the model takes."""
    compared_with: QueryVectors | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raise InvalidParameter for the first value that is not allowed."""
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidParameter(
                "output_kind", self.output_kind, "pooling has only FINAL_ONLY outputs"
            )
        if self.truncate_prompt_tokens is not None:
            name, allowed = "truncate_prompt_tokens", "it must be None or an int of at least -1"
            checks.integer(name, self.truncate_prompt_tokens, -1, MAX_INT, allowed)
        if self.use_activation is not None:
            checks.flag("use_activation", self.use_activation)
        if self.dimensions is not None:
            allowed = "it must be None or an int of at least 1"
            self.dimensions = checks.integer("dimensions", self.dimensions, 1, MAX_INT, allowed)
        if self.step_tag_id is not None:
            allowed = "it must be None or a token id"
            self.step_tag_id = checks.integer("step_tag_id", self.step_tag_id, 0, MAX_INT, allowed)
        if self.returned_token_ids is not None:
            self.returned_token_ids = _columns(self.returned_token_ids)
        self._check_extra()
        self._check_task()
        if self.compared_with is not None:
            self._check_query(self.compared_with)

    def _check_extra(self) -> None:
        if self.late_interaction_params is not None:
            hint = "Leave it out: score() compares token vectors."
            raise NotBuiltYet("late_interaction_params", self.late_interaction_params, hint)
        if not isinstance(self.extra_kwargs, dict | None):
            raise InvalidType("extra_kwargs", self.extra_kwargs, "it must be a dict")
        for name, value in (self.extra_kwargs or {}).items():
            if name not in _EXTRA:
                raise InvalidParameter("extra_kwargs", name, f"its keys are {', '.join(_EXTRA)}")
            allowed = "it must be an int of at least 0"
            checks.integer(f"extra_kwargs[{name!r}]", value, 0, MAX_INT, allowed)

    def _check_task(self) -> None:
        if self.task is None:
            return
        if not isinstance(self.task, str):
            raise InvalidType("task", self.task, "it must be a str")
        if self.task in GONE_TASKS:
            hint = f"Use {GONE_TASKS[self.task]}."
            raise InvalidParameter("task", self.task, "there is no such task any more", hint)
        if self.task not in _NAMES:
            raise InvalidParameter("task", self.task, f"the tasks are {', '.join(_NAMES)}")
        if self.dimensions is not None and self.task in TASKS and self.task not in VECTOR_TASKS:
            allowed = f"the task {self.task} does not take it"
            raise InvalidParameter("dimensions", self.dimensions, allowed)

    def _check_query(self, query: object) -> None:
        allowed = "it must be QueryVectors of shape [D] for embed, or [n, D] for token_embed"
        # without a task the model decides whether there is a vector or one for each token
        axes = [1 + TASKS[task].is_of_tokens for task in VECTOR_TASKS if self.task in (None, task)]
        if not isinstance(query, QueryVectors) or len(query.shape) not in axes:
            raise InvalidParameter("compared_with", query, allowed)
        if (
            min(query.shape) < 0
            or query.shape[-1] < 1
            or 4 * math.prod(query.shape) != len(query.data)
        ):
            raise InvalidParameter("compared_with", query.shape, "its data have another size")

    @property
    def second_text_at(self) -> int | None:
        """Place of a pair's second text, whose tokens have type 1; None: all have type 0."""
        return None if self.extra_kwargs is None else self.extra_kwargs.get(SECOND_TEXT)

    def comparing(self, vectors: Any) -> PoolingParams:
        """A copy for a document that is compared with a query, whose result is this fp32 array."""
        own = self.clone()
        own.compared_with = QueryVectors(vectors.shape, vectors.tobytes())
        return own

    def clone(self) -> PoolingParams:
        """A copy that shares nothing with this one."""
        twin = copy.copy(self)
        for name in _MUTABLE:
            setattr(twin, name, copy.deepcopy(getattr(self, name)))
        return twin


def _columns(given: object) -> list[int]:
    allowed = "it must be None or a list of numbers of columns"
    if not isinstance(given, list | tuple) or not given:
        raise InvalidParameter("returned_token_ids", given, allowed)
    return [checks.integer("returned_token_ids", one, 0, MAX_INT, allowed) for one in given]
