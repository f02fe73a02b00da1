"""Asks custom logits processors whether they can serve a request's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from quire.encodable import text_of
from quire.errors import RequestError
from quire.params import SamplingParams
from quire.step.faults import contained


class CustomParams:
    """The `validate_params` of an engine's logits processors, which are classes or names."""

    def __init__(self, processors: Sequence[str | type]) -> None:
        """Raises InvalidParameter for one that cannot be imported, or is not a logits processor."""
        # imports torch, which a front end needs for nothing else
        from quire.runner.sampling import find_logits_processors

        self._processors = find_logits_processors(processors)

    def check(self, params: SamplingParams) -> None:
        """Raise RequestError with the text of the ValueError by which a processor refuses them."""
        for processor in self._processors:
            try:
                processor.validate_params(params)
            # before the next clause: a RequestError is a ValueError, too, and says more than its
            # text
            except RequestError:
                raise
            except ValueError as error:
                raise RequestError(text_of(error), parameter="extra_args") from error
            # the code of a user's processor may raise anything, which must end this request alone
            except BaseException as error:
                raise contained(error) from error
