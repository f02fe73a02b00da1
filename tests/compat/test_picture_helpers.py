"""vLLM's functions for pictures under its names."""

import base64
import io

import pytest
from PIL import Image

from quire.as_vllm import pictures
from quire.errors import RequestError
from tests.models.vision.spoken import picture


def test_a_picture_survives_its_url():
    given = picture(1)
    url = pictures.encode_image_url(given)
    assert url.startswith("data:image/png;base64,")
    found = pictures.fetch_image(url)
    assert found.mode == "RGB" and found.tobytes() == given.tobytes()
    assert pictures.encode_image_url(given, format="JPEG").startswith("data:image/jpeg;")


def test_transparency_is_on_a_background_or_kept():
    clear = Image.new("RGBA", (2, 2), (9, 9, 9, 0))
    url = pictures.encode_image_url(clear, image_mode=None)
    assert pictures.fetch_image(url).getpixel((0, 0)) == (255, 255, 255)
    red = pictures.fetch_image(url, {"rgba_background_color": [255, 0, 0]})
    assert red.getpixel((0, 0)) == (255, 0, 0)
    assert pictures.fetch_image(url, {"image_mode": None}).getpixel((0, 0)) == (9, 9, 9, 0)
    assert pictures.convert_image_mode(clear, "L").mode == "L"
    data = base64.b64decode(pictures.encode_image_base64(clear))
    assert Image.open(io.BytesIO(data)).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("url", ["http://127.0.0.1/a.png", "file:///etc/passwd", "data:,a"])
def test_what_no_request_may_name_is_refused(url):
    with pytest.raises(RequestError):
        pictures.fetch_image(url)
