"""Outputs for the caller of a prompt that was pooled: vectors, labels, scores."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

import msgspec

from quire.outputs import reads_as_dataclass

Output = TypeVar("Output")


@reads_as_dataclass
class PoolingOutput(msgspec.Struct, eq=False, gc=False):
    """A prompt's result, fp32 [D], or [n, D] for its n tokens: of numpy, in `LLM` of torch."""

    data: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PoolingOutput):
            return NotImplemented
        same: Any = self.data == other.data
        return tuple(self.data.shape) == tuple(other.data.shape) and bool(same.all())

    __hash__ = None  # type: ignore[assignment]


@reads_as_dataclass
class EmbeddingOutput(msgspec.Struct, gc=False):
    """A vector for a prompt; empty after an error."""

    embedding: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Raises ValueError for a result with other than one axis."""
        return cls(_one_axis(output, "an embedding"))

    @property
    def hidden_size(self) -> int:
        """Number of values of the embedding."""
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@reads_as_dataclass
class ClassificationOutput(msgspec.Struct, gc=False):
    """A number for each label of a prompt; empty after an error."""

    probs: list[float]

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Raises ValueError for a result with other than one axis."""
        return cls(_one_axis(output, "labels"))

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return len(self.probs)

    def __repr__(self) -> str:
        return f"ClassificationOutput(num_classes={self.num_classes})"


@reads_as_dataclass
class ScoringOutput(msgspec.Struct, gc=False):
    """Score of two texts, higher where they go together; 0.0 after an error."""

    score: float

    @classmethod
    def from_base(cls, output: PoolingOutput) -> Self:
        """Raises ValueError for a result with more than one number."""
        if output.data.shape == (0,):
            return cls(0.0)
        if any(size != 1 for size in output.data.shape):
            raise ValueError(f"a score is one number, not {tuple(output.data.shape)}")
        return cls(float(output.data.reshape(-1)[0]))


def _one_axis(output: PoolingOutput, what: str) -> list[float]:
    if len(output.data.shape) != 1:
        raise ValueError(f"{what} has one axis, not the shape {tuple(output.data.shape)}")
    numbers: list[float] = output.data.tolist()
    return numbers


class PoolingRequestOutput(msgspec.Struct, Generic[Output], gc=False):
    """The result of a pooling request; `request_id` is the id that the caller gave.

    `num_cached_tokens` is how much of the prompt came out of the prefix cache. `error` says what
    went wrong, None where nothing did; `outputs` is empty then.
    """

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: str | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput], gc=False):
    """A prompt's vector."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> EmbeddingRequestOutput:
        """From a pooled prompt. Raises ValueError for a result with other than one axis."""
        return _of_base(cls, base, EmbeddingOutput.from_base(base.outputs))


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput], gc=False):
    """A prompt's labels."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> ClassificationRequestOutput:
        """From a pooled prompt. Raises ValueError for a result with other than one axis."""
        return _of_base(cls, base, ClassificationOutput.from_base(base.outputs))


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput], gc=False):
    """The score of a pair."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput[PoolingOutput]) -> ScoringRequestOutput:
        """From a pooled pair. Raises ValueError for a result with more than one number."""
        return _of_base(cls, base, ScoringOutput.from_base(base.outputs))


Kind = TypeVar("Kind", bound=PoolingRequestOutput[Any])


def _of_base(kind: type[Kind], base: PoolingRequestOutput[Any], outputs: Any) -> Kind:
    return kind(
        base.request_id,
        outputs,
        base.prompt_token_ids,
        base.num_cached_tokens,
        base.finished,
        base.error,
    )
