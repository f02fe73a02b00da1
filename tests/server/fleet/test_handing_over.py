"""Two servers over scripted cores, one of which drains to the other: what clients read is the
script, once, whatever becomes of the other server. With cores of a model: test_drain.py.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import asynccontextmanager

import httpx
import pytest

from quire.engine.async_llm import AsyncLLM
from quire.engine.client.handed_over import HandedOver
from quire.engine.client.journal import CoreJournal
from quire.engine.frontend.admission import QueueLimits
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.input_processor import InputProcessor, ModelLimits
from quire.engine.frontend.output_processor import OutputProcessor
from quire.errors import EngineDeadError, EngineError, InvalidParameter
from quire.server.app import Access, build_app
from quire.server.context import Server
from quire.server.control import drain_link
from quire.server.control.drain import DRAIN_ROUTES
from quire.server.http.listening import Listening, bind, make_listener
from quire.server.long_texts import LongTexts
from quire.server.openai.requests import Limits
from quire.server.routes import ROUTES
from quire.testing.loop_client import LoopClient
from quire.testing.scripted_core import ScriptedCore
from tests.server.scripted_app import MAX_LEN, AnyForm, tokenizer

TOKENS = tokenizer().encode("def add(a, b):\n    return a + b\n" * 3, add_special_tokens=False)
TEXT = tokenizer().decode(TOKENS)


class JournaledClient(LoopClient):
    """A client with a journal, as that of core processes has."""

    def __init__(self, inner):
        super().__init__(inner, lambda: bool(inner.requests or inner._ended))
        self.journal, self.delivered = CoreJournal(0), deque()
        self.handed_over = HandedOver(self, self._news.set)

    def add_request(self, request):
        self.journal.add(request)
        super().add_request(request)

    def abort_requests(self, handles):
        for handle in handles:
            self.journal.drop(handle)
        self.handed_over.abort(handles)
        super().abort_requests(handles)

    async def get_output(self):
        while True:
            await asyncio.sleep(0.001)
            if self.delivered:
                return self.delivered.popleft()
            if self._has_work():
                outputs = self.inner.get_output()
                if outputs.handles or outputs.finished:
                    self.journal.take(outputs)
                    return outputs
            else:
                self._news.clear()
                await self._news.wait()

    def entries(self):
        yield from self.journal.entries.items()

    def release(self, handle):
        entry = self.journal.entries.get(handle)
        if entry is None:
            return None
        self.journal.drop(handle)
        return 0, entry

    def take_back(self, entry):
        [request] = entry.resumed(0)
        self.add_request(request)

    def deliver(self, outputs):
        self.delivered.append(outputs)


class One:
    """A server; its core gives `limit` tokens of the script and stands still then."""

    def __init__(self):
        self.limit, words = 5, tokenizer()
        self.core = ScriptedCore(
            lambda request: [*TOKENS, words.eos_token_id][: self.limit],
            vocab_size=words.vocab_size,
            max_model_len=MAX_LEN,
        )
        limits = ModelLimits(words.vocab_size, MAX_LEN, eos_token_ids=(words.eos_token_id,))
        self.client = JournaledClient(self.core)
        front_end = FrontEnd(
            client=self.client,
            tokenizer=words,
            inputs=InputProcessor(words, limits, seed=0, forms=AnyForm()),
            outputs=OutputProcessor(words),
            model_name="m",
        )
        self.engine = AsyncLLM(
            front_end=front_end, limits=QueueLimits(99, 9999), log_requests=False
        )
        server = Server(
            engine=self.engine, tokenizer=words, names=("m",), root="m",
            limits=Limits(max_model_len=MAX_LEN), texts=LongTexts(words, MAX_LEN),
        )  # fmt: skip
        app = build_app(server, Access(), (*ROUTES, *DRAIN_ROUTES))
        self.listener = make_listener(app, Listening())

    def go_on(self, limit=10_000):
        self.limit = limit
        self.client._news.set()


@asynccontextmanager
async def servers(count=2):
    made, tasks = [One() for _ in range(count)], []
    with bind(None, 0, None) as first, bind(None, 0, None) as second:
        for one, socket in zip(made, (first, second), strict=False):
            socket.listen()
            one.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
            tasks.append(asyncio.create_task(one.listener.serve([socket])))
        try:
            yield made
        finally:
            for one in made:
                one.listener.should_exit = True
            await asyncio.gather(*tasks)
            for one in made:
                one.engine.shutdown()


class Reader:
    def __init__(self, http, one, number=0):
        self.texts, self.ends = [], []
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(http, one, number))

    async def _read(self, http, one, number):
        body = {
            "model": "m",
            "prompt": f"{number}",
            "max_tokens": 500,
            "stream": True,
            "logprobs": 1,
        }
        async with http.stream("POST", f"{one.url}/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                assert "error" not in line, line
                if line.startswith("data: {"):
                    [choice] = json.loads(line[6:])["choices"]
                    if choice.get("logprobs"):
                        self.texts.append((choice["text"], choice["logprobs"]["token_logprobs"]))
                    if choice["finish_reason"]:
                        self.ends.append(choice["finish_reason"])
                    self.has_begun.set()

    async def check(self):
        await asyncio.wait_for(self.task, 30)
        assert "".join(text for text, _ in self.texts) == TEXT and self.ends == ["stop"]
        values = [value for _, values in self.texts for value in values]
        assert len(values) - len(TOKENS) in (0, 1)


def run(scenario, count=2):
    async def runs():
        async with servers(count) as made, httpx.AsyncClient(timeout=30) as http:
            await asyncio.wait_for(scenario(http, *made), 60)

    asyncio.run(runs())


async def begun(http, one, count=1):
    readers = [Reader(http, one, number) for number in range(count)]
    for reader in readers:
        begins = asyncio.create_task(reader.has_begun.wait())
        await asyncio.wait([begins, reader.task], return_when=asyncio.FIRST_COMPLETED, timeout=30)
        if reader.task.done():
            reader.task.result()
        assert begins.done()
    while any(len(entry.output) < one.limit for _, entry in one.client.entries()):
        await asyncio.sleep(0.01)
    return readers


async def drained(http, one, two):
    return await http.post(f"{one.url}/drain", json={"target": two.url})


def test_streams_go_on_at_the_other_server():
    async def scenario(http, one, two):
        two.limit = 9
        readers = await begun(http, one, 3)
        reply = (await drained(http, one, two)).json()
        assert reply["handed_over"] == 3 and reply["same_root"] is True
        assert not one.core.requests and len(one.client.handed_over) == 3
        refused = await http.post(f"{one.url}/v1/completions", json={"model": "m", "prompt": "x"})
        assert refused.status_code == 503 and two.url in refused.text
        assert (await http.get(f"{one.url}/ready")).status_code == 503
        assert (await drained(http, one, two)).status_code == 409
        two.go_on()
        for reader in readers:
            await reader.check()
        assert [seen.output_token_ids for seen in two.core.seen] == [TOKENS[:5]] * 3
        assert not two.core.requests and len(two.engine.front_end.taken_over) == 0
        assert len(one.client.handed_over) == 0 and len(one.core.seen) == 3

    run(scenario)


def test_a_drain_that_fails_leaves_the_streams_here():
    async def scenario(http, one, two):
        readers = await begun(http, one, 2)
        hands_over = one.core.hand_over

        def fails(handles):
            hands_over(handles[:1])
            raise EngineError("another core has died")

        one.core.hand_over = fails
        assert (await drained(http, one, two)).status_code == 500
        assert (await http.get(f"{one.url}/ready")).status_code == 200
        one.go_on()
        for reader in readers:
            await reader.check()
        assert not two.core.seen

    run(scenario)


def test_a_server_that_dies_gives_its_streams_back():
    async def scenario(http, one, two):
        two.limit = 9
        [reader] = await begun(http, one)
        assert (await drained(http, one, two)).json()["handed_over"] == 1
        while len(one.client.handed_over._journal.entries[0].output) < 9:
            await asyncio.sleep(0.01)
        two.engine._die(EngineDeadError("it has died"))
        one.go_on()
        await reader.check()
        assert one.core.seen[-1].output_token_ids == TOKENS[:9]

    run(scenario)


def test_a_server_that_is_silent_gives_its_streams_back(monkeypatch):
    monkeypatch.setattr(drain_link, "SILENT_S", 0.3)
    monkeypatch.setattr("quire.server.control.drain.BEAT_S", 60.0)

    async def scenario(http, one, two):
        [reader] = await begun(http, one)
        assert (await drained(http, one, two)).json()["handed_over"] == 1
        one.go_on()
        await reader.check()

    run(scenario)


def test_a_client_that_leaves_ends_its_stream_there():
    async def scenario(http, one, two):
        [reader] = await begun(http, one)
        assert (await drained(http, one, two)).json()["handed_over"] == 1
        while not two.core.requests:
            await asyncio.sleep(0.01)
        reader.task.cancel()
        while two.core.requests:
            await asyncio.sleep(0.01)
        assert len(one.client.handed_over) == 0 and two.core.aborted

    run(scenario)


@pytest.mark.parametrize(
    ("origin", "status"), [(("other", "scripted"), 200), (("", "other"), 409), (("", ""), 409)]
)
def test_another_root_computes_again_and_another_model_is_refused(origin, status):
    async def scenario(http, one, two):
        two.core.origin = origin
        two.go_on()
        [reader] = await begun(http, one)
        reply = await drained(http, one, two)
        assert reply.status_code == status
        if status == 200:
            assert reply.json()["same_root"] is False and reply.json()["kv"] == "computed again"
        else:
            assert (await http.get(f"{one.url}/ready")).status_code == 200
            one.go_on()
        await reader.check()

    run(scenario)


@pytest.mark.parametrize("target", ["http://127.0.0.1:9", "ME", "ME/v1", "ftp://x"])
def test_a_target_that_is_not_a_server_changes_nothing(target):
    async def scenario(http, one):
        [reader] = await begun(http, one)
        body = {"target": target.replace("ME", one.url)}
        status = 400 if target == "ftp://x" else 502
        assert (await http.post(f"{one.url}/drain", json=body)).status_code == status
        assert (await http.get(f"{one.url}/ready")).status_code == 200
        one.go_on()
        await reader.check()

    run(scenario, 1)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x", "127.0.0.1:80", "http://a:b@x", "http://x/?q", "http://x:99999", "", "http://x/#x",
        "http://\u00e9",
    ],
)  # fmt: skip
def test_anything_but_an_address_of_a_server_is_refused(url):
    with pytest.raises(InvalidParameter, match="target"):
        drain_link.DrainTarget.of(url, None)
    with pytest.raises(InvalidParameter, match="api_key"):
        drain_link.DrainTarget.of("http://x", "\u00e9")


@pytest.mark.parametrize("body", [b"", b"\0\0\0\0", b"\x01\0\0\0\x01\0\0\0\xc0", b"\xff" * 64])
def test_anything_but_a_stream_is_refused(body):
    async def scenario(http, one):
        reply = await http.post(f"{one.url}/take_over", content=body)
        assert reply.status_code == 400 and not one.core.requests

    run(scenario, 1)
