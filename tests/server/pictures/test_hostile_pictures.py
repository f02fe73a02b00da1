"""Pictures that are sent to harm: each ends with one clear error, and other requests go on."""

import asyncio
import struct
import zlib

import pytest

from quire.engine.frontend.pictures import prompts_with_pictures
from quire.server.http import json_body
from tests.media.pictures import encoded
from tests.models.vision.spoken import picture
from tests.server.pictures.pictured import (
    PUBLIC,
    Web,
    anthropic_error,
    chat,
    data_url,
    image,
    moved,
    ok,
    png,
    served,
    text,
)

PATH = "/v1/chat/completions"
ONE = png(1)


def chunk(kind, data):
    body = kind + data
    return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))


def bomb(width, height):
    """A PNG whose header says more than it has."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + data


FILES = {
    "a bomb": (bomb(60_000, 60_000), "has 60000 x 60000 pixels"),
    "a cut PNG": (ONE[: len(ONE) // 2], "Image 0 "),
    "a cut JPEG": (encoded(picture(1), "JPEG")[:200], "Image 0 "),
    "no picture": (b"GIF89a but not really", "Image 0 "),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "Image 0 "),
    "nothing": (b"", "Image 0 "),
}


def error_of(reply):
    """What a refused request is told, which shows neither libraries nor memory."""
    message = reply.json()["error"]["message"]
    assert not any(word in message for word in ("PIL", "0x", "Traceback", "Errno", "/tmp"))
    return message


def test_files_that_are_not_what_they_say(folder):
    async def use(http, engine):
        for name, (data, words) in FILES.items():
            reply = await http.post(PATH, json=chat(text("w1"), image(data_url(data))))
            assert reply.status_code == 400, name
            assert words in error_of(reply), name
            assert reply.json()["error"]["param"] == "image"
        second = chat(image(data_url(ONE)), image(data_url(FILES["a cut PNG"][0])))
        assert error_of(await http.post(PATH, json=second)).startswith("Image 1 ")
        good = await http.post(PATH, json=chat(image(data_url(ONE))))
        assert good.status_code == 200

    served(use, folder)


URLS = {
    "http://127.0.0.1/": (422, "not one of the public internet"),
    "http://[::ffff:169.254.169.254]/": (422, "not one of the public internet"),
    "http://[64:ff9b::7f00:1]/": (422, "not one of the public internet"),
    "http://inner.example/": (422, "not one of the public internet"),
    "http://both.example/": (422, "not one of the public internet"),
    "http://away.example/": (422, "not one of the public internet"),
    "http://file.example/": (400, "not http or https"),
    "http://none.example/": (422, "it answers 404"),
    "http://other.example\\@inner.example/": (400, "a backslash"),
    "http://me:word@away.example/": (400, "a user's name"),
    "ftp://away.example/": (400, "it is an HTTP, data or file URL"),
    "file:///etc/passwd": (400, "--allowed-local-media-path"),
    "data:image/png,abc": (501, "only base64 data URLs"),
    "data:image/png;base64,@@@": (400, "not base64"),
    "data:image/png;base64": (400, "without a comma"),
}
HOSTS = {
    "inner.example": ["10.0.0.1"],
    "both.example": [PUBLIC, "127.0.0.1"],
    "away.example": [PUBLIC],
    "file.example": [PUBLIC],
    "none.example": [PUBLIC],
}
REPLIES = {
    "http://away.example/": moved("http://inner.example/"),
    "http://file.example/": moved("file:///etc/passwd"),
    "http://none.example/": b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n",
}


def test_urls_that_lead_where_they_should_not(folder):
    web = Web(HOSTS, REPLIES)

    async def use(http, engine):
        for url, (status, words) in URLS.items():
            reply = await http.post(PATH, json=chat(image(url)))
            assert reply.status_code == status, (url, reply.text)
            assert words in error_of(reply), url

    served(use, folder, web=web)
    assert set(web.dialled) == {PUBLIC}


def test_files_outside_of_the_folder_are_refused_however_they_are_named(folder, tmp_path):
    inside, outside = tmp_path / "inside", tmp_path / "secret.png"
    inside.mkdir()
    outside.write_bytes(ONE)
    (inside / "link.png").symlink_to(outside)
    (inside / "one.png").write_bytes(ONE)

    async def use(http, engine):
        for name in (outside, inside / ".." / "secret.png", inside / "link.png", "/etc/passwd"):
            reply = await http.post(PATH, json=chat(image(f"file://{name}")))
            assert reply.status_code == 400
            said = reply.json()["error"]["message"]
            assert said == "Image 0 is a file outside of --allowed-local-media-path."
        reply = await http.post(PATH, json=chat(image(f"file://{inside}/one.png")))
        assert reply.status_code == 200

    served(use, folder, allowed_local_media_path=str(inside))


def test_fields_of_other_things_are_not_taken_for_pictures(folder):
    other = {"pad": "x" * 70_000, "others": [{"image_url": 1}] * 200}

    async def use(http, engine):
        body = chat(text("w1"), image(data_url(ONE))) | {"metadata": other}
        reply = await http.post(PATH, json=body)
        assert reply.status_code == 200, reply.text

    served(use, folder, limit_mm_per_prompt={"image": 1})


def test_too_many_pictures_are_refused_before_any_is_looked_at(folder, monkeypatch):
    """Something made of each would hold up all streams of the server's loop for 45 ms, and decoding
    the body for 8 ms.
    """
    web = Web({"away.example": [PUBLIC]})
    looked_at = []
    monkeypatch.setattr(prompts_with_pictures, "picture_of_part", looked_at.append)
    monkeypatch.setattr(json_body, "decode", looked_at.append)

    async def use(http, engine):
        body = chat(*[image("http://away.example/")] * 10_000)
        reply = await http.post(PATH, json=body)
        assert reply.status_code == 400
        assert error_of(reply).startswith("At most 999 image(s) may be provided in one prompt.")

    served(use, folder, web=web)
    assert web.asked == web.dialled == looked_at == []


def test_more_pictures_than_the_context_holds_are_refused(folder):
    async def use(http, engine):
        reply = await http.post(PATH, json=chat(*[image(data_url(ONE))] * 8))
        assert reply.status_code == 400
        assert reply.json()["error"]["code"] == "context_length_exceeded"

    served(use, folder)


def test_a_slow_picture_holds_up_nobody(folder):
    gate = asyncio.Event()

    async def slow():
        await gate.wait()
        return ok(ONE)

    web = Web({"away.example": [PUBLIC]}, {"http://away.example/": slow})

    async def use(http, engine):
        waiting = asyncio.create_task(http.post(PATH, json=chat(image("http://away.example/"))))
        while not web.asked:
            await asyncio.sleep(0.01)
        others = [http.post(PATH, json=chat(text(f"w{i}"))) for i in range(4)]
        others.append(http.post(PATH, json=chat(image(data_url(ONE)))))
        assert [reply.status_code for reply in await asyncio.gather(*others)] == [200] * 5
        assert not waiting.done()
        gate.set()
        assert (await waiting).status_code == 200

    served(use, folder, web=web, web_timeout_s=60.0)


def test_a_server_that_never_answers_is_given_up(folder):
    async def never():
        await asyncio.Event().wait()

    web = Web({"away.example": [PUBLIC]}, {"http://away.example/": never})

    async def use(http, engine):
        reply = await http.post(PATH, json=chat(image("http://away.example/")))
        assert reply.status_code == 500
        words = "Image 0 cannot be fetched from away.example: it takes too long."
        assert error_of(reply) == words

    served(use, folder, web=web, web_timeout_s=0.01)


def test_a_placeholder_that_is_typed_is_a_plain_token(folder):
    async def use(http, engine):
        reply = await http.post(PATH, json=chat(text("w1 <image> w2"), return_token_ids=True))
        assert reply.status_code == 200 and reply.json()["prompt_token_ids"] == [5, 3, 6, 13]
        plain = await http.post("/v1/completions", json={"prompt": "w1 <image>", "max_tokens": 2})
        assert plain.status_code == 200
        typed = chat(text("<image> w1 <image>"), image(data_url(ONE)))
        reply = await http.post(PATH, json=typed)
        assert reply.status_code == 400
        assert error_of(reply).startswith("Found more '<image>' placeholders in input prompt")
        bare = await http.post(PATH, json=chat({"type": "image"}, image(data_url(ONE))))
        assert bare.status_code == 400

    served(use, folder)


def test_parts_that_are_malformed_are_refused_by_name(folder):
    async def use(http, engine):
        for part in (
            {"type": "image_url"},
            {"type": "image_url", "image_url": {"url": 5}},
            {"type": "image_url", "image_url": {"url": None}},
            {"type": "image_url", "image_url": {"url": "x"}, "uuid": 5},
            {"type": "image_pil", "image_pil": "x"},
            {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AA,AA"}},
            {"type": "image_embeds", "image_embeds": "AAAA"},
        ):
            reply = await http.post(PATH, json=chat(part))
            assert reply.status_code == 400, part
            error_of(reply)
        source = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
        for shown in (source, {"type": "file", "file_id": "f"}, {"type": "url"}, None, {}):
            content = [{"type": "image", "source": shown}]
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            reply = await http.post("/v1/messages", json=body)
            assert reply.status_code == 400, shown
            assert anthropic_error(reply)

    served(use, folder)


def test_a_client_that_leaves_ends_its_fetch(folder):
    ended = asyncio.Event()

    async def never():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    web = Web({"away.example": [PUBLIC]}, {"http://away.example/": never})

    async def use(http, engine):
        task = asyncio.create_task(http.post(PATH, json=chat(image("http://away.example/"))))
        while not web.asked:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.wait_for(ended.wait(), 60)

    served(use, folder, web=web, web_timeout_s=60.0)


def test_a_header_says_that_a_request_would_end_with_its_core(folder):
    async def use(http, engine):
        body = chat(image(data_url(ONE)))
        assert "x-not-resumable" not in (await http.post(PATH, json=body)).headers
        engine.front_end.client.survives = lambda handle: False
        for more in ({}, {"stream": True}):
            reply = await http.post(PATH, json={**body, **more})
            assert reply.headers["x-not-resumable"] == "media"
        assert "x-not-resumable" not in (await http.post(PATH, json=chat(text("w1")))).headers

    served(use, folder)


@pytest.mark.parametrize("host", ["a.example", "a.example.evil.example"])
def test_hosts_that_are_not_listed_are_not_asked(folder, host):
    web = Web({host: [PUBLIC]}, {f"http://{host}/": ok(ONE)})

    async def use(http, engine):
        reply = await http.post(PATH, json=chat(image(f"http://{host}/")))
        assert reply.status_code == (200 if host == "a.example" else 422)
        if host != "a.example":
            assert "only these hosts are allowed: a.example" in error_of(reply)

    served(use, folder, web=web, allowed_media_domains=["a.example"])
    assert bool(web.asked) == (host == "a.example")
