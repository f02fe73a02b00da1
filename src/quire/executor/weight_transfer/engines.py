"""The base class of what receives weights from a trainer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, Self

import torch
from torch import Tensor

from quire.errors import InvalidParameter
from quire.ops.formats.row_stack import RowStack


class WeightTransferEngine:
    """Receives weights for one worker. A class of one's own sets the two classes of information,
    which are dataclasses, and `receive_weights`, which gives what has come to
    `self.model.load_weights`, an iterable of pairs of a checkpoint's name and a tensor. The classes
    may stand in brackets behind this base, too, which says nothing more.
    """

    init_info_cls: type[Any]
    update_info_cls: type[Any]
    supports_draft_weight_update = False
    defers_processing = False

    def __class_getitem__(cls, information: Any) -> type[Self]:
        return cls

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """`config` has the option's value; `vllm_config` is the plan; `model` the worker's."""
        self.config = config
        self.vllm_config = vllm_config
        self.device = device
        self.model = model
        self.rank = 0
        """The worker's number among all workers of all cores."""

    def parse_init_info(self, info: dict[str, Any]) -> Any:
        """The information as an object. Raises InvalidParameter for other keys and values."""
        return _parsed(self.init_info_cls, info, "init_info")

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        """The information about an update as an object. Raises InvalidParameter for other keys and
        values.
        """
        return _parsed(self.update_info_cls, info, "update_info")

    def init_transfer_engine(self, init_info: Any) -> None:
        """Meet the trainer."""

    def start_weight_update(self) -> None:
        """A session begins."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive some tensors."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Any) -> None:
        """Receive some tensors, and give them to the model."""
        raise NotImplementedError(f"{type(self).__name__} has no receive_weights")

    def finish_weight_update(self) -> None:
        """All tensors were received."""

    def drain_pending(self) -> None:
        """Wait for what is still received."""

    def shutdown(self) -> None:
        """Leave the trainer."""

    def load(self, weights: Iterable[tuple[str, Tensor | RowStack]]) -> None:
        """Give tensors to the model, which has copied them when this returns."""
        self.model.load_weights(weights)


def _parsed(kind: type[Any], info: dict[str, Any], what: str) -> Any:
    assert is_dataclass(kind), f"{kind.__name__} is not a dataclass"
    known = [f.name for f in fields(kind) if f.init]
    unknown = [name for name in info if name not in known]
    if unknown:
        why = f"{', '.join(unknown)} is not known; the keys are {', '.join(known)}"
        raise InvalidParameter(what, info, f"Invalid {what} for {kind.__name__}: {why}")
    try:
        return kind(**info)
    except TypeError as error:
        raise InvalidParameter(
            what, info, f"Invalid {what} for {kind.__name__}: {error}"
        ) from error
