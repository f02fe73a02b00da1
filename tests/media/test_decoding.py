"""Pictures are decoded in a process of their own: what is hostile costs its own request."""

import asyncio
import os
import re
import signal
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from quire.errors import RequestError
from quire.media.decoding import rgb
from quire.media.decoding.decode_process import PictureWorker
from quire.media.decoding.decoder import DecodeLimits, PictureDecoder
from quire.media.decoding.rgb import as_rgb, from_array, opened, upright_size
from quire.media.faults import MediaFault
from quire.media.image_processors.table import read_processor
from tests.media.pictures import encoded, noise, odd_pictures, picture

QWEN = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16},
}
CLIP = {"image_processor_type": "CLIPImageProcessor", "size": 32, "crop_size": 32}
LIMITS = DecodeLimits(
    time_s=2.0, memory_bytes=2**28, max_pixels=2 * 10**6, max_values=10**6, num_processes=1
)


@pytest.fixture(scope="module")
def decoder():
    made = PictureDecoder(LIMITS)
    yield made
    made.close()


def processed(decoder, data, processor=QWEN, **options):
    return asyncio.run(decoder.processed(data, processor, **options))


def in_this_process(image, processor):
    made = read_processor(processor)
    return made.arrays(image, made.layout(image.height, image.width))


def test_arrays_are_those_of_the_processor(decoder):
    for name, data in odd_pictures().items():
        if name in ("1 x 3000", "3000 x 1"):
            continue
        found = processed(decoder, data)
        expected = in_this_process(as_rgb(opened(data, 10**7)), QWEN)
        assert found.arrays.keys() == expected.keys()
        for key, value in expected.items():
            assert found.arrays[key].dtype == value.dtype
            np.testing.assert_array_equal(found.arrays[key], value, err_msg=name)
        assert found.num_bytes == sum(value.nbytes for value in expected.values())


def test_arrays_are_taken_as_pictures(decoder):
    pixels = noise(40, 60)
    expected = in_this_process(Image.fromarray(pixels), CLIP)["pixel_values"]
    for given in (pixels, pixels.astype(np.int64), np.moveaxis(pixels, -1, 0), pixels / 255):
        found = processed(decoder, given, CLIP).arrays["pixel_values"]
        assert abs(found - expected).max() <= (0.03 if given.dtype.kind == "f" else 0)


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((2, 3, 4, 3), np.uint8), "has 4 axes"),
        (np.zeros((7, 8, 5), np.uint8), "no axis of 1, 3 or 4 channels"),
        (np.zeros((0, 8, 3), np.uint8), "has no pixels"),
        (np.full((4, 4, 3), 256, np.int32), "outside of 0 to 255"),
        (np.full((4, 4, 3), np.nan, np.float32), r"outside of \[0, 1\]"),
        (np.zeros((4, 4, 3), complex), "elements of type complex128"),
    ],
)
def test_arrays_that_are_not_pictures(array, words):
    with pytest.raises(MediaFault, match=words):
        from_array(array)


def test_a_pixel_is_not_mistaken_for_channels():
    """Shapes in which both ends could be the channels: the last axis is them."""
    assert from_array(np.zeros((3, 1, 3), np.uint8)).size == (1, 3)
    assert from_array(np.zeros((1, 1, 3), np.uint8)).size == (1, 1)
    assert from_array(np.zeros((4, 9), np.uint8)).size == (9, 4)


def header_only(width, height):
    """A PNG whose header promises a size."""

    def chunk(kind, data):
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) * 2


HOSTILE = {
    "nothing": (b"", "is not a picture"),
    "text": (b"hello" * 100, "is not a picture"),
    "a script": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is not a picture"),
    "a beginning": (encoded(picture(64, 64))[:40], "is cut off or damaged|is not a picture"),
    "cut off": (encoded(picture(300, 300))[:-9000], "is cut off or damaged"),
    "cut off JPEG": (encoded(picture(300, 300), "JPEG")[:-9000], "is cut off or damaged"),
    "a bomb": (header_only(60000, 60000), "has 60000 x 60000 pixels, and at most 2000000"),
    "a lying header": (header_only(1000, 1000), "is cut off or damaged"),
    "too long for the model": (encoded(picture(1, 3000)), "has 3000 x 1 pixels: it is more than"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_picture_gets_one_clear_error(decoder, kind):
    data, words = HOSTILE[kind]
    with pytest.raises(MediaFault, match=f"^Image 3 ({words})") as caught:
        processed(decoder, data, label="Image 3")
    text = str(caught.value)
    assert not re.search(r"0x[0-9a-f]{4}|BytesIO|Traceback|/", text), text
    assert caught.value.parameter == "image" and caught.value.http_status == 400


def test_damaged_bytes_never_end_the_process(decoder):
    """Bits flipped all over the formats: each is decoded, or refused in our own words."""
    rng = np.random.default_rng(0)
    worker, refused = PictureWorker(), 0
    processed(decoder, encoded(picture(8, 8)))
    before = decoder._lanes[0]._held.child.pid
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        whole = np.frombuffer(encoded(picture(24, 24), kind), np.uint8)
        for _ in range(12):
            damaged = whole.copy()
            places = rng.integers(0, len(damaged), 4)
            damaged[places] ^= rng.integers(1, 255, 4, dtype=np.uint8)
            try:
                processed(decoder, damaged.tobytes())
            except MediaFault as fault:
                assert "cannot be decoded (" not in str(fault) and "0x" not in str(fault)
                refused += 1
    assert refused > 10 and worker is not None
    assert decoder._lanes[0]._held.child.pid == before


def test_a_picture_that_would_become_too_much_is_refused_before_it_is_decoded(decoder):
    large = {**QWEN, "size": {"shortest_edge": 28 * 28, "longest_edge": 10**7}}
    with pytest.raises(MediaFault, match=r"would become \d+ numbers, and at most 1000000"):
        processed(decoder, encoded(picture(1000, 1000)), large)


def test_a_process_that_is_killed_costs_its_own_request(decoder):
    async def scene():
        await decoder.processed(encoded(picture(8, 8)), QWEN)
        child = decoder._lanes[0]._held.child
        os.kill(child.pid, signal.SIGSTOP)
        waiting = [
            asyncio.ensure_future(decoder.processed(encoded(picture(8, 8, seed)), QWEN))
            for seed in (1, 2)
        ]
        while decoder._lanes[0].num_waiting < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        os.kill(child.pid, signal.SIGKILL)
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = dict(zip((1, 2), asyncio.run(scene()), strict=True))
    # Pictures are prepared in threads, so that either may be the one that the process is given.
    [fault] = [one for one in results.values() if isinstance(one, MediaFault)]
    assert "makes the process fail to decode" in str(fault)
    [(seed, processed_one)] = [pair for pair in results.items() if pair[1] is not fault]
    expected = in_this_process(picture(8, 8, seed), QWEN)["pixel_values"]
    np.testing.assert_array_equal(processed_one.arrays["pixel_values"], expected)


def test_memory_is_limited_by_the_kernel():
    """A picture within the bound of pixels that needs more memory than there is."""
    limits = DecodeLimits(memory_bytes=2**25, max_pixels=10**9, num_processes=1)
    decoder = PictureDecoder(limits)
    try:
        data = encoded(Image.new("RGB", (6000, 6000)))
        with pytest.raises(MediaFault, match="memory|MiB"):
            processed(decoder, data, CLIP)
        assert processed(decoder, encoded(picture(8, 8)), CLIP).layout.tile == (32, 32)
    finally:
        decoder.close()


def test_an_unknown_processor_is_the_operator_s_fault(decoder):
    with pytest.raises(Exception, match="DonutImageProcessor is not implemented") as caught:
        processed(decoder, encoded(picture(8, 8)), {"image_processor_type": "DonutImageProcessor"})
    assert not isinstance(caught.value, MediaFault)


def test_sizes_are_known_before_pixels():
    for name, data in odd_pictures().items():
        image = opened(data, 10**7)
        upright = as_rgb(opened(data, 10**7))
        assert upright_size(image) == (upright.height, upright.width), name


def test_colours_are_those_of_the_picture():
    transparent = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert as_rgb(transparent).getpixel((0, 0)) == (255, 255, 255)
    assert as_rgb(transparent, (1, 2, 3)).getpixel((0, 0)) == (1, 2, 3)
    assert as_rgb(Image.new("RGB", (1, 1), (9, 8, 7))).getpixel((0, 0)) == (9, 8, 7)
    frames = opened(odd_pictures()["animated"], 10**7)
    assert as_rgb(frames).size == (64, 48)


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(rgb.importlib, "import_module", missing)
    with pytest.raises(RequestError, match=r"pip install 'quire\[media\]'"):
        rgb.load_pillow()
    monkeypatch.setattr(rgb.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"pip install 'quire\[media\]'"):
        processed(PictureDecoder(LIMITS), b"")
