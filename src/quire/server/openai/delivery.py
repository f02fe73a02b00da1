"""From prompts to a response: whole, or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.outputs import RequestOutput
from quire.server.context import Prompt, RequestName, Server
from quire.server.engine_outputs import Outputs, close_all, last_outputs, merged, raise_error
from quire.server.http.event_stream import DONE, event
from quire.server.http.failures import JSON, error_json
from quire.server.openai.requests import GenerationFields


class Reply(Protocol):
    """What one route makes of outputs; `prompt` counts the prompts of the request."""

    def whole(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct:
        """The body of a reply that is not streamed, from the last output of each prompt."""
        ...

    def chunks(self, prompt: int, output: RequestOutput) -> Iterable[msgspec.Struct]:
        """The chunks of a stream that this delta makes."""
        ...

    def last(self) -> msgspec.Struct | None:
        """The chunk behind all others, if there is one."""
        ...


async def deliver(
    server: Server,
    request: Request,
    body: GenerationFields,
    name: RequestName,
    prompts: Sequence[Prompt],
    reply: Reply,
) -> Response:
    """Run the prompts and send what `reply` makes of their outputs.

    What is wrong with them is raised before anything is sent.
    """
    streams = await server.start(request, body, name, prompts)
    if body.stream:
        return server.stream(_events(streams, reply), streams)
    try:
        outputs = await last_outputs(request, streams)
    finally:
        await close_all(streams)
    return Response(msgspec.json.encode(reply.whole(outputs)), media_type=JSON)


async def _events(streams: Sequence[Outputs], reply: Reply) -> AsyncGenerator[bytes]:
    """An error after the stream's start is an event of it."""
    encoder = msgspec.json.Encoder()
    try:
        async with aclosing(merged(streams)) as outputs:
            async for prompt, output in outputs:
                raise_error(output)
                pieces = [event(encoder.encode(c)) for c in reply.chunks(prompt, output)]
                if pieces:
                    yield pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if (last := reply.last()) is not None:
            yield event(encoder.encode(last))
    except Exception as error:
        yield event(error_json(error))
    yield DONE
