"""`POST /v1/embeddings` and `POST /pooling`."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.encodable import to_json
from quire.errors import InvalidParameter, RequestError
from quire.io_processor import TASK, as_list, needed
from quire.params import PoolingParams
from quire.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.server.context import RequestName, Server
from quire.server.pooling.inputs import InputReader, PoolingPrompt, prompts_of
from quire.server.pooling.pieces import joined, pieces_of
from quire.server.pooling.replies import ItemWriter, json_frame, reply_of, sent
from quire.server.pooling.requests import EmbeddingRequest, Item, PoolingRequest, VectorFields
from quire.server.pooling.runs import Pooled, all_pooled, check_size
from quire.server.pooling.vectors import ITEM_BYTES, as_bytes

_MOST_DESCRIBED = 256
"""The vectors that the header of a reply in bytes describes, in 32 KiB."""
_OF_ITEM = 8
"""Cost of an item in addition to its numbers, in numbers."""


async def embeddings(server: Server, request: Request) -> Response:
    """Make a vector of each input."""
    body = await server.read_for_model(request, EmbeddingRequest)
    items = _items(body)
    check_size(len(items) * server.abilities.facts.size(body.dimensions))
    name = RequestName.of(request, "embd-", body.request_id)
    reader, longest = InputReader.of(server, request, body), server.pooling.longest
    if longest != reader.limit:
        reader = replace(reader, limit=longest, bound="pooler_config['max_embed_len']")
    prompts = prompts_of(reader, body, items, body.params("embed"))
    if server.pooling.has_pieces:
        results = await _in_pieces(server, request, body, name, prompts)
    else:
        results = await all_pooled(server, request, body, name, prompts)
    return await _reply(server, body, name, results, "embedding")


async def _in_pieces(
    server: Server,
    request: Request,
    body: EmbeddingRequest,
    name: RequestName,
    prompts: AsyncGenerator[PoolingPrompt],
) -> list[Pooled]:
    counts: list[int] = []
    cut = pieces_of(prompts, server.limits.max_model_len, counts)
    parts = await all_pooled(server, request, body, name, cut)
    # the request's decision, else the model's, as the engine decides for one piece
    own = server.abilities.facts.pooler.activates
    activates = own if body.use_activation is None else body.use_activation
    return joined(parts, counts, activates=activates)


async def pooling(server: Server, request: Request) -> Response:
    """Pool each input by the task that is served."""
    body = await server.read_for_model(request, PoolingRequest)
    if body.task == TASK or body.data is not None:
        return await _processed(server, request, body)
    items = _items(body)
    name = RequestName.of(request, "pooling-", body.request_id)
    prompts = prompts_of(
        InputReader.of(server, request, body), body, items, body.params(_task(server, body))
    )
    results = await all_pooled(server, request, body, name, prompts)
    return await _reply(server, body, name, results, "pooling", "data")


async def _processed(server: Server, request: Request, body: PoolingRequest) -> Response:
    processor = needed(server.io_processor, "task" if body.task == TASK else "data")
    name = RequestName.of(request, "pooling-", body.request_id)
    try:
        data = processor.parse_data(body.data)
    # a plugin refuses data by ValueError; any other exception is its own failure
    except ValueError as error:
        raise InvalidParameter("data", body.data, str(error)) from error
    prompts = as_list(await processor.pre_process_async(data, request_id=name.shown))
    items = [_item_of(prompt) for prompt in prompts]
    task = server.abilities.task
    params = processor.merge_pooling_params(PoolingParams(task=task))
    params.task = params.task or task
    reader = InputReader.of(server, request, body)
    results = await all_pooled(
        server, request, body, name, prompts_of(reader, body, items, params, "data")
    )
    outputs = [
        PoolingRequestOutput(
            request_id=f"{name.shown}-{index}",
            outputs=PoolingOutput(result.numbers),
            prompt_token_ids=[],
            num_cached_tokens=0,
            finished=True,
        )
        for index, result in enumerate(results)
    ]
    reply = await processor.post_process_async(outputs, request_id=name.shown)
    found = {"request_id": name.shown, "created_at": int(time.time()), "data": reply}
    return Response(to_json(found), media_type="application/json")


def _item_of(prompt: Any) -> Item:
    """The prompt of a plugin as an input: a text or token ids."""
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt")
    found: Item = prompt
    return found


def _task(server: Server, body: PoolingRequest) -> str:
    """The task that is served. Raises RequestError where another one is asked for."""
    served, tasks = server.abilities.task, server.abilities.facts.pooler.tasks
    if body.task in (None, served):
        return served
    # a name that does not exist is refused by it, in the engine's words
    PoolingParams(task=body.task)  # which knows tasks that are gone
    if body.task in tasks:
        text = (
            f"Try switching the model's pooling_task via --pooler-config.task {body.task}: "
            f"this server serves {served!r}."
        )
    else:
        text = f"Unsupported task: {body.task!r}. This model can do {', '.join(tasks)}."
    raise RequestError(text, parameter="task", value=body.task)


def _items(body: VectorFields) -> list[Item]:
    """The inputs. Raises InvalidParameter."""
    body.check()
    items = body.items()
    if body.encoding_format == "bytes" and len(items) > _MOST_DESCRIBED:
        allowed = f"its header describes {_MOST_DESCRIBED} vectors at most, and here are more"
        hint = "Send fewer inputs, or bytes_only."
        raise InvalidParameter("encoding_format", "bytes", allowed, hint)
    return items


async def _reply(
    server: Server,
    body: VectorFields,
    name: RequestName,
    results: Sequence[Pooled],
    kind: str,
    field: str = "embedding",
) -> Response:
    """The results as the request wants them; `field`: their name in an item of JSON."""
    how = body.encoding_format or "float"
    dtype, endianness = body.embed_dtype or "float32", body.endianness or "native"
    write = partial(as_bytes, dtype=dtype, endianness=endianness)
    sizes = [result.numbers.size + _OF_ITEM for result in results]
    if how in ("bytes", "bytes_only"):
        writer = ItemWriter(results, sizes, lambda _, result: write(result.numbers))
        headers = {}
        if how == "bytes":
            headers["metadata"] = _metadata(server, body, name, results)
        return await sent(server, writer, (b"", b"", b""), "application/octet-stream", headers)
    as_value: Callable[[Any], Any] = (
        (lambda numbers: numbers.tolist())
        if how == "float"
        else lambda numbers: base64.b64encode(write(numbers)).decode("ascii")
    )

    def item(index: int, result: Pooled) -> bytes:
        value = as_value(result.numbers)
        return to_json({"index": index, "object": kind, field: value})

    return await sent(
        server,
        ItemWriter(results, sizes, item),
        json_frame(reply_of(server, body.model, name, results)),
    )


def _metadata(
    server: Server, body: VectorFields, name: RequestName, results: Sequence[Pooled]
) -> str:
    """Positions of the vectors in a reply of bytes."""
    dtype = body.embed_dtype or "float32"
    data, start = [], 0
    for index, result in enumerate(results):
        end = start + result.numbers.size * ITEM_BYTES[dtype]
        data.append(
            {
                "index": index,
                "embed_dtype": dtype,
                "endianness": body.endianness or "native",
                "start": start,
                "end": end,
                "shape": list(result.numbers.shape),
            }
        )
        start = end
    reply = msgspec.structs.asdict(reply_of(server, body.model, name, results))
    usage = msgspec.structs.asdict(reply["usage"])
    return json.dumps({**reply, "usage": usage, "data": data})
