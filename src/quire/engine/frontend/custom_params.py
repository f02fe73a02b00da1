"""Asks custom logits processors whether they can serve a request's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from quire.errors import RequestError
from quire.params import SamplingParams


class CustomParams:
    """The `validate_params` of an engine's logits processors, which are classes or names."""

    def __init__(self, processors: Sequence[str | type]) -> None:
        self._processors = processors

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError with the text of the ValueError by which a processor refuses them."""
        for processor in self._found:
            try:
                processor.validate_params(params)
            except RequestError:
                raise
            except ValueError as error:
                raise RequestError(str(error), parameter="extra_args") from error

    @cached_property
    def _found(self) -> Sequence[Any]:
        # imports torch, which a front end needs for nothing else
        from quire.runner.sampling import find_logits_processors

        return find_logits_processors(self._processors)
