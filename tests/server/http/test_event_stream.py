"""Silence on a stream of events."""

import asyncio

import pytest

from quire.server.http.event_stream import EventStream, event

pytestmark = pytest.mark.anyio


async def pieces_of(stream_options, num_silent):
    """What goes out when an event waits for so many pieces that were sent into the silence."""
    sent, is_heard, ended = [], asyncio.Event(), []

    async def events():
        yield event(b'{"n": 1}')
        if num_silent:
            await is_heard.wait()
        yield event(b'{"n": 2}')

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append(message["body"])
            if len(sent) > num_silent:
                is_heard.set()

    async def receive():
        await asyncio.Event().wait()

    async def on_end():
        ended.append(True)

    await EventStream(events(), on_end=on_end, **stream_options)({}, receive, send)
    assert ended == [True]
    return sent


async def test_silence_is_filled_with_pieces_that_are_nothing_even_to_clients_that_strip_them():
    """vLLM's load generator strips each piece and joins what is left: a comment would swallow the
    event behind it."""
    sent = await asyncio.wait_for(pieces_of({"keep_alive_s": 0.01}, num_silent=2), 60)
    assert len(sent) >= 5
    assert [piece.strip() for piece in sent if piece.strip()] == [
        b'data: {"n": 1}',
        b'data: {"n": 2}',
    ]
    # what splits at empty lines finds whole events
    found = [part for part in b"".join(sent).split(b"\n\n") if part]
    assert found == [b'data: {"n": 1}', b'data: {"n": 2}']


async def test_nothing_is_sent_into_silence_where_that_is_switched_off():
    sent = await asyncio.wait_for(pieces_of({"keep_alive_s": 0.0}, num_silent=0), 60)
    assert sent == [event(b'{"n": 1}'), event(b'{"n": 2}'), b""]
