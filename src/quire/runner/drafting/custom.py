"""Drafts of a class of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import islice
from typing import Any

from quire.config.speculation import SpeculationPlan
from quire.errors import InvalidParameter
from quire.step.faults import contained


class CustomGuesser:
    """Calls `propose(token_ids, num_tokens)` of the user's object with all tokens of a request."""

    def __init__(self, proposer: Any, token_ids: Sequence[int]) -> None:
        self._proposer = proposer
        self._tokens = list(token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens += token_ids

    def guess(self, most: int) -> list[int]:
        try:
            found = self._proposer.propose(list(self._tokens), most)
            return [int(token) for token in islice(found, most)]  # it may have no end
        except BaseException as error:
            raise contained(error) from None

    def close(self) -> None:
        """Do nothing: the object does not know requests."""


def make_proposer(plan: SpeculationPlan) -> Any:
    """Make the user's object from the plan. Raises InvalidParameter for a class that cannot be
    imported, or has no method `propose`.
    """
    name = plan.custom_class
    assert name is not None, "the method has a class"
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        allowed = f"it cannot be imported ({error})"
        raise InvalidParameter("speculative_config['model']", name, allowed) from error
    if not callable(getattr(found, "propose", None)):
        allowed = "the class has a method propose(token_ids, num_tokens)"
        raise InvalidParameter("speculative_config['model']", name, allowed)
    return found(plan)
