"""Errors in the form that Anthropic's clients expect."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from quire.encodable import to_json
from quire.errors import PromptTooLong
from quire.server.http.failures import JSON, Refusal, as_refusal

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_response(error: BaseException) -> Response:
    """`error` as a whole response."""
    refusal = _refusal(error)
    return Response(_encoded(refusal), refusal.status, headers=refusal.headers, media_type=JSON)


def error_json(error: BaseException) -> bytes:
    """`error` as the JSON of an error object."""
    return _encoded(_refusal(error))


def _refusal(error: BaseException) -> Refusal:
    """`error` with the phrase by which clients of this API recognise a prompt that is too long."""
    refusal = as_refusal(error)
    if isinstance(error, PromptTooLong):
        sizes = f"{error.num_tokens} tokens > {error.max_model_len} maximum"
        refusal.info.message = f"prompt is too long: {sizes}. {refusal.info.message}"
    return refusal


def _encoded(refusal: Refusal) -> bytes:
    kind = _KINDS.get(refusal.status, "api_error")
    error: dict[str, Any] = {"type": kind, "message": refusal.info.message}
    if refusal.info.param == "thread":  # so that clients send whole conversations from now on
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return to_json({"type": "error", "error": error})
