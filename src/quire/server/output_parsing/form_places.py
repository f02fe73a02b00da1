"""Structured outputs after a reasoning: where a form begins in an output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from quire.errors import InvalidParameter
from quire.params.structured import StructuredOutputsParams
from quire.server.output_parsing.answer_or_calls import format_of
from quire.server.output_parsing.parser_plan import ParserPlan
from quire.server.output_parsing.parser_registry import plan_parsers


class FormsAfterReasoning:
    """Has forms begin after the reasoning. Raises InvalidParameter for an unknown format."""

    def __init__(self, reasoning_parser: str) -> None:
        try:
            self._plan = plan_parsers(None, reasoning_parser, None)
        except InvalidParameter as error:
            name = "structured_outputs_config['reasoning_parser']"
            raise InvalidParameter(name, reasoning_parser, str(error)) from error

    def placed(self, form: StructuredOutputsParams, prompt_end: str) -> StructuredOutputsParams:
        """The form in an output of a prompt that ends so."""
        place = self._plan.place_of_form(self._plan.place(prompt_end))
        return form_at(self._plan, form, place)


def form_at(
    plan: ParserPlan,
    form: StructuredOutputsParams,
    place: str,
    others: Sequence[Mapping[str, Any]] = (),
) -> StructuredOutputsParams:
    """The form with what may come before it in an output that begins at `place`. `others`: formats
    that may stand in place of it, where the reasoning format describes whole outputs.
    """
    if plan.describes_whole_outputs and place in ("start", "reasoning"):
        lasts = [plan.answer_format(format_of(form)), *others]
        return as_tag(form, plan.whole_output(place, lasts))
    start = plan.form_start(place)
    if start is None:
        return form
    return replace(form, starts_after=list(start.ends), opens_with=list(start.opens) or None)


def as_tag(form: StructuredOutputsParams, tag: str) -> StructuredOutputsParams:
    """A structural tag with the options of another form."""
    nothing = dict.fromkeys(("json", "json_object", "regex", "choice", "grammar"))
    return replace(form, **nothing, structural_tag=tag)
