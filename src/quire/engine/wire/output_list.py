"""The `outputs` of `EngineCoreOutputs` as a list that a program may change."""

from __future__ import annotations

from collections.abc import Iterable, MutableSequence
from typing import Any, Protocol

from quire.engine.wire.core_output import EngineCoreOutput


class HasOutputs(Protocol):
    """A message whose outputs can be assigned."""

    outputs: Any


class OutputList(MutableSequence[EngineCoreOutput]):
    """The outputs of a message; each change of the list is one of the message."""

    def __init__(self, owner: HasOutputs, outputs: Iterable[EngineCoreOutput]) -> None:
        self._owner = owner
        self._outputs = list(outputs)

    def __len__(self) -> int:
        return len(self._outputs)

    def __getitem__(self, index: Any) -> Any:
        return self._outputs[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._outputs[index] = value
        self._write()

    def __delitem__(self, index: Any) -> None:
        del self._outputs[index]
        self._write()

    def insert(self, index: int, value: EngineCoreOutput) -> None:
        self._outputs.insert(index, value)
        self._write()

    def _write(self) -> None:
        self._owner.outputs = self._outputs

    def __add__(self, others: Iterable[EngineCoreOutput]) -> list[EngineCoreOutput]:
        return [*self._outputs, *others]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, OutputList):
            return self._outputs == other._outputs
        return self._outputs == other if isinstance(other, list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._outputs)
