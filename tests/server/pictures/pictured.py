"""The whole app of a small model that takes pictures, its core too, in this process; and a web that
pictures come from.
"""

import asyncio
import base64
import dataclasses
from contextlib import asynccontextmanager

import httpx

from quire.config.args.async_engine_args import AsyncEngineArgs
from quire.config.args.server_args import ServerArgs
from quire.engine.async_llm import AsyncLLM
from quire.engine.client.inproc import build_client
from quire.engine.frontend.frontend import build_front_end
from quire.media.fetch.fetcher import MediaFetcher
from quire.media.fetch.settings import FetchSettings
from quire.media.fetch.web import WebClient
from quire.server.admin import ADMIN_ROUTES
from quire.server.app import build_app
from quire.server.assemble import access_of, build_server
from quire.server.routes import ROUTES
from quire.testing.loop_client import LoopClient
from tests.media.pictures import encoded
from tests.models.vision.spoken import picture, write_spoken

PUBLIC = "93.184.216.34"
TEMPLATE = "{% for m in messages %}{{ m.content }} w9 {% endfor %}"
"""Knows text alone, so that pictures stand before it."""
GREEDY = {"temperature": 0, "max_tokens": 4, "logit_bias": {"3": -100}, "ignore_eos": True}


def write_model(folder):
    write_spoken("llava", folder)
    return folder


def png(seed, **options):
    return encoded(picture(seed, **options))


def data_url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def text(words):
    return {"type": "text", "text": words}


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url}, **more}


def chat(*parts, **more):
    return {"messages": [{"role": "user", "content": list(parts)}], **GREEDY, **more}


class Web:
    """Hosts with addresses, and what they reply by URL: bytes, or an awaitable that makes them. It
    says what was asked for and which addresses were dialled.
    """

    def __init__(self, hosts=(), replies=()):
        self.hosts, self.replies = dict(hosts), dict(replies)
        self.asked, self.dialled, self.pauses = [], [], []

    async def resolve(self, host, port):
        return self.hosts[host]

    async def sleep(self, seconds):
        self.pauses.append(seconds)

    async def connect(self, place, port, ssl=None, server_hostname=None):
        self.dialled.append(place)
        reader, inner = asyncio.StreamReader(), asyncio.StreamReader()
        return reader, Writer(self, reader, inner)

    async def answer(self, head):
        lines = head.decode().split("\r\n")
        host = next(line[6:] for line in lines if line.startswith("Host: "))
        url = f"http://{host}{lines[0].split(' ')[1]}"
        self.asked.append(url)
        reply = self.replies[url]
        return await reply() if callable(reply) else reply


class Writer:
    """The sending half of a connection to the web of a test."""

    def __init__(self, web, reader, inner):
        self._web, self._reader = web, reader
        self.transport = self

    def write(self, data):
        self._answering = asyncio.ensure_future(self._answer(data))

    async def _answer(self, head):
        self._reader.feed_data(await self._web.answer(head))
        self._reader.feed_eof()

    async def drain(self):
        await asyncio.sleep(0)

    def abort(self):
        self._answering.cancel()


def ok(body, *headers):
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def moved(where):
    return f"HTTP/1.1 302 Moved\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()


@asynccontextmanager
async def app_of(folder, *, web=None, web_timeout_s=5.0, keys=(), server_args=None, **options):
    """The app of a folder's model, and its engine; pictures come from `web`."""
    given = {"max_model_len": 128, "dtype": "float32", "max_num_seqs": 4, "block_size": 4}
    given |= {"chat_template": TEMPLATE, "served_model_name": "tiny", **options}
    plan = AsyncEngineArgs(model=str(folder), **given).create_engine_config()
    inner = build_client(plan)
    core = inner.engine_core
    client = LoopClient(inner, lambda: bool(core.scheduler.requests))
    engine = AsyncLLM(front_end=build_front_end(plan, client), log_requests=False)
    pictures = engine.front_end.inputs.pictures
    if web is not None:
        loader = pictures._loader
        settings = loader._fetcher.settings
        settings = dataclasses.replace(settings, timeout_s=web_timeout_s, total_s=2 * web_timeout_s)
        loader._fetcher = MediaFetcher(settings, web_client(settings, web))
    args = ServerArgs(**(server_args or {}))
    server = build_server(engine, engine.tokenizer, plan, args, keys)
    try:
        yield build_app(server, access_of(args, keys), (*ROUTES, *ADMIN_ROUTES)), engine
    finally:
        server.close()
        engine.shutdown()


def anthropic_error(reply):
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["message"]


def web_client(settings: FetchSettings, web: Web) -> WebClient:
    return WebClient(settings, resolver=web.resolve, connect=web.connect, sleep=web.sleep)


@asynccontextmanager
async def client_of(app, key=None):
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://127.0.0.1:8000", headers=headers, timeout=60
    ) as http:
        yield http


def served(use, folder, **options):
    """Run `use(http, engine)` with a client of such an app."""

    async def scene():
        async with (
            app_of(folder, **options) as (app, engine),
            client_of(app, (options.get("keys") or (None,))[0]) as http,
        ):
            return await asyncio.wait_for(use(http, engine), 120)

    return asyncio.run(scene())
