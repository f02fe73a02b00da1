"""Rows of the table of threats that concern a server as a whole: its sockets, its processes, the
folder of its model. The rows about single requests are in test_hostile_requests.py and
test_access.py; docs/server.md says which test is whose.
"""

import ast
import asyncio
import json
import pickle
import random
import re
import socket
import stat
import struct
import subprocess
import tempfile
import threading
from pathlib import Path

import httpx
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

import quire
from quire import LLM
from quire.engine.shared_cores import broker as broker_module
from quire.engine.shared_cores.broker import CoreBroker
from quire.engine.wire.messages import CLIENT_SHIFT, EngineCoreOutputs
from quire.errors import LoadError
from quire.scheduling.block_pool import next_key, root_key
from quire.testing.checkpoints import make_checkpoint
from tests.server.serve_process import command_of, serving

KEY = {"Authorization": "Bearer the-key"}
BODY = {"model": "", "prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0}
FORM_LIMITS = '{"compile_time_s": 1, "max_cached_grammars": 8}'


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, file):
        self._file = str(file)

    def __reduce__(self):
        return (Path(self._file).write_text, ("hit",))


@pytest.fixture(scope="module")
def optimised():
    """A server whose interpreter has no assertions, with two cores and two API servers."""
    flags = ("--api-server-count", "2", "-dp", "2", "--api-key", "the-key")
    forms = ("--structured-outputs-config", FORM_LIMITS)
    with serving(*flags, *forms, interpreter=("-O",)) as running:
        yield running


def text_of(server):
    reply = server.post("/v1/completions", BODY, headers=KEY)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def family_of(server):
    owner = psutil.Process(server.process.pid)
    return [owner, *owner.children(recursive=True)]


# the processes' own sockets


def test_t01_bytes_that_are_not_a_message_are_dropped_at_every_socket(optimised, tmp_path):
    right = text_of(optimised)
    folders = list(Path(tempfile.gettempdir()).glob(f"quire-sockets-{optimised.process.pid}-*"))
    assert folders
    canary = tmp_path / "canary"
    rng = random.Random(1)
    hostile = [pickle.dumps(Canary(canary)), b"", b"\xc1", rng.randbytes(300), b"\x00" * 9]
    context = zmq.Context()
    num_sockets = 0
    for folder in folders:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        for file in folder.iterdir():
            if stat.S_ISSOCK(file.stat().st_mode):
                num_sockets += 1
                for kind in (zmq.DEALER, zmq.PUSH):
                    with context.socket(kind) as each:
                        each.linger = 500
                        each.connect(f"ipc://{file}")
                        for first in hostile:
                            each.send_multipart([first, *rng.sample(hostile, 2)])
    context.term()
    assert num_sockets >= 2
    assert text_of(optimised) == right
    assert not canary.exists()
    assert {process.status() for process in family_of(optimised)} & {"zombie"} == set()


def test_t04_only_the_port_of_http_listens(optimised):
    port = int(optimised.url.rpartition(":")[2])
    places = {
        (each.laddr.ip, each.laddr.port)
        for process in family_of(optimised)
        for each in process.net_connections("inet")
        if each.status == psutil.CONN_LISTEN
    }
    assert places == {("127.0.0.1", port)}


def test_t05_a_process_that_does_not_read_is_disconnected(monkeypatch):
    """Outputs of a step go to whom they are for; they do not pile up for one who is stuck."""
    monkeypatch.setattr(broker_module, "MOST_UNSENT_BYTES", 2**20)

    class Cores:
        engine_indices = ()

        def abort_requests(self, handles):
            self.aborted = handles

        async def get_output(self):
            handle = (1 << CLIENT_SHIFT) + 1
            return EngineCoreOutputs([handle], list(range(70_000, 70_500)), [500])

    async def run():
        ours, theirs = socket.socketpair()
        lost = asyncio.Event()
        stats = type("Stats", (), {"record": lambda *figures: None})()
        broker = CoreBroker(Cores(), stats)
        await broker.join(broker.new_index(), theirs, lost.set)
        serving_all = asyncio.ensure_future(broker.run())
        await asyncio.wait_for(lost.wait(), 30)
        serving_all.cancel()
        assert not broker.servers
        ours.close()

    asyncio.run(run())


def test_t06_machines_without_a_secret_are_refused():
    done = subprocess.run(
        command_of("--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1"),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "QUIRE_CLUSTER_SECRET" in done.stderr.splitlines()[-1]


def test_t08_nothing_that_guards_is_an_assertion(optimised):
    """The same refusals from an interpreter that skips assertions."""
    assert optimised.get("/v1/models").status_code == 401
    for fields in (
        {"n": 10**6},
        {"max_tokens": -1},
        {"logprobs": 10**6},
        {"prompt": []},
        {"prompt": [10**9]},
        {"stop": ["a"] * 1000},
        {"logit_bias": {"999999": 1}},
        {"allowed_token_ids": [-1]},
        {"guided_choice": []},
        {"structured_outputs": {"json": {"type": 5}}},
        {"temperature": -1},
        {"no_such_field": 1},
    ):
        reply = optimised.post("/v1/completions", {**BODY, **fields}, headers=KEY)
        assert reply.status_code == 400, (fields, reply.text)
    assert text_of(optimised)


def test_t08_requests_are_not_checked_by_assertions():
    """Where a request's fields are read there is no `assert` on them."""
    for path in Path(quire.__file__).with_name("server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                assert not re.search(r"\b(body|fields|given)\b", ast.unparse(node.test)), path


# forms

PATHOLOGICAL = {
    "regex": [
        "(a+)+b" * 20,
        "(a|a)*" * 200 + "b",
        "(" * 5000,
        "a{99999}",
        "(a{0,1000}){0,1000}",
        "[" * 3000,
        r"(?=a)b",
        r"\1",
        "(x+x+)+y",
        "." * 100_000,
    ],
    "json": [
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": "https://example.com/schema"},
        {"$ref": "file:///etc/passwd"},
        {"enum": [f"{number:06d}" * 4 for number in range(40_000)]},
        {"type": "string", "pattern": "(a+)+$" * 50},
        {"type": "array", "minItems": 10**9, "items": {"type": "integer"}},
        {"type": "string", "minLength": 10**9},
        {"type": ["string"] * 1000},
        {"type": 5},
        {"properties": []},
        {"required": {"a": 1}},
        {"not": {}},
        {"minimum": "x", "type": "number"},
    ],
    "grammar": [
        "start: " + "(" * 3000,
        "start: start start | start",
        "start: " + "a" * 100_000,
        "root ::= " + '"a" ' * 20_000,
        "root ::= root root root | ",
        "start: /(a+)+b/ start",
        "%import common.WORD",
        "",
        "\x00",
    ],
}


def nested(keyword, depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {keyword: [schema, {"type": "integer"}]}
    return schema


def nested_objects(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def pathological():
    for kind, forms in PATHOLOGICAL.items():
        yield from ((kind, form) for form in forms)
    yield from (("json", nested(word, 30)) for word in ("oneOf", "anyOf", "allOf"))
    yield from (("json", nested_objects(depth)) for depth in (60, 200, 300))
    yield from (("json", '{"items":' * depth + "{}" + "}" * depth) for depth in (500, 20_000))
    yield from (("regex", f"(a{{1,{size}}}b?){{1,{size}}}") for size in (50, 500, 5000))
    yield from (("json", {"type": "object", "patternProperties": {p: {}}}) for p in ("(", "(a+)+"))


def test_t13_every_hostile_form_is_answered_and_others_go_on(optimised):
    """A stream beside them has the text that it has alone."""
    alone = {**BODY, "max_tokens": 400, "ignore_eos": True}
    right = optimised.post("/v1/completions", alone, headers=KEY).json()["choices"][0]["text"]
    beside = {}

    def run_beside():
        reply = optimised.post("/v1/completions", alone, headers=KEY)
        beside["text"] = reply.json()["choices"][0]["text"]

    neighbour = threading.Thread(target=run_beside)
    neighbour.start()
    cases = list(pathological())
    num_refused = 0
    with httpx.Client(base_url=optimised.url, headers=KEY, timeout=120) as client:
        for kind, form in cases:
            body = {**BODY, "max_tokens": 2, "structured_outputs": {kind: form}}
            reply = client.post("/v1/completions", json=body)
            assert reply.status_code in (200, 400), (kind, str(form)[:80], reply.text)
            if reply.status_code == 400:
                num_refused += 1
                message = reply.json()["error"]["message"]
                assert len(message) < 1000
                assert not re.search("0x[0-9a-f]{6,}", message)
    neighbour.join(120)
    assert beside["text"] == right
    assert len(cases) >= 40
    assert num_refused >= 20


def test_t14_many_forms_cost_no_memory(optimised):
    """Each is another one; what is kept of them is bounded."""

    def send(client, number):
        schema = {"type": "object", "properties": {f"a{number}": {"type": "integer"}}}
        body = {**BODY, "max_tokens": 2, "structured_outputs": {"json": schema}}
        assert client.post("/v1/completions", json=body).status_code == 200

    def memory():
        return sum(process.memory_info().rss for process in family_of(optimised))

    with httpx.Client(base_url=optimised.url, headers=KEY, timeout=120) as client:
        for number in range(60):
            send(client, number)
        before = memory()
        for number in range(60, 360):
            send(client, number)
    assert memory() - before < 48 * 2**20


# the folder of a model


@pytest.fixture
def folder(tmp_path):
    return make_checkpoint(tmp_path / "model", "tiny", dtype="float32")


def change(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def run_serve(folder, *flags):
    return subprocess.run(
        command_of(str(folder), *flags),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_t07_no_code_of_a_model_s_folder_runs(folder, tmp_path):
    canary = tmp_path / "canary"
    code = f"open({str(canary)!r}, 'w').write('hit')\nclass Evil: pass\n"
    for name in ("configuration_evil", "modeling_evil", "tokenization_evil", "processing_evil"):
        (folder / f"{name}.py").write_text(code)
    change(
        folder / "config.json",
        auto_map={
            "AutoConfig": "configuration_evil.Evil",
            "AutoModelForCausalLM": "modeling_evil.Evil",
        },
    )
    change(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]},
        processor_class="processing_evil.Evil",
    )
    with serving(str(folder)) as server:
        assert server.post("/v1/completions", BODY).status_code == 200
    assert not canary.exists()
    with serving(str(folder), "--trust-remote-code") as server:  # a leave that nothing makes use of
        assert server.post("/v1/completions", BODY).status_code == 200
    assert not canary.exists()
    for path in Path(quire.__file__).parent.rglob("*.py"):
        text = path.read_text().replace("(trust_remote_code=True)", "")
        assert "trust_remote_code=" not in text.replace("trust_remote_code=False", "")


def test_t09_pickled_weights_stop_the_start_and_say_what_to_do(folder, tmp_path):
    canary = tmp_path / "canary"
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    done = run_serve(folder)
    assert done.returncode != 0
    assert "pytorch_model.bin" in done.stderr
    assert "safetensors" in done.stderr
    assert not canary.exists()


@pytest.mark.parametrize("lie", ["beyond the end", "huge", "negative", "overlap", "length"])
def test_t10_weights_that_lie_of_their_places_stop_the_start(folder, lie):
    file = folder / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    first = header[names[0]]
    begin, end = first["data_offsets"]
    if lie == "beyond the end":
        first["data_offsets"] = [len(data), len(data) + end - begin]
    if lie == "huge":
        first["shape"] = [2**62, 4]
    if lie == "negative":
        first["data_offsets"] = [-8, end - begin - 8]
    if lie == "overlap":
        first["data_offsets"] = header[names[1]]["data_offsets"]
    text = json.dumps(header).encode()
    length = 2**62 if lie == "length" else len(text)
    file.write_bytes(struct.pack("<Q", length) + text + data[8 + len(json.dumps(header)) :])
    with pytest.raises(LoadError, match="model.safetensors"):
        LLM(str(folder))
    if lie == "huge":
        done = run_serve(folder)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr, done.stderr
        assert "model.safetensors" in done.stderr


@pytest.mark.full
def test_t11_a_model_s_template_is_kept_in(folder, tmp_path):
    """Templates that reach for Python end their request, whatever they would have done."""
    canary = tmp_path / "canary"
    write = f"open('{canary}', 'w').write('hit')"
    escapes = [
        "{{ lipsum.__globals__['os'].system('touch " + str(canary) + "') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__ }}",
        "{% for m in messages %}{{ m.update({'role': 'x'}) }}{% endfor %}{{ " + write + " }}",
    ]
    turn = {"messages": [{"role": "user", "content": "a"}], "model": ""}
    with serving(str(folder), "--trust-request-chat-template") as server:
        for escape in escapes:
            reply = server.post("/v1/chat/completions", {**turn, "chat_template": escape})
            assert reply.status_code == 400, (escape, reply.text)
    change(folder / "tokenizer_config.json", chat_template=escapes[0])
    for file in folder.glob("chat_template*"):
        file.unlink()
    with serving(str(folder)) as server:
        assert server.post("/v1/chat/completions", turn).status_code == 400
        assert server.get("/health").status_code == 200
    assert not canary.exists()


# keys of the prefix cache

blocks = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), max_size=4)
salts = st.one_of(st.none(), st.text(max_size=6))


def key_of(salt, path):
    key = root_key(salt)
    for block in path:
        key = next_key(key, block)
    return key


@given(salts, blocks, salts, blocks)
def test_t25_different_beginnings_never_share_a_block(salt, path, other_salt, other_path):
    is_same = (salt, path) == (other_salt, other_path)
    assert (key_of(salt, path) == key_of(other_salt, other_path)) == is_same


def test_t25_borders_of_blocks_and_salts_are_part_of_the_key():
    keys = {
        key_of(None, [[1, 2], [3]]),
        key_of(None, [[1], [2, 3]]),
        key_of(None, [[1, 2, 3]]),
        key_of("1", [[1, 2, 3]]),
        key_of("", [[1, 2, 3, 0]]),
        key_of("\x00", [[1, 2, 3]]),
    }
    assert len(keys) == 6
