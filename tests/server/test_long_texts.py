"""Long texts, hostile templates and tokenizers that fail: others do not wait for them, and each is
answered with an error of the API.
"""

import asyncio
import gc
import shutil
import socket
import threading
import time
import warnings

import msgspec
import psutil
import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from quire import embedded
from quire.encodable import to_msgpack
from quire.errors import EngineError, PromptTooLong, RequestError
from quire.processes import task_lane
from quire.processes.start_message import LENGTH
from quire.server import long_texts, text_process
from quire.server.long_texts import LongTexts
from quire.server.text_process import EncodeTask, TextAnswer
from quire.text.tokenizer import Tokenizer
from tests.server.serve_process import serving
from tests.text.tokenizer_folders import CORPUS, write_folder

MB = 2**20
WORDS = "the quick brown fox jumps over the lazy dog and runs away\n"
TURN = {"role": "user", "content": "a"}


def text(size):
    return (WORDS * (size // len(WORDS) + 1))[:size]


def with_expression(folder, expression):
    """The embedded model, its texts cut by `expression`."""
    shutil.copytree(embedded.path(), folder)
    library = LibraryTokenizer.from_file(str(folder / "tokenizer.json"))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    library.save(str(folder / "tokenizer.json"))
    return folder


class Probe:
    """How long `/health` takes, asked all the time in a thread, for a block."""

    def __init__(self, server):
        self._server = server
        self.waits = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def _run(self):
        with self._server.client() as client:
            while not self._is_over.wait(0.005):
                start = time.perf_counter()
                assert client.get("/health").status_code == 200
                self.waits.append(time.perf_counter() - start)

    def __exit__(self, *exc):
        self._is_over.set()
        self._thread.join()

    def total(self, slow_s):
        """Seconds in waits longer than a tenth of that, as a busy machine has them."""
        return sum(wait for wait in self.waits if wait > slow_s / 10)


@pytest.fixture(scope="module")
def server():
    with serving("--trust-request-chat-template") as running:
        yield running


@pytest.fixture(scope="module")
def slow_s():
    """Seconds that half a MiB takes here and now: everybody would wait for them, or for more."""
    tokenizer = Tokenizer.from_folder(embedded.path())
    start = time.perf_counter()
    tokenizer.encode(text(MB // 2))
    return time.perf_counter() - start


def resident(server):
    root = psutil.Process(server.process.pid)
    return sum(each.memory_info().rss for each in (root, *root.children(recursive=True)))


LONG = {
    "completions": ("/v1/completions", lambda words: {"prompt": words}),
    "chat": ("/v1/chat/completions", lambda words: {"messages": [{**TURN, "content": words}]}),
    "many": ("/v1/chat/completions", lambda w: {"messages": [{**TURN, "content": w[:MB]}] * 4}),
    "responses": ("/v1/responses", lambda words: {"input": words}),
    "messages": (
        "/v1/messages",
        lambda words: {"messages": [{**TURN, "content": words}], "max_tokens": 1},
    ),
    "count": ("/v1/messages/count_tokens", lambda w: {"messages": [{**TURN, "content": w}]}),
    "batch": ("/v1/completions", lambda words: {"prompt": [words[: MB // 4]] * 16}),
}


def test_t33_a_long_text_is_refused_on_every_route_while_others_are_served(server, slow_s):
    server.post("/v1/completions", {"prompt": text(2**17), "max_tokens": 1})
    server.post("/v1/chat/completions", {"messages": [{**TURN, "content": text(2**17)}]})
    before = resident(server)
    with Probe(server) as probe:
        for name, (path, body) in LONG.items():
            reply = server.post(path, body(text(4 * MB)))
            assert reply.status_code == 400, (name, reply.text)
            assert "maximum context length" in reply.json()["error"]["message"], name
            assert resident(server) - before < 400 * MB, name
    assert probe.total(slow_s) < slow_s, sorted(probe.waits)[-5:]


def test_t33_a_text_of_any_length_is_counted_while_others_are_served(server, slow_s):
    with Probe(server) as probe:
        reply = server.post("/tokenize", {"prompt": text(MB // 2)})
    own = Tokenizer.from_folder(embedded.path())
    assert reply.json()["tokens"] == own.encode(text(MB // 2))
    assert probe.total(slow_s) < slow_s / 2, sorted(probe.waits)[-5:]


HEAVY = {
    "numbers": b'{"prompt": [' + b"1e300, " * 200_000 + b"1]}",
    "digits": b'{"prompt": [' + (b"9" * 4000 + b", ") * 500 + b"1]}",
    "lists": b'{"prompt": [' + b"[], " * 500_000 + b"1]}",
    "objects": b'{"prompt": [' + b'{"a": 1}, ' * 200_000 + b"1]}",
    "ids": b'{"prompt": [' + b"1, " * 2_000_000 + b"1]}",
}


@pytest.mark.parametrize("name", HEAVY)
def test_t33_a_body_that_is_hard_to_decode_is_not_decoded(server, name):
    headers = {"content-type": "application/json"}
    start = time.monotonic()
    with server.client() as client:
        reply = client.post("/v1/completions", content=HEAVY[name], headers=headers)
    assert reply.status_code == 400
    assert "send less in one request" in reply.json()["error"]["message"]
    assert time.monotonic() - start < 5  # to decode the numbers takes longer


def test_t36_a_request_s_template_is_rendered_within_limits(server, slow_s):
    templates = [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = [n.x, n.x] %}"
        "{% endfor %}{{ n.x == [n.x, 1] }}",
    ]
    with Probe(server) as probe:
        for template in templates:
            body = {"messages": [TURN], "chat_template": template, "max_tokens": 1}
            reply = server.post("/v1/chat/completions", body)
            assert reply.status_code in (200, 400)
        plain = {"messages": [TURN], "chat_template": "{{ messages[0].content }}", "max_tokens": 1}
        assert server.post("/v1/chat/completions", plain).status_code == 200
    assert probe.total(slow_s) < slow_s / 2, sorted(probe.waits)[-5:]


async def ended(texts, *prompts):
    """What becomes of prompts, one after the other: ids, or the text of an error."""
    results = []
    try:
        for prompt in prompts:
            try:
                results.append(await texts.ids(prompt, add_special_tokens=False, limit=None))
            except RequestError as error:
                results.append(str(error))
    finally:
        texts.close()
    return results


def test_t39_a_tokenizer_that_gives_up_on_a_text_raises_what_the_api_can_show(tmp_path):
    """In this process for the first short text; then, and for long ones, in another one."""
    tokenizer = Tokenizer.from_folder(with_expression(tmp_path / "x", r"(a|aa){50}b|[\s\S]"))
    prompts = ["a" * 1000, "a" * 1000, "a" * 70_000]
    for error in asyncio.run(ended(LongTexts(tokenizer, 4096), *prompts)):
        assert error.startswith("The tokenizer fails at this text (Onig:")


def test_t39_an_expression_without_end_is_ended(tmp_path):
    tokenizer = Tokenizer.from_folder(with_expression(tmp_path / "x", r"(a|aa)+b|[\s\S]"))
    assert tokenizer.may_backtrack
    texts = LongTexts(tokenizer, 4096, time_s=1)
    endless = (" " + "a" * 30) * 1000
    first, then = asyncio.run(ended(texts, endless, "b"))
    assert first == "Tokenizing this text takes more than 1 s; send a shorter one."
    assert then == tokenizer.encode("b", add_special_tokens=False)


def test_t33_a_text_that_takes_too_much_memory_is_refused_and_the_next_one_is_not():
    tokenizer = Tokenizer.from_folder(embedded.path())
    texts = LongTexts(tokenizer, 4096, memory_bytes=64 * MB)
    first, then = asyncio.run(ended(texts, text(2 * MB), text(2**17)))
    assert "Tokenizing this text takes more than 64 MiB" in first
    assert then == tokenizer.encode(text(2**17), add_special_tokens=False)


class Broken:
    def encode(self, *args, **options):
        raise LookupError("a\udc80")


def test_t39_a_fault_of_a_tokenizer_is_the_text_s_error_and_can_be_sent():
    task = to_msgpack(EncodeTask("a", False, None, 9))
    for data, why in ((task, "LookupError: a\\udc80"), (b"\xc1", "DecodeError")):
        answer = text_process.answer_to(Broken(), data)
        assert answer.error.startswith("The text cannot be worked on: ") and why in answer.error
        assert msgspec.msgpack.decode(to_msgpack(answer), type=TextAnswer) == answer


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
def test_t33_a_text_has_the_same_ids_whichever_way_it_goes(tmp_path, monkeypatch, kind):
    folder = tmp_path / kind
    write_folder(folder, kind)
    tokenizer = Tokenizer.from_folder(folder)
    prompts = ["".join(CORPUS) * 50, "a" * 5000, " \n" * 3000, "\ud7ff😀é\x00" * 1000, "</s>" * 9]
    direct = [tokenizer.library.encode(p, add_special_tokens=False).ids for p in prompts]
    for inline, short in ((2**20, 2**20), (0, 2**20), (0, 0)):
        monkeypatch.setattr(long_texts, "INLINE_CHARS", inline)
        monkeypatch.setattr(long_texts, "SHORT_CHARS", short)
        assert asyncio.run(ended(LongTexts(tokenizer, 4096), *prompts)) == direct


def test_t33_what_cannot_fit_is_refused_by_its_size_and_what_can_is_not():
    tokenizer = Tokenizer.from_folder(embedded.path())
    longest = max(tokenizer.get_vocab(), key=len)
    word = tokenizer.decode([tokenizer.convert_tokens_to_ids(longest)])
    assert tokenizer.longest_token_bytes == len(word)

    async def use(prompt):
        texts = LongTexts(tokenizer, 4096)
        try:
            return await texts.ids(prompt, add_special_tokens=False, limit=4096)
        finally:
            texts.close()

    assert 3500 < len(asyncio.run(use(word * 3500))) < 4096
    for prompt in (word * 4097, text(MB)):
        with pytest.raises(PromptTooLong, match="it has at least"):
            asyncio.run(use(prompt))


class ScriptedChild:
    """A process that answers each text with an id, and then closes its pipe."""

    def __init__(self, pair, num_answers=1):
        self.pipe, self._theirs = pair
        self._num_answers = num_answers
        self.is_running, self.exit_code = True, None

    def start(self, message):
        answer = to_msgpack(TextAnswer(ids=b"\1\0\0\0"))
        self._theirs.sendall(LENGTH.pack(0))
        for _ in range(self._num_answers):
            self._theirs.sendall(LENGTH.pack(len(answer)) + answer)
        self._theirs.shutdown(socket.SHUT_WR)

    def exit_words(self):
        return "exited"

    def kill(self):
        self._theirs.close()

    def end(self, timeout_s):
        self.kill()
        self.pipe.close()


def asks_of(texts):
    return texts.ids("a" * 70_000, add_special_tokens=False, limit=None)


@pytest.fixture
def without_collections():
    """Garbage is collected by the test alone, the oldest first."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_t33_a_server_that_is_dropped_leaves_no_open_pipe(monkeypatch, without_collections):
    """Garbage is finalised in no order: here the pipe would come before its lane."""
    pairs = [socket.socketpair()]
    number = pairs[0][0].fileno()
    monkeypatch.setattr(task_lane, "ChildProcess", lambda module: ScriptedChild(pairs.pop()))
    texts = LongTexts(Tokenizer.from_folder(embedded.path()), 4096)
    texts.itself = texts
    assert asyncio.run(asks_of(texts)) == [1]
    del texts
    monkeypatch.undo()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        gc.collect()
    assert [str(each.message) for each in caught if f"fd={number}" in str(each.message)] == []


def test_t33_a_caller_that_leaves_while_the_process_is_ended_leaves_no_open_pipe(monkeypatch):
    pair = socket.socketpair()
    monkeypatch.setattr(task_lane, "ChildProcess", lambda module: ScriptedChild(pair, 0))

    async def leaves(work, *args):
        if work.__name__ == "end":
            raise asyncio.CancelledError
        return work(*args)

    monkeypatch.setattr(asyncio, "to_thread", leaves)
    texts = LongTexts(Tokenizer.from_folder(embedded.path()), 4096)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(asks_of(texts))
    assert [end.fileno() for end in pair] == [-1, -1]


@pytest.mark.full
def test_t33_no_process_starts_after_the_end(monkeypatch):
    texts = LongTexts(Tokenizer.from_folder(embedded.path()), 4096)
    texts.close()
    with pytest.raises(EngineError, match="has been shut down"):
        asyncio.run(asks_of(texts))
