"""The fields of a request that the form of its output was made from, for errors and headers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from starlette.requests import Request

from quire.engine.frontend.input_processor import InputProcessor
from quire.errors import InvalidParameter
from quire.params import SamplingParams
from quire.params.structured import StructuredOutputsParams
from quire.server.http.fields import BODY_SLOT, IGNORED_SLOT, NamesFields

_PLAIN_IN_HEADERS = "#/[]$~-._"
"""Letters of a JSON pointer that a header has as they are."""

FormParts = Sequence[tuple[str, StructuredOutputsParams]]
"""The forms that one is made of, by their fields in the request."""


async def check_parts(inputs: InputProcessor, parts: FormParts) -> None:
    """Raise InvalidParameter, which names its field, for a form that cannot be served. The form
    that is made of these would be served without it, as one of the alternatives.
    """
    for name, form in parts:
        try:
            trial = inputs.prepare(SamplingParams(structured_outputs=form))
            if trial is not None:
                await asyncio.wrap_future(trial)
            inputs.generation.check_form(form)
        except InvalidParameter as cause:
            cause.parameter = name
            raise cause from None


def name_whole(error: InvalidParameter, parts: FormParts) -> None:
    """Let an error about a form that was made of several fields name them, in place."""
    if parts and (error.parameter or "").startswith("structured_outputs"):
        error.parameter = "tools"


def note_unenforced(request: Request, fields: Iterable[str]) -> None:
    """Name the keywords of schemas that are not enforced: a field and a JSON pointer each."""
    state = request.scope["state"]
    body = state.get(BODY_SLOT)
    for each in fields:
        name, _, pointer = each.partition("#")
        name = body.field_of(name) if isinstance(body, NamesFields) else name
        ignored, field = state.setdefault(IGNORED_SLOT, []), f"{name}#{pointer}"
        if (quoted := quote(field, _PLAIN_IN_HEADERS)) not in ignored:  # once for all of a search
            ignored.append(quoted)
