"""A server on a loopback port whose model says what a test tells it to."""

import asyncio
import threading
from contextlib import contextmanager

from openai import OpenAI

from quire.server.http.listening import Listening, bind, make_listener
from quire.server.settings import ChatSettings
from tests.server.scripted_app import make_scripted, tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ opening or '' }}"
    "{% if enable_thinking is false %}[terse]{% endif %}{% endif %}"
)


class ScriptedServer:
    """`says`: the model's next outputs. `seen`: the requests that its core got, `prompt(i)` as
    text. `url`: where it is. `openai`: a client of it.
    """

    def __init__(self, parser_plan, tokens_per_step):
        self.tokenizer = tokenizer()
        self.says = ""
        self._chat = ChatSettings(template=TEMPLATE, parser_plan=parser_plan)
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

    async def _serve(self):
        app, engine, self._core = make_scripted(
            lambda: self.says, self._chat, tokens_per_step=lambda handle: self._tokens_per_step
        )
        with bind(None, 0, None) as socket:
            self._listener = make_listener(app, Listening())
            self.url = f"http://127.0.0.1:{socket.getsockname()[1]}"
            socket.listen()
            self._is_up.set()
            await self._listener.serve([socket])
        engine.shutdown()


@contextmanager
def scripted(parser_plan, tokens_per_step=1):
    server = ScriptedServer(parser_plan, tokens_per_step)
    server.start()
    try:
        yield server
    finally:
        server.stop()
