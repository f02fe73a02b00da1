"""What a front end keeps of media, for how long, and what a core gets again after its death."""

from concurrent.futures import Future

import numpy as np
import pytest

from quire.engine.client.kept_media import KeptMedia
from quire.engine.wire.messages import EngineCoreRequest
from quire.engine.wire.prompt_media import PromptMedia
from quire.processes.codec import MessageDecoder, MessageEncoder
from quire.step.media import MediaItem
from tests.engine.core.core_over_hashes import request as text_request

PIXELS = {"pixel_values": np.arange(300.0, dtype=np.float32)}


class Picture:
    def __init__(self, nbytes=10):
        self.nbytes = nbytes
        self.made = []

    def make_inputs(self):
        self.made.append(Future())
        return self.made[-1]


def request(handle, *digests, sources=None):
    items = [MediaItem(d, "image", 1, [(i, i + 1)], PIXELS) for i, d in enumerate(digests)]
    message = text_request(handle)
    message.media = PromptMedia(items, np.zeros((3, 6), np.int32), sources or {})
    return message


def test_the_journal_gets_a_request_without_pixels():
    kept = KeptMedia().keep(request(0, b"a"))
    (item,) = kept.media.items
    assert (item.digest, item.places, item.inputs) == (b"a", [(0, 1)], {})
    assert kept.media.positions.shape == (3, 6) and not kept.media.sources


def test_a_request_without_media_is_kept_as_it_is():
    plain = text_request(0)
    assert KeptMedia().keep(plain) is plain


def test_sources_are_shared_by_digest_and_go_with_the_last_request():
    media, picture = KeptMedia(), Picture(100)
    media.keep(request(0, b"a", b"a", sources={b"a": picture}))
    media.keep(request(1, b"a", sources={b"a": Picture(100)}))
    assert media.num_bytes == 100
    media.drop(0)
    assert media.num_bytes == 100 and list(media.digests) == [1]
    media.drop(1)
    media.drop(1)
    assert media.num_bytes == 0


def test_without_a_source_the_inputs_are_kept_and_counted():
    media = KeptMedia()
    kept = media.keep(request(0, b"a"))
    assert media.num_bytes == 1200
    remaking = media.remake(2, kept)
    assert remaking.is_ready and remaking.engine_index == 2
    assert remaking.message().media.items[0].inputs is PIXELS


def test_beyond_the_bound_a_request_is_not_kept_and_others_are():
    media = KeptMedia(150)
    media.keep(request(0, b"a", sources={b"a": Picture(100)}))
    media.keep(request(1, b"b", sources={b"b": Picture(100)}))
    media.keep(request(2, b"a", sources={b"a": Picture(100)}))
    assert list(media.digests) == [0, 2]
    assert media.num_bytes == 100


def test_a_share_says_what_the_owner_of_the_engine_keeps():
    share, owner = KeptMedia(1500), KeptMedia(3000)
    sent = [share.keep_elsewhere(request(n, digest)) for n, digest in enumerate([b"a", b"b", b"a"])]
    assert [message.media.is_kept for message in sent] == [True, False, True]
    assert sent[0].media.items[0].inputs is PIXELS and sent[0].media.positions.shape == (3, 6)
    encode, decode = MessageEncoder().encode, MessageDecoder(EngineCoreRequest).decode
    for message in sent:
        owner.keep(decode(encode(message)))
    assert list(owner.digests) == list(share.digests) == [0, 2]
    assert owner.num_bytes == share.num_bytes == 1200
    for handle in (0, 2):
        share.drop(handle)
    assert share.keep_elsewhere(request(3, b"b")).media.is_kept


def test_a_message_waits_for_all_its_pixels():
    media, pictures = KeptMedia(), {b"a": Picture(), b"b": Picture()}
    kept = media.keep(request(0, b"a", b"b", sources=pictures))
    remaking = media.remake(0, kept)
    pictures[b"b"].made[0].set_result({"b": 1})
    assert not remaking.is_ready
    pictures[b"a"].made[0].set_result({"a": 1})
    assert remaking.is_ready
    assert [item.inputs for item in remaking.message().media.items] == [{"a": 1}, {"b": 1}]


def test_what_a_source_raises_is_raised_by_the_message():
    media, picture = KeptMedia(), Picture()
    remaking = media.remake(0, media.keep(request(0, b"a", sources={b"a": picture})))
    picture.made[0].set_exception(ValueError("gone"))
    with pytest.raises(ValueError, match="gone"):
        remaking.message()


def test_media_travel_in_frames_of_their_own():
    message = request(0, b"a")
    frames = MessageEncoder().encode(message, is_strict=True)
    assert len(frames) == 2, "pixels; positions are small"
    got = MessageDecoder(EngineCoreRequest).decode(frames).media
    assert got.items[0].places == [(0, 1)] and got.positions.dtype == np.int32
    assert np.array_equal(got.items[0].inputs["pixel_values"], PIXELS["pixel_values"])
