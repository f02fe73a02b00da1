"""Connections one by one: offers of an upgrade, and what happens when descriptors run out."""

import asyncio
import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import threading

import psutil
import pytest

from quire.server.http import connection
from quire.server.http.listening import Listening, bind, make_listener
from tests.server.serve_process import serving

OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
WAIT_S = 60
HALF = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Le"


class Echo:
    """An app that answers with the body; `release` lets requests to /held go on. `begun`: there is
    one to /waits; `left`: it was told that its client has disconnected.
    """

    def __init__(self):
        self.release = threading.Event()
        self.begun, self.left = threading.Event(), threading.Event()
        self.num_answered = 0

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/waits":
            self.begun.set()
            message = await receive()
            assert message["type"] == "http.disconnect"
            self.left.set()
            return
        while scope["path"] == "/held" and not self.release.is_set():
            await asyncio.sleep(0.01)
        self.num_answered += 1
        text = json.dumps([scope["method"], scope["path"], body.decode()]).encode()
        headers = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


@contextlib.contextmanager
def listening(most=1000):
    """An echo on a loopback port: the app and the port."""
    app, up, made = Echo(), threading.Event(), []

    async def serve(listener):
        made.append(make_listener(app, Listening(), most))
        serving = asyncio.create_task(made[0].serve([listener]))
        await made[0].accepts.wait()
        up.set()
        await serving

    with bind(None, 0, None) as listener:
        port = listener.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(serve(listener)))
        thread.start()
        assert up.wait(WAIT_S)
        try:
            yield app, port
        finally:
            app.release.set()
            made[0].should_exit = made[0].force_exit = True
            thread.join(WAIT_S)


def connected(port):
    return socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)


def answer(sock):
    reply = http.client.HTTPResponse(sock)
    reply.begin()
    return json.loads(reply.read())


def ask(port, body="x", path="/echo"):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    with contextlib.closing(client):
        client.request("POST", path, body)
        return json.loads(client.getresponse().read())


@pytest.mark.parametrize("offer", [OFFER, "Connection: upgrade\r\nUpgrade: websocket\r\n"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
@pytest.mark.parametrize("num_pieces", [1, 7])
def test_t38_a_request_that_offers_an_upgrade_keeps_its_body(offer, is_chunked, num_pieces):
    framing, body = "Content-Length: 5", "hello"
    if is_chunked:
        framing, body = "Transfer-Encoding: chunked", "2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n"
    one = f"POST /echo HTTP/1.1\r\nHost: x\r\n{offer}{framing}\r\n\r\n{body}".encode()
    data = one + b"GET /next HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with listening() as (_, port), connected(port) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        step = -(-len(data) // num_pieces)
        for start in range(0, len(data), step):
            sock.sendall(data[start : start + step])
            threading.Event().wait(0.01)
        file = sock.makefile("rb")
        text = file.read().decode()
    assert '["POST", "/echo", "hello"]' in text
    assert '["GET", "/next", ""]' in text


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_t38_curl_with_http2(server):
    body = json.dumps({"model": "", "prompt": "def", "max_tokens": 2})
    words = ["curl", "-sS", "--http2", "-H", "Content-Type: application/json", "-d", body]
    done = subprocess.run([*words, f"{server.url}/v1/completions"], capture_output=True, check=True)
    assert json.loads(done.stdout)["usage"]["completion_tokens"] == 2


NEXT = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"

CHUNKED_1_0 = b"POST /echo HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
AFTER_A_BODY = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na"
FRAMED = b"Content-Length: 1\r\n\r\na"

MALFORMED = {
    "no host": b"POST /echo HTTP/1.1\r\n" + FRAMED,
    "no host in the header, but in the path": b"POST http://x/echo HTTP/1.1\r\n" + FRAMED,
    "two hosts": b"POST /echo HTTP/1.1\r\nHost: x\r\nhost: x\r\n" + FRAMED,
    "two hosts of HTTP/1.0": b"POST /echo HTTP/1.0\r\nHost: x\r\nHost: y\r\n" + FRAMED,
    "no host before a good request": b"GET / HTTP/1.1\r\n\r\n" + NEXT + b"\r\n",
    "no host, and an offer to upgrade": b"GET / HTTP/1.1\r\n" + OFFER.encode() + b"\r\n",
    "chunks of HTTP/1.0": CHUNKED_1_0 + b"1\r\na\r\n0\r\n\r\n",
    "coded chunks": CHUNKED.replace(b"chunked", b"gzip, chunked") + b"1\r\na\r\n0\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "version 0.9": b"GET / HTTP/0.9\r\n\r\n",
    "version 2.0": b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
    "unknown method": b"FOO / HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": NEXT + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "length and chunks": NEXT + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    "no path": b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00" * 9,
    "no chunk": CHUNKED + b"zz\r\n",
    "after a body": AFTER_A_BODY + b"FOO",
}
TOO_LONG = {
    "short lines": NEXT + b"a: b\r\n" * 20_000 + b"\r\n",
    "one line": NEXT + b"a: " + b"b" * 70_000 + b"\r\n\r\n",
    "blanks before a value": NEXT + b"a:" + b" " * 70_000 + b"b\r\n\r\n",
    "blanks in the request line": b"GET " + b" " * 70_000 + b"/ HTTP/1.1\r\nHost: x\r\n\r\n",
    "empty lines": b"\r\n" * 40_000 + NEXT + b"\r\n",
    "extension of a chunk": CHUNKED + b"1;" + b"a" * 140_000,
    "trailer": CHUNKED + b"1\r\na\r\n0\r\na: " + b"b" * 140_000,
}
REFUSED = [(400, name, data) for name, data in MALFORMED.items()]
REFUSED += [(431, name, data) for name, data in TOO_LONG.items()]
NAMES = [each[1] for each in REFUSED]


@pytest.mark.parametrize(("status", "data"), [each[::2] for each in REFUSED], ids=NAMES)
def test_what_is_not_http_gets_an_error_of_the_api_and_no_line_in_the_log(status, data, caplog):
    with listening() as (app, port), connected(port) as sock:
        sock.sendall(data)
        with http.client.HTTPResponse(sock) as reply:
            reply.begin()
            error = json.loads(reply.read())["error"]
        assert sock.recv(1) == b"", "nothing else is served"
    assert app.num_answered == data.startswith(AFTER_A_BODY)
    assert (reply.status, error["code"]) == (status, status)
    assert reply.headers["content-type"] == "application/json"
    assert error["message"].endswith(".")
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_http_1_0_needs_no_host():
    with listening() as (_, port), connected(port) as sock:
        sock.sendall(b"POST /echo HTTP/1.0\r\n" + FRAMED)
        assert answer(sock) == ["POST", "/echo", "a"]


def test_every_byte_of_a_head_counts_and_none_of_a_body():
    head = NEXT + b"a: " + b"b" * (65_536 - len(NEXT) - 7) + b"\r\n\r\n"
    assert len(head) == 65_536
    post = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 300000\r\n\r\n" + b"c" * 300_000
    chunks = CHUNKED + b"1\r\nd\r\n" * 30_000 + b"0\r\n\r\n"
    with listening() as (_, port):
        for data, num_replies in [(head, 1), (post + head, 2), (chunks + head, 2)]:
            with connected(port) as sock, sock.makefile("rb") as file:
                sock.sendall(data)
                text = file.read()
            assert text.count(b"HTTP/1.1 200 ") == num_replies


def test_t34_half_sent_requests_make_way(monkeypatch):
    """Of heads and of bodies; a connection that is idle after an answer is kept longer."""
    monkeypatch.setattr(connection, "STALLED_S", 0.0)
    with listening(most=20) as (_, port), contextlib.ExitStack() as stack:
        kept = stack.enter_context(connected(port))
        whole = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\ny"
        kept.sendall(whole)
        assert answer(kept)[2] == "y"
        for number in range(60):
            slow = stack.enter_context(connected(port))
            slow.sendall(HALF if number % 2 else whole[:-1])
        for _ in range(5):
            assert ask(port, "mine")[2] == "mine"
        kept.sendall(whole)
        assert answer(kept)[2] == "y"


def test_t34_requests_that_run_are_never_cut_for_new_ones():
    with listening(most=4) as (app, port), contextlib.ExitStack() as stack:
        held = [stack.enter_context(connected(port)) for _ in range(4)]
        for sock in held:
            sock.sendall(b"POST /held HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\ny")
        late = stack.enter_context(connected(port))
        late.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nz")
        late.settimeout(0.3)
        with pytest.raises(TimeoutError):
            late.recv(1)
        app.release.set()
        late.settimeout(WAIT_S)
        assert [answer(sock)[2] for sock in (*held, late)] == [*"yyyyz"]


@pytest.mark.parametrize(("limit", "says"), [("256", HALF), ("64", b"")], ids=["half", "silent"])
@pytest.mark.sharp(when=lambda says: not says)
def test_t34_a_core_is_restarted_though_slow_clients_took_all_descriptors(limit, says):
    with serving(limit=limit) as server, contextlib.ExitStack() as stack:
        port = int(server.url.rpartition(":")[2])
        for _ in range(300):
            stack.enter_context(connected(port)).sendall(says)
        [core] = psutil.Process(server.process.pid).children()
        core.kill()
        body = {"model": "", "prompt": "def", "max_tokens": 8}
        for _ in range(3):
            reply = server.post("/v1/completions", body)
            assert reply.json()["usage"]["completion_tokens"] == 8
        assert "Too many open files" not in server.log


def test_the_request_that_is_answered_learns_that_its_client_left():
    """Though others, which wait for their turn, came after it on the same connection."""
    head = b"GET /waits HTTP/1.1\r\nHost: x\r\n\r\n"
    with listening() as (app, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(head * 3)
            assert app.begun.wait(WAIT_S)
        assert app.left.wait(WAIT_S)
