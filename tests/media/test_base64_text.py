"""Base64 in pieces, beside the standard library's."""

import base64
import random

import pytest

from quire.media import base64_text
from quire.media.base64_text import NotBase64, decode_base64


@pytest.fixture(autouse=True)
def pieces_of_eight(monkeypatch):
    monkeypatch.setattr(base64_text, "_PIECE", 8)


def test_whatever_its_length_and_wherever_it_is_broken_it_is_what_was_encoded():
    draw = random.Random(0)
    for size in range(60):
        data = draw.randbytes(size)
        text = base64.b64encode(data).decode()
        assert decode_base64(text) == data == decode_base64(text.encode())
        broken = "".join(c + draw.choice(["", "", " ", "\r\n"]) for c in text)
        assert decode_base64(broken) == data


def test_it_takes_what_the_standard_library_takes_and_nothing_else():
    draw = random.Random(1)
    for _ in range(4000):
        text = "".join(
            draw.choices("AZaz+/=-é", [9, 9, 9, 9, 3, 3, 2, 0.2, 0.1], k=draw.choice(range(30)))
        )
        try:
            wanted = base64.b64decode(text, validate=True)
            if len(text) % 4:  # it overlooks padding after whole groups
                raise ValueError
        except ValueError:
            with pytest.raises(NotBase64):
                decode_base64(text)
        else:
            assert decode_base64(text) == wanted


def test_nothing_follows_the_padding_of_a_piece():
    for text in ("AAAAAAA=AAAA", "AAAAAA==AAAA", "AAAAAAA=" + "A" * 9, "AAAA=AAA"):
        with pytest.raises(NotBase64):
            decode_base64(text)
