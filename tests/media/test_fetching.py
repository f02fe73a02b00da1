"""What is fetched, from where, and what is refused before or while it is."""

import asyncio
import base64
import contextlib
import os
import ssl

import numpy as np
import pytest

from quire.errors import CapacityError, RequestError
from quire.media.faults import MediaFault
from quire.media.fetch.addresses import is_public
from quire.media.fetch.fetcher import GivenPicture, MediaFetcher
from quire.media.fetch.inline import open_file_url, read_file
from quire.media.fetch.settings import FetchFault, FetchSettings
from quire.media.fetch.urls import read_web_address, redirected
from quire.media.fetch.web import WebClient

PUBLIC = "93.184.216.34"

PRIVATE = (
    *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.31.0.1", "192.168.1.1", "169.254.169.254"),
    *("100.64.0.1", "192.0.0.8", "192.0.2.1", "198.18.0.1", "203.0.113.9", "224.0.0.1"),
    *("240.0.0.1", "255.255.255.255", "192.88.99.1"),
    *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "fec0::1", "ff02::1"),
    *("2001:db8::1", "100::1", "5f00::1", "2001::1", "2001:0:7f00:1::", "3fff::1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "::8.8.8.8"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::808:808"),
    *("2002:7f00:1::", "2002:a00:1::1", "2002:c0a8:101::"),
    *("2600:1234::5efe:10.0.0.1", "2600:1234::200:5efe:7f00:1"),
    *("localhost", "", "1", "0x7f.1"),
)
OPEN = (
    *("8.8.8.8", PUBLIC, "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::200e"),
    *("::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1"),
)


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_of_the_internet(address):
    assert not is_public(address)


@pytest.mark.parametrize("address", OPEN)
def test_addresses_of_the_internet(address):
    assert is_public(address)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://good.example\\@10.0.0.1/", "a backslash"),
        ("http://a b/", "a space"),
        ("http://a\r\nHost: b/", "a space"),
        ("http://user:word@good.example/", "a user's name"),
        ("http:///x", "without the name of a host"),
        ("http://a:99999/", "cannot be read"),
        ("http://a:0/", "the port 0"),
        ("http://[::1/", "cannot be read"),
        ("http://[fe80::1%25eth0]/", "without the name|cannot be read"),
        ("http://" + "a" * 300 + "/", "cannot be read|without the name"),
        ("http://a/" + "x" * 9000, "more than 8192 characters"),
    ],
)
def test_urls_that_two_readers_may_read_differently(url, words):
    with pytest.raises(MediaFault, match=words):
        read_web_address(url)


def test_a_url_is_read_once():
    address = read_web_address("HTTPS://Good.Example.:8443/a%20b/ü?q=1&r=[2]#part")
    assert address.host == "good.example" and address.port == 8443
    assert address.authority == "good.example:8443"
    assert address.target == "/a%20b/%C3%BC?q=1&r=[2]"
    assert read_web_address("http://bücher.example").host == "xn--bcher-kva.example"
    assert read_web_address("http://[2606:4700::1111]/").authority == "[2606:4700::1111]"
    assert redirected(address, "../c").text == "https://good.example:8443/c"
    with pytest.raises(MediaFault, match="not http or https"):
        redirected(address, "file:///etc/passwd")


class Web:
    """Hosts by name with their addresses, and replies by (host, path); it says what was asked."""

    def __init__(self, hosts, replies, **settings):
        self.hosts, self.replies = hosts, replies
        self.dialled, self.asked, self.pauses, self.resolved = [], [], [], []
        settings = {"timeout_s": 5.0, **settings}
        self.settings = FetchSettings(**settings)

    def client(self):
        return WebClient(
            self.settings, resolver=self.resolve, connect=self.connect, sleep=self.sleep
        )

    async def resolve(self, host, port):
        self.resolved.append(host)
        if host not in self.hosts:
            raise OSError("no such host at 0x7fff")
        found = self.hosts[host]
        return found.pop(0) if isinstance(found[0], list) else found

    async def sleep(self, seconds):
        self.pauses.append(seconds)

    async def connect(self, place, port, ssl=None, server_hostname=None):
        self.dialled.append((place, port, server_hostname))
        if place.startswith("198.51"):
            raise ConnectionRefusedError("at 0x7fff")
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader, writer):
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            host = head.split("Host: ")[1].split("\r\n")[0]
            self.asked.append(head)
            reply = self.replies[host, path]
            reply = reply.pop(0) if isinstance(reply, list) else reply
            if reply is None:
                await reader.read()
            else:
                writer.write(reply)
                await writer.drain()
        writer.close()

    def fetch(self, *urls):
        async def scene():
            async with await asyncio.start_server(self.serve, "127.0.0.1") as server:
                self.port = server.sockets[0].getsockname()[1]
                fetcher = MediaFetcher(self.settings, self.client())
                given = [GivenPicture(url=u, label=f"Image {i}") for i, u in enumerate(urls)]
                return await fetcher.fetched(given, fetcher.budget())

        return asyncio.run(scene())


def ok(body=b"pixels", *headers):
    head = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body


def moved(where, status=302):
    return f"HTTP/1.1 {status} Moved\r\nLocation: {where}\r\nContent-Length: 0\r\n\r\n".encode()


def test_the_address_that_was_checked_is_dialled_under_the_host_s_name():
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/x?y=1"): ok()})
    assert web.fetch("http://a.example/x?y=1#z") == [b"pixels"]
    assert web.dialled == [(PUBLIC, 80, None)] and web.resolved == ["a.example"]
    assert "Accept-Encoding: identity" in web.asked[0]


def test_tls_is_for_the_name_and_not_for_the_address():
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/"): ok()})
    assert web.fetch("https://a.example/") == [b"pixels"]
    assert web.dialled == [(PUBLIC, 443, "a.example")]


@pytest.mark.parametrize("found", [["10.0.0.1"], [PUBLIC, "127.0.0.1"], ["64:ff9b::7f00:1"]])
def test_a_name_of_a_private_address_is_refused_without_dialling(found):
    web = Web({"a.example": found}, {})
    with pytest.raises(FetchFault, match="Image 0 .*not one of the public internet") as caught:
        web.fetch("http://a.example/")
    assert web.dialled == [] and caught.value.http_status == 422
    assert not any(address in str(caught.value) for address in found)


def test_a_name_whose_address_changes_is_resolved_once():
    """The second answer of the resolver, which would be the server itself, is never asked for."""
    web = Web({"a.example": [[PUBLIC], ["127.0.0.1"]]}, {("a.example", "/"): ok()})
    assert web.fetch("http://a.example/") == [b"pixels"]
    assert web.dialled == [(PUBLIC, 80, None)]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/", "http://[::ffff:169.254.169.254]/", "http://[fd00::1]:80/"]
)
def test_an_address_is_refused_before_anything_is_fetched(url):
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/"): ok()})
    with pytest.raises(FetchFault, match="Image 1 .*not one of the public internet"):
        web.fetch("http://a.example/", url)
    assert web.resolved == web.asked == []


def test_private_addresses_may_be_allowed():
    web = Web({"a.example": ["10.0.0.1"]}, {("a.example", "/"): ok()}, allows_private=True)
    assert web.fetch("http://a.example/") == [b"pixels"]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("http://b.example/", "not one of the public internet"),
        ("http://169.254.169.254/latest", "not one of the public internet"),
        ("//b.example/x", "not one of the public internet"),
        ("file:///etc/passwd", "not http or https"),
        ("gopher://a.example/", "not http or https"),
        ("http://user@a.example/", "a user's name"),
    ],
)
def test_every_redirect_is_checked_again(where, words):
    hosts = {"a.example": [PUBLIC], "b.example": ["10.0.0.1"]}
    web = Web(hosts, {("a.example", "/"): moved(where)})
    with pytest.raises(MediaFault, match=words):
        web.fetch("http://a.example/")
    assert web.dialled == [(PUBLIC, 80, None)]


def test_redirects_are_followed_counted_and_may_be_forbidden():
    hosts = {"a.example": [PUBLIC], "b.example": [PUBLIC]}
    replies = {
        ("a.example", "/"): moved("https://b.example/y"),
        ("b.example", "/y"): ok(b"there"),
        ("a.example", "/loop"): moved("/loop"),
    }
    web = Web(hosts, replies)
    assert web.fetch("http://a.example/") == [b"there"]
    assert web.dialled == [(PUBLIC, 80, None), (PUBLIC, 443, "b.example")]
    with pytest.raises(FetchFault, match="redirected more than 5 times"):
        web.fetch("http://a.example/loop")
    with pytest.raises(FetchFault, match="which is not allowed here"):
        Web(hosts, replies, allows_redirects=False).fetch("http://a.example/")


def test_hosts_may_be_listed_and_redirects_keep_to_the_list():
    hosts = {"a.example": [PUBLIC], "b.example": [PUBLIC]}
    replies = {("a.example", "/"): moved("http://b.example/")}
    web = Web(hosts, replies, allowed_domains=("A.example", "c.example"))
    with pytest.raises(FetchFault, match="only these hosts are allowed: a.example, c.example"):
        web.fetch("http://b.example/")
    assert web.resolved == []
    with pytest.raises(FetchFault, match="comes from b.example"):
        web.fetch("http://a.example/")
    with pytest.raises(FetchFault, match="comes from a.example.evil.example"):
        web.fetch("http://a.example.evil.example/")


@pytest.mark.parametrize(
    ("reply", "words", "status"),
    [
        (ok(b"x" * 200), "has more than 100 bytes", 422),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200, "has more than 100 bytes", 422),
        (ok(b"x", "Content-Encoding: gzip"), "it is compressed", 422),
        (b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n", "it answers 404", 422),
        (b"HTTP/1.1 204 No\r\n\r\n", "it answers 204", 422),
        (b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n", "it answers 503", 500),
        (b"\x00\x01 nonsense\r\n\r\n", "the connection fails", 500),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab", "the connection fails", 500),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -9\r\n\r\nab", "the connection fails", 500),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * 2**17, "the connection fails", 500),
    ],
)
def test_replies_that_are_not_taken(reply, words, status):
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/"): reply}, max_bytes=100)
    with pytest.raises(FetchFault, match=f"Image 0 .*{words}") as caught:
        web.fetch("http://a.example/")
    assert caught.value.http_status == status and "0x" not in str(caught.value)
    assert len(web.asked) == (3 if status == 500 else 1)
    assert web.pauses == ([1.0, 4.0] if status == 500 else [])


def test_what_passes_is_tried_again():
    answers = [b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n", ok()]
    web = Web({"a.example": ["198.51.100.1", PUBLIC]}, {("a.example", "/"): answers})
    web.settings = FetchSettings(allows_private=True)
    assert web.fetch("http://a.example/") == [b"pixels"]
    assert [place for place, _, _ in web.dialled] == ["198.51.100.1", PUBLIC] * 2


def test_a_failed_try_takes_nothing_of_the_request_s_bytes():
    whole = ok(b"x" * 60)
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/"): [whole[:-1], whole]})
    web.settings = FetchSettings(max_total_bytes=100, max_held_bytes=100)
    assert web.fetch("http://a.example/") == [b"x" * 60]


def test_a_server_that_says_nothing_ends_in_time():
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/"): None}, timeout_s=0.01, num_tries=2)
    with pytest.raises(FetchFault, match="it takes too long") as caught:
        web.fetch("http://a.example/")
    assert caught.value.http_status == 500 and web.pauses == [1.0]


def test_a_name_that_is_not_known_and_a_certificate_that_is_not_right():
    web = Web({}, {})
    with pytest.raises(FetchFault, match="cannot be fetched from a.example: its name is not known"):
        web.fetch("http://a.example/")

    async def failing(*place, **options):
        raise ssl.SSLCertVerificationError("at 0x7fff")

    web = Web({"a.example": [PUBLIC]}, {})
    web.connect = failing
    with pytest.raises(FetchFault, match="its certificate or its TLS fails") as caught:
        web.fetch("https://a.example/")
    assert caught.value.http_status == 422 and "0x" not in str(caught.value)


def test_all_pictures_of_a_request_share_a_bound():
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/"): ok(b"x" * 60)}, max_total_bytes=100)
    with pytest.raises(FetchFault, match="too many bytes: all of a request have at most 100"):
        web.fetch("http://a.example/", "http://a.example/")


def test_a_proxy_is_used_only_where_it_is_set(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    web = Web({"a.example": [PUBLIC]}, {("a.example", "/"): ok()})
    web.fetch("http://a.example/")
    assert web.dialled == [(PUBLIC, 80, None)]
    proxies = {"http": "http://proxy.example:3128"}
    web = Web({}, {("a.example", "http://a.example/x"): ok()}, proxies=proxies)
    assert web.fetch("http://a.example/x") == [b"pixels"]
    assert web.dialled == [("proxy.example", 3128, None)]
    with pytest.raises(FetchFault, match="not one of the public internet"):
        web.fetch("http://127.0.0.1/")


def fetched(*given, **settings):
    fetcher = MediaFetcher(FetchSettings(**settings))
    return asyncio.run(fetcher.fetched(given, fetcher.budget()))


def data_url(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_data_in_every_form():
    pixels = np.zeros((2, 3, 3), np.uint8)
    found = fetched(
        GivenPicture(url=data_url(b"one")),
        GivenPicture(data=b"two"),
        GivenPicture(pixels=pixels),
        GivenPicture(uuid="four"),
    )
    assert found[:2] == [b"one", b"two"] and found[2] is pixels and found[3] is None


@pytest.mark.parametrize(
    ("given", "words", "status"),
    [
        (GivenPicture(url="data:image/png,abc"), "only base64 data URLs are supported", 501),
        (GivenPicture(url="data:image/png;base64"), "without a comma", 400),
        (GivenPicture(url="data:image/png;base64,?"), "data that is not base64", 400),
        (GivenPicture(url="ftp://a/b"), "an HTTP, data or file URL", 400),
        (GivenPicture(url="picture.png"), "an HTTP, data or file URL", 400),
        (GivenPicture(), "no data and no uuid", 400),
        (GivenPicture(data=b"x" * 101), "has more than 100 bytes", 422),
        (GivenPicture(url=data_url(b"x" * 104)), "has more than 100 bytes", 422),
    ],
)
def test_what_is_refused_of_the_request_itself(given, words, status):
    with pytest.raises(MediaFault, match=words) as caught:
        fetched(given, max_bytes=100)
    assert caught.value.http_status == status


def test_files_are_read_below_the_folder_alone(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "deep").mkdir(parents=True)
    outside.mkdir()
    (root / "deep" / "a b.png").write_bytes(b"inside")
    (outside / "secret").write_bytes(b"secret")
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "x").write_bytes(b"secret")
    (root / "link").symlink_to(outside / "secret")
    (root / "folder").symlink_to(outside)
    (root / "fine").symlink_to(root / "deep" / "a b.png")
    os.mkfifo(root / "pipe")
    local = {"local_root": str(root)}
    for url in (f"file://{root}/deep/a%20b.png", f"file:{root}/deep/../fine"):
        assert fetched(GivenPicture(url=url), **local) == [b"inside"]
    outside_words = "outside of --allowed-local-media-path"
    for path, words in {
        f"{root}/link": outside_words,
        f"{root}/folder/secret": outside_words,
        f"{root}/../outside/secret": outside_words,
        f"{root}/%2e%2e/outside/secret": outside_words,
        f"{tmp_path}/root2/x": outside_words,
        "/etc/passwd": outside_words,
        "/nowhere/at/all": outside_words,
        f"{root}/nothing": "not there or cannot be read",
        f"{root}/deep": "not a regular file|cannot be read",
        f"{root}/pipe": "not a regular file",
        f"{root}/a%00b": "not there or cannot be read",
    }.items():
        with pytest.raises(MediaFault, match=words) as caught:
            fetched(GivenPicture(url=f"file://{path}"), **local)
        assert str(tmp_path) not in str(caught.value)
    with pytest.raises(MediaFault, match="of another host"):
        fetched(GivenPicture(url="file://elsewhere/x"), **local)
    with pytest.raises(MediaFault, match="has more than 3 bytes"):
        fetched(GivenPicture(url=f"file://{root}/fine"), max_bytes=3, **local)
    with pytest.raises(RequestError, match="without --allowed-local-media-path"):
        fetched(GivenPicture(url=f"file://{root}/fine"))


def test_the_first_fault_is_told_and_it_names_its_item():
    with pytest.raises(MediaFault, match=r"^Image 7 has data that is not base64\.$"):
        fetched(
            GivenPicture(data=b"x", label="Image 6"),
            GivenPicture(url="data:;base64,?", label="Image 7"),
            GivenPicture(url="data:;base64,!", label="Image 8"),
        )


def test_all_requests_together_hold_so_many_bytes():
    fetcher = MediaFetcher(FetchSettings(max_held_bytes=10))
    six, budgets = [GivenPicture(data=b"x" * 6)], [fetcher.budget() for _ in range(3)]
    assert asyncio.run(fetcher.fetched(six, budgets[0])) == [b"x" * 6]
    with pytest.raises(CapacityError, match="Try again later"):
        asyncio.run(fetcher.fetched(six, budgets[1]))
    for budget in budgets[:2]:
        budget.release()
    assert asyncio.run(fetcher.fetched(six, budgets[2])) == [b"x" * 6]
    budgets[1].give_back(6)
    with pytest.raises(CapacityError):
        asyncio.run(fetcher.fetched(six, budgets[1]))


def test_files_and_rows_are_counted_before_they_are_read(tmp_path):
    (tmp_path / "six").write_bytes(b"x" * 6)
    url = f"file://{tmp_path}/six"
    rows = np.zeros((1, 2), np.float32)
    settings = FetchSettings(max_held_bytes=10, local_root=str(tmp_path))
    for given in (
        GivenPicture(url=url),
        GivenPicture(rows=rows),
        GivenPicture(rows={"image_embeds": "A" * 8, "image_grid_thw": np.zeros(1, np.int32)}),
    ):
        fetcher = MediaFetcher(settings)
        budgets = [fetcher.budget() for _ in range(2)]
        asyncio.run(fetcher.fetched([given], budgets[0]))
        with pytest.raises(CapacityError):
            asyncio.run(fetcher.fetched([given], budgets[1]))
        budgets[0].release()
        budgets[1].release()
        assert asyncio.run(fetcher.fetched([GivenPicture(url=url)], fetcher.budget())) == [b"x" * 6]


def test_a_file_that_grows_is_refused(tmp_path):
    (tmp_path / "six").write_bytes(b"x" * 6)
    file, size = open_file_url(f"file://{tmp_path}/six", str(tmp_path), 100)
    with open(tmp_path / "six", "ab") as more:
        more.write(b"y")
    with pytest.raises(MediaFault, match="grows while it is read"):
        read_file(file, size)
    assert file.closed
