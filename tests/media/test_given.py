"""Pictures as programs and chats give them."""

import asyncio
import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from quire.errors import RequestError
from quire.media.chat_text import PicturesAsText
from quire.media.fetch.fetcher import MediaFetcher
from quire.media.fetch.settings import FetchSettings
from quire.media.given import given_pictures, picture_of_part
from quire.media.io_options import background_of
from quire.media.item_limits import MODALITIES, check_count, read_limits
from tests.media.pictures import encoded, noise, odd_pictures, picture

PIXELS = noise(4, 5)


def pixels_of(given):
    return [each.pixels for each in given]


def test_programs_give_pictures_in_many_forms():
    alone = given_pictures(Image.fromarray(PIXELS))
    np.testing.assert_array_equal(alone[0].pixels, PIXELS)
    batch = given_pictures(np.stack([PIXELS, PIXELS + 1]))
    assert [each.label for each in batch] == ["Image 0", "Image 1"]
    np.testing.assert_array_equal(batch[1].pixels, PIXELS + 1)
    mixed = given_pictures([PIXELS, b"bytes", None, torch.from_numpy(PIXELS)], [*"abcd"])
    assert mixed[1].data == b"bytes" and mixed[2].is_reference
    assert [each.uuid for each in mixed] == [*"abcd"]
    np.testing.assert_array_equal(mixed[3].pixels, PIXELS)
    rotated = Image.open(io.BytesIO(odd_pictures()["rotated by EXIF"]))
    assert given_pictures(rotated)[0].pixels.shape == (90, 40, 3)
    clear = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    assert given_pictures(clear)[0].pixels.tolist() == [[[255, 255, 255]]]


def test_pixels_of_bfloat16_are_taken():
    pixels = torch.from_numpy(PIXELS).to(torch.bfloat16)
    [given] = given_pictures(pixels)
    np.testing.assert_array_equal(given.pixels, pixels.float().numpy())


@pytest.mark.parametrize(
    ("data", "uuids", "words"),
    [
        ([PIXELS], ["a", "b"], "must have same length as .*: there are 2 and 1"),
        ([np.zeros((2, 2))], None, "an array of three axes"),
        (["picture.png"], None, "a picture is a PIL image"),
        ([PIXELS], [7], "a uuid is a string or None"),
    ],
)
def test_anything_but_a_picture_is_refused(data, uuids, words):
    with pytest.raises(RequestError, match=words):
        given_pictures(data, uuids)


SOURCE = {"type": "base64", "media_type": "image/png", "data": "QUJD"}


@pytest.mark.parametrize(
    ("part", "url"),
    [
        ({"type": "image_url", "image_url": {"url": "http://a/", "detail": "low"}}, "http://a/"),
        ({"type": "image_url", "image_url": "http://a/"}, "http://a/"),
        ({"image_url": "http://a/"}, "http://a/"),
        ({"type": "input_image", "image_url": "http://a/", "detail": "auto"}, "http://a/"),
        ({"type": "image", "source": SOURCE}, "data:image/png;base64,QUJD"),
        ({"type": "image", "source": {"type": "url", "url": "http://a/"}}, "http://a/"),
    ],
)
def test_parts_of_chats_are_pictures(part, url):
    found = picture_of_part(part, 5)
    assert found.url == url and found.label == "Image 5" and found.uuid is None
    assert picture_of_part({**part, "uuid": "x"}, 0).uuid == "x"


def test_parts_that_only_name_a_picture():
    part = {"type": "image_url", "image_url": None, "uuid": "x"}
    assert picture_of_part(part, 0).is_reference
    with pytest.raises(RequestError, match="Image 2 has neither a URL nor a uuid"):
        picture_of_part({"type": "image_url", "image_url": None}, 2)
    pil = {"type": "image_pil", "image_pil": Image.fromarray(PIXELS)}
    np.testing.assert_array_equal(picture_of_part(pil, 0).pixels, PIXELS)
    for part in ({"type": "text", "text": "a"}, {"type": "image"}, {"text": "image_url"}):
        assert picture_of_part(part, 0) is None


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "input_image", "file_id": "f"}, "file_id='f' is not allowed"),
        ({"type": "image_url", "image_url": 7}, "image_url=7"),
        ({"type": "image_url", "image_url": "http://a/", "uuid": 7}, "uuid=7"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "base64 or url"),
        ({"type": "image", "source": {**SOURCE, "media_type": "image/svg+xml"}}, "image/jpeg"),
    ],
)
def test_parts_that_are_refused(part, words):
    with pytest.raises(RequestError, match=words):
        picture_of_part(part, 0)


def test_anthropic_s_data_is_read_as_a_data_url():
    data = encoded(picture(2, 2))
    part = {"type": "image", "source": {**SOURCE, "data": base64.b64encode(data).decode()}}
    given = picture_of_part(part, 0)
    fetcher = MediaFetcher(FetchSettings())
    assert asyncio.run(fetcher.fetched([given], fetcher.budget())) == [data]


@pytest.mark.parametrize(
    ("parts", "interleaves", "text"),
    [
        ([None, "a"], False, "<s><i><e>\na"),
        (["a", None, "b", None], False, "<s><i><e>\n<s><i><e>\na\nb"),
        (["a", None, "b", None], True, "a\n<s><i><e>\nb\n<s><i><e>"),
        (["a <i> b", None], False, "a <i> b"),
        (["a <i>", None, None], False, "<s><i><e>\na <i>"),
        (["a", None, "<i>"], True, "a\n<i>"),
        (["a"], False, "a"),
    ],
)
def test_templates_for_text_get_placeholders(parts, interleaves, text):
    made = PicturesAsText("<i>", "<s><i><e>", interleaves)(parts)
    assert made == text


def test_more_placeholders_than_pictures_are_refused():
    with pytest.raises(RequestError, match="Found more '<i>' placeholders"):
        PicturesAsText("<i>", "<i>")(["<i> <i>", None])


def test_options_of_decoding_are_read_and_others_refused():
    assert background_of(None) == background_of({"video": {"fps": 1}}) == (255, 255, 255)
    assert background_of({"image": {"rgba_background_color": [1, 2, 3]}}) == (1, 2, 3)
    for options, words in (
        ({"image_mode": "L"}, "image_mode='L' is not allowed: pictures become RGB"),
        ({"rgba_background_color": [1, 2]}, "three whole numbers"),
        ({"rgba_background_color": [1, 2, 256]}, "three whole numbers"),
        ({"fast": True}, "'media_io_kwargs.image.fast' is not a parameter"),
    ):
        with pytest.raises(RequestError, match=words):
            background_of({"image": options})


def test_limits_are_read():
    assert read_limits(None) == dict.fromkeys(MODALITIES, 999)
    found = read_limits({"image": 4, "video": {"count": 1, "num_frames": 32}, "audio": {}})
    assert found == {"image": 4, "video": 1, "audio": 999, "vision_chunk": 999}
    assert set(read_limits({"image": 4}, is_text_only=True).values()) == {0}
    for limits, words in (
        ({"smell": 1}, "limit_mm_per_prompt='smell' is not allowed: the modalities are image"),
        ({"image": -1}, "limit_mm_per_prompt.image=-1"),
        ({"image": True}, "a whole number"),
        ({"image": {"count": 1, "length": 3}}, "image has count, width, height"),
        ({"image": {"width": "a"}}, "all numbers"),
    ):
        with pytest.raises(RequestError, match=words):
            read_limits(limits)


def test_ten_thousand_pictures_are_refused_by_their_number():
    with pytest.raises(RequestError, match=r"At most 4 image\(s\) may be provided in one prompt"):
        check_count(10_000, 4)
    check_count(4, 4)
    with pytest.raises(RequestError, match=r"At most 0 video\(s\)"):
        check_count(1, 0, "video")
