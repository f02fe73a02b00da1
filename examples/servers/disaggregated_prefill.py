"""A proxy for an engine that computes prompts and another one that generates.

Each request is sent to the first with one token to generate, and then, with the
`kv_transfer_params` of that answer, to the second, whose answer the client gets
(docs/kv_connectors.md). Where the first does not answer, the second computes the prompt itself.

    python examples/servers/disaggregated_prefill.py \
        --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

FIRST_LEG = {"do_remote_decode": True, "do_remote_prefill": False}
PREFILL_S = 30.0
"""Seconds after which the prompt is computed where the answer is generated."""
ONLY_OF_ANSWERS = ("stream_options", "min_tokens")


class Proxy:
    """Sends requests on."""

    def __init__(self, prefill: str, decode: str) -> None:
        """prefill, decode: the addresses of two servers."""
        self.prefill, self.decode = prefill, decode
        self.client = httpx.AsyncClient(timeout=None)

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        body = await request.json()
        headers = {"X-Request-Id": request.headers.get("x-request-id") or uuid.uuid4().hex}
        if "authorization" in request.headers:
            headers["Authorization"] = request.headers["authorization"]
        params = await self.first_leg(request.url.path, body, headers)
        if params is not None:
            body["kv_transfer_params"] = params
        sent = self.client.build_request(
            "POST", self.decode + request.url.path, json=body, headers=headers
        )
        try:
            answer = await self.client.send(sent, stream=True)
        except httpx.TransportError as error:
            text = json.dumps({"error": {"message": f"the engine does not answer: {error!r}"}})
            return Response(text, 502, media_type="application/json")
        kind = answer.headers.get("content-type")
        return StreamingResponse(chunks(answer), answer.status_code, media_type=kind)

    async def first_leg(
        self, path: str, body: dict[str, Any], headers: dict[str, str]
    ) -> dict[str, Any] | None:
        """Have the prompt computed; returns where its K/V is, None: nowhere."""
        own = {name: value for name, value in body.items() if name not in ONLY_OF_ANSWERS}
        own |= {"max_tokens": 1, "stream": False, "kv_transfer_params": FIRST_LEG}
        if "max_completion_tokens" in body:
            own["max_completion_tokens"] = 1
        try:
            answer = await self.client.post(
                self.prefill + path, json=own, headers=headers, timeout=PREFILL_S
            )
            params = answer.json().get("kv_transfer_params") if answer.is_success else None
        except (httpx.TransportError, ValueError):
            return None
        return params if isinstance(params, dict) else None


async def chunks(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The bytes of an answer as they come."""
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    finally:
        await answer.aclose()


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefill", required=True, help="address of the server for prompts")
    parser.add_argument("--decode", required=True, help="address of the server that generates")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    proxy = Proxy(args.prefill, args.decode)
    paths = ("/v1/completions", "/v1/chat/completions")
    app = Starlette(routes=[Route(path, proxy.__call__, methods=["POST"]) for path in paths])
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
