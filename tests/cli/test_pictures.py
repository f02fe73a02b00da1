"""Pictures that go along with questions in a terminal."""

import base64

import pytest

from quire.cli.answers import Piece
from quire.cli.chat import Talk, obey
from quire.cli.pictures import asked_with, picture_part
from quire.errors import InvalidParameter

PNG = b"\x89PNG\r\n\x1a\n" + bytes(9)


class Echo:
    def __init__(self):
        self.asked = []

    def chat(self, messages, sampling):
        self.asked.append(list(messages))
        yield Piece("fine", 1)


@pytest.fixture
def picture(tmp_path):
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    return file


def test_pictures_go_with_the_next_question_alone(picture, capsys):
    model = Echo()
    talk = Talk(model, {}, None)
    talk.add_picture(picture)
    obey(talk, f"/image {picture}")
    talk.ask("what is it?")
    talk.ask("and now?")
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    part = {"type": "image_url", "image_url": {"url": url}}
    first, _, last = model.asked[1]
    assert first["content"] == [part, part, {"type": "text", "text": "what is it?"}]
    assert last["content"] == "and now?"
    capsys.readouterr()
    obey(talk, "/history")
    shown = capsys.readouterr().out
    assert shown.startswith("[user] (a picture) (a picture) what is it?\n[assistant] fine\n")


@pytest.mark.parametrize(
    ("beginning", "kind"),
    [(b"\xff\xd8\xff", "jpeg"), (b"RIFF1234WEBP", "webp"), (b"GIF89a", "gif"), (b"BM", "bmp")],
)
def test_kinds_are_told_by_the_bytes(tmp_path, beginning, kind):
    file = tmp_path / "no_ending"
    file.write_bytes(beginning)
    part = picture_part(file)
    assert part["image_url"]["url"].startswith(f"data:image/{kind};base64,")


def test_other_files_are_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("RIFF1234WAVE")
    talk = Talk(Echo(), {}, None)
    with pytest.raises(InvalidParameter, match="is not a PNG, JPEG, WebP, GIF, BMP or TIFF file"):
        talk.add_picture(file)
    with pytest.raises(InvalidParameter, match="No such file"):
        talk.add_picture(tmp_path / "none.png")
    with pytest.raises(InvalidParameter, match="--image="):
        obey(talk, "/image")
    assert asked_with("plain", []) == "plain"
