"""Who gets in (T22, T23): every route of the app, every way around the key that has worked
elsewhere, heads and bodies that are too large or too slow.
"""

import socket
import time
from base64 import b64encode

import httpx
import pytest

from quire.cli import serve
from quire.config.args.server_args import ServerArgs
from quire.server.admin import ADMIN_ROUTES
from quire.server.control.drain import DRAIN_ROUTES
from quire.server.routes import ROUTES
from tests.server.serve_process import serving

FREE = ("/", "/health", "/ping", "/ready")
KEY = "first-key"


def raw(server, data, *, timeout=20):
    """What the server answers to bytes, until it closes or is silent."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as line:
        line.sendall(data)
        line.shutdown(socket.SHUT_WR)
        pieces = []
        while piece := line.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def status(answer):
    return int(answer.split(b" ", 2)[1])


@pytest.mark.parametrize(
    "entry", [*ROUTES, *ADMIN_ROUTES, *DRAIN_ROUTES], ids=lambda entry: entry.path
)
def test_t22_every_route_asks_for_the_key(guarded, entry):
    with guarded.client() as client:
        for method in entry.methods.split():
            reply = client.request(method, entry.path)
            if entry.path in FREE:
                assert reply.status_code == 200
                continue
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == 401
            assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "path",
    [
        "/nope", "/metrics", "/docs", "/openapi.json", "//v1/models", "/v1/models/", "/V1/MODELS",
        "/health/", "/health/../v1/models", "//health", "/health%2f..%2fv1%2fmodels", "/HEALTH",
        "/%76%31/models", "/v1%2fmodels", "/;/v1/models", "/health;/v1/models", "/health%00",
        "http://x/v1/models", "http://x/health?/v1/models",
    ],
)  # fmt: skip
@pytest.mark.parametrize("host", ["x", "x/?", "x/#", "x/v1", "x:1/health", "", "a\r\nHost: b/?"])
def test_t22_no_path_and_no_host_opens_a_door(guarded, path, host):
    """T22: the decision looks at the path alone, and at the same path as the router."""
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    answer = raw(guarded, head.encode())
    free = path.startswith("http://x/health?")  # an absolute URL of a free path
    right = 400 if "Host:" in host else 200 if free else 401  # a request with two hosts is refused
    assert status(answer) == right, answer
    assert b"quire-embedded" not in answer


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer wrong"},
        {"Authorization": KEY},
        {"Authorization": "Basic " + KEY},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic " + b64encode(b"first-key:").decode()},
        {"Authorization": "Bearer first-key second-key"},
        {"Authorization": "Bearer ä".encode("latin-1")},
        {"x-api-key": ""},
        {"Cookie": f"key={KEY}"},
    ],
)
def test_t22_wrong_keys(guarded, headers):
    assert guarded.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("headers", [
    {"Authorization": "Basic " + b64encode(b"me:first-key").decode()},
    {"Authorization": "Bearer first-key"}, {"authorization": "bearer second-key"},
    {"X-Api-Key": "second-key"},
])  # fmt: skip
def test_right_keys(guarded, headers):
    assert guarded.get("/v1/models", headers=headers).status_code == 200


def test_websockets_and_preflights_get_no_further(guarded):
    """A preflight without allowed origins is like any other request."""
    upgrade = (
        "GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert status(raw(guarded, upgrade.encode())) == 401
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    with guarded.client() as client:
        assert client.options("/v1/completions", headers=asks).status_code == 401


def test_t24_keys_have_separate_prefix_caches(guarded):
    """T24: with several keys, what one sender cached is not found by another."""
    prompt = "def f():\n" + "    x = 1\n" * 60

    def cached(key, **more):
        body = {"prompt": prompt, "max_tokens": 1, "stream": False, **more}
        head = {"Authorization": f"Bearer {key}"}
        reply = guarded.post("/v1/completions", body, headers=head).json()
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("first-key") == 0
    assert cached("first-key") > 0
    assert cached("second-key") == 0
    assert cached("first-key", cache_salt="own") == 0
    assert cached("second-key") > 0


def test_t21_errors_say_nothing_of_the_inside(guarded):
    """T21: no addresses, no tracebacks, no file names."""
    head = {"Authorization": f"Bearer {KEY}", "content-type": "application/json"}
    bodies = [b"{", b"[]", b'{"prompt": {}}', b'{"prompt": "a", "n": "x"}', b"\x00" * 50]
    with guarded.client(headers=head) as client:
        for path in [entry.path for entry in ROUTES]:
            for body in bodies:
                text = client.post(path, content=body).text
                assert not any(word in text for word in ("0x", "Traceback", ".py", "/src/"))


@pytest.fixture(scope="module")
def tight():
    with serving(
        "--max-header-bytes", "8K", "--max-body-bytes", "64K", "--header-timeout-s", "1",
        "--body-timeout-s", "1", "--root-path", "/base", "--host", "0.0.0.0", "--api-key", KEY,
    ) as running:  # fmt: skip
        yield running


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer first-key\r\n"


def test_t23_a_large_head_is_refused(tight):
    """T23: at once, before all of it is read."""
    assert status(raw(tight, b"GET /health HTTP/1.1\r\nX-A: " + b"a" * 20_000 + b"\r\n\r\n")) == 431
    many = b"".join(b"X-%d: aaaaaaaaaaaaaaaa\r\n" % i for i in range(2000))
    assert status(raw(tight, b"GET /health HTTP/1.1\r\n" + many + b"\r\n")) == 431
    assert status(raw(tight, b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n")) == 431


def drip(server, head, piece, times):
    """Send slowly, and give what comes back when the server has had enough."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(head)
        try:
            for _ in range(times):
                line.sendall(piece)
                line.settimeout(0.001)
                try:
                    if answer := line.recv(65536):
                        return answer
                    return b""
                except TimeoutError:
                    line.settimeout(20)
        except (BrokenPipeError, ConnectionResetError):
            pass
        try:
            return line.recv(65536)
        except ConnectionResetError:
            return b""


def test_t23_a_header_without_an_end_is_refused(tight):
    answer = drip(tight, b"GET /health HTTP/1.1\r\nX-A: ", b"a" * 1000, 10_000)
    assert answer == b"" or status(answer) == 431


def test_t23_a_large_body_is_refused_before_it_is_read(tight):
    told = HEAD + b"Content-Type: application/json\r\nContent-Length: 1000000000\r\n\r\n"
    assert status(drip(tight, told, b" " * 1000, 10)) == 413
    untold = HEAD + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert status(drip(tight, untold, b"2000\r\n" + b" " * 8192 + b"\r\n", 10_000)) == 413


def test_t23_slow_heads_and_bodies_are_cut_off(tight):
    """A slow-loris keeps neither a connection nor a handler."""
    start = time.monotonic()
    assert drip(tight, b"GET /health HTTP/1.1\r\nX-A: a", b"", 1) == b""
    slow = HEAD + b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    assert status(drip(tight, slow, b"", 1)) == 408
    assert time.monotonic() - start < 15  # the default bounds are 20 and 60 s


@pytest.mark.parametrize("root", ["", "/base"])
def test_a_root_path_may_be_taken_off_by_the_proxy_or_not(tight, root):
    assert tight.get(f"{root}/health").status_code == 200
    assert tight.get(f"{root}/v1/models").status_code == 401
    head = {"Authorization": f"Bearer {KEY}"}
    assert tight.get(f"{root}/v1/models", headers=head).status_code == 200
    assert tight.get(f"{root}/v1/models/", headers=head).status_code == 200


@pytest.mark.parametrize("path", ["/base/base/v1/models", "/basement/v1/models", "/v1/base/models"])
def test_a_root_path_is_taken_off_once_and_as_a_whole(tight, path):
    assert tight.get(path).status_code == 401
    assert tight.get(path, headers={"Authorization": f"Bearer {KEY}"}).status_code == 404


def test_tls(tmp_path):
    """A server with a certificate speaks TLS alone."""
    import ssl
    import subprocess

    names = [str(tmp_path / name) for name in ("key.pem", "cert.pem")]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", names[0], "-out",
         names[1], "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    with serving("--ssl-keyfile", names[0], "--ssl-certfile", names[1]) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=names[1])
        with server.client(verify=trusted) as client:
            assert client.get("/health").status_code == 200


def test_a_unix_socket_is_its_owner_s(tmp_path):
    """With a key from the environment, which no process list shows."""
    path = tmp_path / "quire.sock"
    with (
        serving("--uds", str(path), environ={"QUIRE_API_KEY": "hidden"}),
        httpx.Client(transport=httpx.HTTPTransport(uds=str(path))) as client,
    ):
        assert path.stat().st_mode & 0o777 == 0o600
        assert client.get("http://x/health").status_code == 200
        assert client.get("http://x/v1/models").status_code == 401
        head = {"Authorization": "Bearer hidden"}
        assert client.get("http://x/v1/models", headers=head).status_code == 200


def test_t3_this_machine_alone_is_served_unless_asked_for(server, tight, caplog):
    assert server.url.startswith("http://127.0.0.1:")
    assert tight.url.startswith("http://0.0.0.0:")
    assert "Anyone who can reach 0.0.0.0" not in tight.log  # it has a key
    for options, keys, warns in (
        (ServerArgs(host="0.0.0.0"), (), True),
        (ServerArgs(host="0.0.0.0"), ("k",), False),
        (ServerArgs(), (), False),
        (ServerArgs(host="::"), (), True),
        (ServerArgs(uds="x"), (), False),
    ):
        caplog.clear()
        serve._warn_if_open(options, keys)
        assert ("set --api-key" in caplog.text) == warns, options
