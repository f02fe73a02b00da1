"""The parameters of a pooling request: checked here, served by a later release."""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from quire.errors import InvalidParameter
from quire.params import checks
from quire.params.checks import MAX_INT
from quire.params.kinds import RequestOutputKind

_FIELDS_OF_TASK = {
    "embed": ("dimensions", "use_activation"),
    "token_embed": ("dimensions", "use_activation"),
    "classify": ("use_activation",),
    "token_classify": ("use_activation",),
    "plugin": ("dimensions", "use_activation"),
    "embed&token_classify": ("dimensions", "use_activation"),
}


class PoolingParams(
    msgspec.Struct, omit_defaults=True, tag="pooling", metaclass=checks.CheckedMeta
):
    """The parameters of a pooling request: task, size, whether activated."""

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

    def __post_init__(self) -> None:
        if self.output_kind is not RequestOutputKind.FINAL_ONLY:
            raise InvalidParameter(
                "output_kind", self.output_kind, "pooling has only FINAL_ONLY outputs"
            )
        if self.use_activation is not None:
            checks.flag("use_activation", self.use_activation)
        if self.dimensions is not None:
            allowed = "it must be None or an int of at least 1"
            self.dimensions = checks.integer("dimensions", self.dimensions, 1, MAX_INT, allowed)
        self._check_task()

    def _check_task(self) -> None:
        if self.task is None:
            return
        if self.task not in _FIELDS_OF_TASK:
            allowed = f"the tasks are {', '.join(_FIELDS_OF_TASK)}"
            raise InvalidParameter("task", self.task, allowed)
        for name in ("dimensions", "use_activation"):
            value = getattr(self, name)
            if value is not None and name not in _FIELDS_OF_TASK[self.task]:
                raise InvalidParameter(name, value, f"the task {self.task} does not take it")

    def clone(self) -> PoolingParams:
        """A copy that shares nothing with this one."""
        return copy.deepcopy(self)
