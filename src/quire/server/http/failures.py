"""Errors as replies: one error object and one status for every cause.

The text of an `EngineError` is written for the person who made the call and is passed on; of any
other exception only a sentence without its text is sent, and the log has the rest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.responses import Response

from quire.encodable import json_or_repr, to_json
from quire.errors import (
    CapacityError,
    ContextLengthExceeded,
    EngineDeadError,
    EngineError,
    RequestError,
)

logger = logging.getLogger(__name__)

CONTEXT_LENGTH = "context_length_exceeded"
"""The code by which clients recognise a prompt that is too long."""

JSON = "application/json"


class ErrorInfo(msgspec.Struct):
    """OpenAI's error object; `code` is the HTTP status, or the name that clients look for."""

    message: str
    type: str
    param: str | None = None
    code: int | str = 400


class ErrorBody(msgspec.Struct):
    """The body of every reply that is an error, and of an error event in a stream."""

    error: ErrorInfo


class Refusal(Exception):
    """A request ends here with this status; raised by handlers, sent by `error_response`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.info = ErrorInfo(
            message, _KINDS.get(status) or _kind_of(status), param, code or status
        )
        self.headers = dict(headers or {})


_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    422: "UnprocessableEntityError",
    429: "RateLimitError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


def as_refusal(error: BaseException) -> Refusal:
    """`error` as a status and an error object."""
    if isinstance(error, Refusal):
        return error
    # from the special to the general: all of these are EngineErrors
    if isinstance(error, RequestError):
        code = CONTEXT_LENGTH if isinstance(error, ContextLengthExceeded) else None
        text = error.described(json_or_repr)
        return Refusal(error.http_status, text, param=error.parameter, code=code)
    if isinstance(error, CapacityError):
        return Refusal(error.http_status, str(error), headers=_retry(error.retry_after_s))
    # with a time to retry: another process may restart the engine, and a balancer may know another
    # server
    if isinstance(error, EngineDeadError):
        return Refusal(error.http_status, str(error), headers=_retry(None))
    if isinstance(error, EngineError):
        return Refusal(500, str(error))
    logger.error("a request failed", exc_info=error)
    return Refusal(500, "The server failed to answer this request; its log says why.")


def error_response(error: BaseException) -> Response:
    """`error` as a whole response."""
    refusal = as_refusal(error)
    return Response(
        error_json(refusal), status_code=refusal.status, media_type=JSON, headers=refusal.headers
    )


def error_json(error: BaseException) -> bytes:
    """`error` as the JSON of an error object."""
    return to_json(ErrorBody(as_refusal(error).info))


def _retry(after_s: float | None) -> dict[str, str]:
    """The time after which to retry; a second where it is not known."""
    return {"Retry-After": str(max(1, math.ceil(after_s or 1)))}


def _kind_of(status: int) -> str:
    return "".join(HTTPStatus(status).phrase.title().split()) + "Error"
