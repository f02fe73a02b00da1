"""A server on a loopback port whose model says what a test tells it to."""

import asyncio
import functools
import threading
from contextlib import contextmanager

from openai import OpenAI

from quire import embedded
from quire.engine.admission import QueueLimits
from quire.engine.async_llm import AsyncLLM
from quire.engine.front_end import FrontEnd
from quire.engine.input_processor import InputProcessor, ModelLimits
from quire.engine.output_processor import OutputProcessor
from quire.server.app import Access, build_app
from quire.server.context import ChatSettings, Server
from quire.server.limits import Limits
from quire.server.listening import Listening, bind, make_listener
from quire.server.routes import ROUTES
from quire.server.transcript import TranscriptPlan
from quire.testing.loop_client import LoopClient
from quire.testing.scripted_core import ScriptedCore
from quire.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 4096
TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ opening or '' }}{% endif %}"
)


@functools.cache
def embedded_tokenizer():
    return Tokenizer.from_folder(embedded.path())


class ScriptedServer:
    """`says`: the model's next outputs. `seen`: the requests that its core got, `prompt(i)` as
    text.
    """

    def __init__(self, transcripts, tokens_per_step=1, **settings):
        self.tokenizer = embedded_tokenizer()
        self.says = ""
        self.url = None
        self._settings = ChatSettings(template=TEMPLATE, transcripts=transcripts, **settings)
        self._tokens_per_step = tokens_per_step
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self):
        self._thread.start()
        assert self._is_up.wait(60)
        self.openai = OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def stop(self):
        self.openai.close()
        self._listener.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()

    @property
    def seen(self):
        return self._core.seen

    def prompt(self, number=-1):
        return self.tokenizer.decode(self.seen[number].prompt_token_ids)

    def _script(self, request):
        return [
            *self.tokenizer.encode(self.says, add_special_tokens=False),
            self.tokenizer.eos_token_id,
        ]

    async def _serve(self):
        self._core = ScriptedCore(
            self._script,
            tokens_per_step=lambda handle: self._tokens_per_step,
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=MAX_MODEL_LEN,
        )
        client = LoopClient(self._core, lambda: bool(self._core.requests))
        limits = ModelLimits(
            self.tokenizer.vocab_size, MAX_MODEL_LEN, 20, (self.tokenizer.eos_token_id,)
        )
        front_end = FrontEnd(
            client=client,
            tokenizer=self.tokenizer,
            inputs=InputProcessor(self.tokenizer, limits, seed=0),
            outputs=OutputProcessor(self.tokenizer, log_stats=False),
            model_name="scripted",
            log_stats=False,
        )
        engine = AsyncLLM(front_end=front_end, limits=QueueLimits(100, 10**6), log_requests=False)
        server = Server(
            engine=engine,
            tokenizer=self.tokenizer,
            names=("scripted",),
            root="scripted",
            limits=Limits(max_model_len=MAX_MODEL_LEN),
            chat=self._settings,
        )
        with bind(None, 0, None) as socket:
            self._listener = make_listener(build_app(server, Access(), ROUTES), Listening())
            self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
            socket.listen()
            self._is_up.set()
            await self._listener.serve([socket])
        engine.shutdown()


@contextmanager
def scripted(transcripts=None, **settings):
    """A running server for a block."""
    server = ScriptedServer(transcripts or TranscriptPlan(), **settings)
    server.start()
    try:
        yield server
    finally:
        server.stop()
