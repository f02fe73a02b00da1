"""The metadata of packages inside a zip file that is an entry of sys.path, such as a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from zipfile import BadZipFile, ZipFile, is_zipfile

_MOST_BYTES = 1 << 20


def metadata_in(file: str) -> Iterator[tuple[str, str]]:
    """Names of the folders of metadata at the file's top, with the text of their entry_points.txt
    ("" without, or above a MiB). Nothing for a file that is not a zip file.
    """
    try:
        if not is_zipfile(file):
            return
        with ZipFile(file) as opened:
            names = opened.namelist()
            tops = dict.fromkeys(name.partition("/")[0] for name in names if "/" in name)
            sizes = {each.filename: each.file_size for each in opened.infolist()}
            found = [(top, _text(opened, sizes, f"{top}/entry_points.txt")) for top in tops]
    except (OSError, BadZipFile):
        return
    yield from found


def _text(opened: ZipFile, sizes: dict[str, int], name: str) -> str:
    if not 0 < sizes.get(name, 0) <= _MOST_BYTES:
        return ""
    try:
        return opened.read(name).decode()
    except (UnicodeDecodeError, NotImplementedError, RuntimeError):  # another packing, a password
        return ""
