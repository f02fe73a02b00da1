"""A client for a model on a server with OpenAI's API, using only the standard library."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from quire.cli.answers import Message, Piece, Pieces
from quire.errors import CapacityError, EngineError, GenerationError, InvalidParameter, RequestError
from quire.release import __version__

_SILENCE_S = 600.0
"""The longest silence of a server, in seconds."""
_LINE_BYTES = 1 << 22
_ERROR_BYTES = 1 << 16
_BUSY = (429, 503)


class RemoteModel:
    """`model` (None: the first that it serves) of the server at `url`, which ends in /v1 as a rule.

    Raises InvalidParameter for an invalid `url`, CapacityError while the server is too busy,
    RequestError for what it refuses, GenerationError for an answer that fails on its way,
    EngineError where there is no such server.
    """

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidParameter("--url", url, "it begins with http:// or https://")
        self._url = url.rstrip("/")
        self._headers = {"User-Agent": f"quire/{__version__}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._model = model or self._first_model()

    def chat(self, messages: Sequence[Message], sampling: Mapping[str, Any]) -> Pieces:
        return self._pieces("/chat/completions", {"messages": list(messages)}, sampling)

    def complete(self, prompt: str, sampling: Mapping[str, Any]) -> Pieces:
        return self._pieces("/completions", {"prompt": prompt}, sampling)

    def _first_model(self) -> str:
        with self._ask("/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                text = f"{self._url}/models names no model. Does the URL end in /v1?"
                raise EngineError(text) from None

    def _pieces(self, path: str, body: dict[str, Any], sampling: Mapping[str, Any]) -> Pieces:
        body |= {"model": self._model, **_fields(sampling), "stream": True}
        # without it a stream does not say how many tokens came
        body["stream_options"] = {"include_usage": True}
        with self._ask(path, body) as response:
            for event in _events(response):
                yield from _read(event)

    @contextmanager
    def _ask(self, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        headers = self._headers | ({} if body is None else {"Content-Type": "application/json"})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, headers)
        try:
            with self._opener.open(request, timeout=_SILENCE_S) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise _as_ours(error) from None
        except (OSError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or error
            raise EngineError(f"No answer from {self._url}{path}: {why}") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: the key is for the server that was named, and no other."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _fields(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling fields as JSON; what the server does not know it refuses by name."""
    fields: dict[str, Any] = msgspec.to_builtins(dict(sampling), str_keys=True)
    if isinstance(form := fields.get("structured_outputs"), dict):
        fields["structured_outputs"] = {k: v for k, v in form.items() if v is not None}
    if "extra_args" in fields:
        fields["vllm_xargs"] = fields.pop("extra_args")
    return fields


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events. Raises GenerationError for a stream that is cut off."""
    while line := response.readline(_LINE_BYTES):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise GenerationError("The server's stream is not JSON.") from None
        if not isinstance(event, dict):
            raise GenerationError("The server's stream has no events as OpenAI's API has them.")
        yield event
    # a stream without [DONE] has lost its end, however whole its text looks
    raise GenerationError("The server's stream was cut off.")


def _read(event: dict[str, Any]) -> Iterator[Piece]:
    if error := event.get("error"):
        raise GenerationError(_message(error))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        # servers have both names, and some send both with the same text
        if thought := delta.get("reasoning") or delta.get("reasoning_content"):
            yield Piece(thought, is_thought=True)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            yield Piece((function.get("name") or "") + (function.get("arguments") or ""))
        if text := delta.get("content") or choice.get("text"):
            yield Piece(text)
    if usage := event.get("usage"):
        yield Piece(num_tokens=usage.get("completion_tokens") or 0)


def _as_ours(error: urllib.error.HTTPError) -> EngineError:
    """The refusal as an error for the person who asked."""
    with error:
        data = error.read(_ERROR_BYTES)
    try:
        text = _message(json.loads(data)["error"])
    except (ValueError, LookupError, TypeError):
        text = error.reason
    text = f"{error.url}: {error.code} {text}"
    if error.code in _BUSY:
        return CapacityError(text)
    if error.code in (400, 413, 422):
        return RequestError(text)
    return EngineError(text)


def _message(error: Any) -> str:
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)
