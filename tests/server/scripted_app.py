"""The whole app in this process over a model that says what a test wants it to say."""

import asyncio
import functools

import httpx

from quire import embedded
from quire.engine.async_llm import AsyncLLM
from quire.engine.frontend.admission import QueueLimits
from quire.engine.frontend.frontend import FrontEnd
from quire.engine.frontend.input_processor import InputProcessor, ModelLimits
from quire.engine.frontend.output_processor import OutputProcessor
from quire.server.app import Access, build_app
from quire.server.context import Server
from quire.server.http.json_body import FieldRules
from quire.server.long_texts import LongTexts
from quire.server.openai.requests import Limits
from quire.server.output_parsing import plan_parsers
from quire.server.routes import ROUTES
from quire.server.settings import ChatSettings
from quire.testing.loop_client import LoopClient
from quire.testing.scripted_core import ScriptedCore
from quire.text.tokenizer import Tokenizer

MAX_LEN = 4096
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}{% endfor %}{{ tools }}"
)
"""Takes every role, unlike the embedded model's own."""


@functools.cache
def tokenizer():
    return Tokenizer.from_folder(embedded.path())


class AnyForm:
    """Takes every form of output: a script follows none."""

    reasoning_parser = ""

    def submit(self, form):
        return None

    def completed(self, form):
        return form

    def check(self, form):
        return None

    def unenforced(self, form):
        return ()

    def close(self):
        return None


def make_app(text, *, tool_parser=None, reasoning_parser=None, **options):
    """An app whose every answer is `text` (tokens of a few characters each), and its engine."""
    parser_plan = plan_parsers(tool_parser, reasoning_parser)
    chat = ChatSettings(template=TEMPLATE, parser_plan=parser_plan)
    app, engine, _ = make_scripted(lambda: text, chat, **options)
    return app, engine


def make_scripted(says, chat, *, queue=(100, 10_000), field_rules=None, **core):
    """An app whose next answer is `says()`, its engine and its core."""
    words = tokenizer()
    inner = ScriptedCore(
        lambda request: [*words.encode(says(), add_special_tokens=False), words.eos_token_id],
        vocab_size=words.vocab_size,
        max_model_len=MAX_LEN,
        **core,
    )
    client = LoopClient(inner, lambda: bool(inner.requests or inner._ended))
    front_end = FrontEnd(
        client=client,
        tokenizer=words,
        inputs=InputProcessor(
            words, ModelLimits(words.vocab_size, MAX_LEN), seed=0, forms=AnyForm()
        ),
        outputs=OutputProcessor(words),
        model_name="scripted",
    )
    engine = AsyncLLM(front_end=front_end, limits=QueueLimits(*queue), log_requests=False)
    server = Server(
        engine=engine,
        tokenizer=words,
        names=("scripted",),
        root="scripted",
        limits=Limits(max_model_len=MAX_LEN),
        chat=chat,
        field_rules=field_rules or FieldRules(),
        texts=LongTexts(words, MAX_LEN),
    )
    return build_app(server, Access(), ROUTES), engine, inner


def with_app(use, text, library=httpx, **options):
    """Run `use(http)` against such an app, `http` being a client of it made by `library`."""

    async def runs():
        app, engine = make_app(text, **options)
        transport = library.ASGITransport(app=app)
        async with library.AsyncClient(transport=transport, base_url="http://app") as http:
            try:
                return await asyncio.wait_for(use(http), 60)
            finally:
                engine.shutdown()

    return asyncio.run(runs())
