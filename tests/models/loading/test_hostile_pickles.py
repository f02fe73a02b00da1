"""Pickles that lie about their tensors, or hide from the scan that reads them before torch does."""

import io
import struct
import zipfile
import zlib
from collections import OrderedDict

import pytest
import torch

from quire.errors import CorruptCheckpoint
from quire.models.loading.readers.pickled_files import read_pickle

HUGE = 8 << 30


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def number(value):
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)


def numbers(*values):
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(count, key="0", kind="Byte", view=b""):
    """The pickle of a storage of so many values."""
    name = b"ctorch\n" + kind.encode() + b"Storage\n"
    return b"(" + text("storage") + name + text(key) + text("cpu") + number(count) + view + b"tQ"


def tensor(of, shape=(4,), strides=(1,), offset=0, function="_v2", more=b"\x89N"):
    """The pickle of a tensor in a storage."""
    name = b"ctorch._utils\n_rebuild_tensor" + function.encode() + b"\n"
    place = number(offset) + numbers(*shape) + numbers(*strides)
    return name + b"(" + of + place + more + b"tR"


def pickled(*values):
    """The pickle of a dict with these values."""
    items = b"".join(text(f"name{i}") + value for i, value in enumerate(values))
    return b"\x80\x02}(" + items + b"u."


def old_file(path, *values, keys=("0",), data=b"\x04" + bytes(7) + b"abcd"):
    """The form from before torch 1.6, with one storage of four bytes."""
    whole = io.BytesIO()
    torch.save({}, whole, _use_new_zipfile_serialization=False)
    first = whole.getvalue()[: -len(b"\x80\x02}q\x00.\x80\x02]q\x00.")]
    assert whole.getvalue()[len(first) :] == b"\x80\x02}q\x00.\x80\x02]q\x00."
    listed = b"\x80\x02](" + b"".join(map(text, keys)) + b"e."
    path.write_bytes(first + pickled(*values) + listed + data)
    return path


def archive(path, *values, pickle="data.pkl", extra=b""):
    """The form since torch 1.6, with one record of four bytes."""
    with zipfile.ZipFile(path, "w") as made:
        entry = zipfile.ZipInfo(f"archive/{pickle}")
        entry.extra = extra
        made.writestr(entry, pickled(*values))
        made.writestr("archive/data/0", b"abcd")
        made.writestr("archive/version", b"3\n")
    return path


FORMS = {"old": old_file, "zip": archive}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_mapped", [True, False])
def test_honest_files_of_this_kind_are_read(tmp_path, form, is_mapped):
    four = storage(4, view=b"N" if form == "old" else b"")
    views = [
        tensor(four),
        tensor(four, (2, 2), (1, 2)),
        tensor(four, (3,), (1,), offset=1),
        tensor(four, (0, 9), (9, 1)),
        tensor(four, function="", more=b""),
        tensor(four, (1,), function="_v3", more=b"\x89Nctorch\nfloat32\n"),
    ]
    found = list(read_pickle(FORMS[form](tmp_path / "a", *views), is_mapped=is_mapped).values())
    assert [t.tolist() for t in found[:3]] == [
        [97, 98, 99, 100],
        [[97, 99], [98, 100]],
        [98, 99, 100],
    ]
    assert [tuple(t.shape) for t in found[3:]] == [(0, 9), (4,), (1,)]


def test_what_torch_saves_is_read(tmp_path):
    class Layers(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = torch.nn.Linear(3, 5)
            self.two = torch.nn.Linear(3, 5, dtype=torch.bfloat16)
            self.two.weight = self.two.weight
            self.register_buffer("shared", torch.arange(12).view(3, 4).T)
            self.register_buffer("part", self.shared[1:, 2:])
            self.register_buffer("alike", torch.ones(1).expand(7, 3))
            self.register_buffer("none", torch.empty(0, 4))
            self.register_buffer("one_number", torch.tensor(True))
            self.register_buffer("float8", torch.ones(4).to(torch.float8_e4m3fn))

    state = Layers().state_dict()
    assert isinstance(state, OrderedDict) and hasattr(state, "_metadata")
    forms = [
        state,
        {name: torch.nn.Parameter(t, t.is_floating_point()) for name, t in state.items()},
    ]
    for content in forms:
        for is_zip in (True, False):
            if not is_zip:
                content.pop("float8")
            torch.save(content, tmp_path / "a", _use_new_zipfile_serialization=is_zip)
            found = read_pickle(tmp_path / "a")
            assert all(torch.equal(found[n].float(), t.float()) for n, t in content.items())
            assert found.keys() == content.keys()


LIES = {
    "one storage in two sizes": [tensor(storage(HUGE)), tensor(storage(4))],
    "one storage of two types": [tensor(storage(4)), tensor(storage(1, kind="Float"))],
    "a tensor that is too long": [tensor(storage(4), (HUGE,))],
    "strides that are too long": [tensor(storage(4), (2, 2), (HUGE, 1))],
    "an offset that is too large": [tensor(storage(4), offset=1)],
    "negative strides": [tensor(storage(4), (4,), (-1,), offset=3)],
    "fewer strides": [tensor(storage(4), (2, 2), (1,))],
    "larger values": [tensor(storage(1, kind="Float"), (2,))],
    "values of a larger type": [
        tensor(storage(4), (2,), function="_v3", more=b"\x89Nctorch\nfloat32\n")
    ],
    "no type": [tensor(storage(4), (1,), function="_v3")],
    "a list of arguments": [
        b"ctorch._utils\n_rebuild_tensor\n]("
        + storage(4)
        + number(0)
        + numbers(HUGE)
        + numbers(1)
        + b"eR"
    ],
    "another storage afterwards": [
        tensor(storage(4)) + b"(" + storage(4) + number(0) + numbers(HUGE) + numbers(1) + b"tb"
    ],
    "a storage that is made": [b"ctorch.storage\nUntypedStorage\n" + number(HUGE) + b"\x85R"],
    "a storage that is new": [b"ctorch.storage\nUntypedStorage\n" + number(HUGE) + b"\x85\x81"],
    "a part of a storage": [
        tensor(storage(4, view=b"(" + text("1") + number(0) + number(4) + b"t"))
    ],
    "tuples that take all of the stack to hash": [b")" + b"\x85" * 1_000_000 + b"N"],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lie", LIES)
def test_what_is_not_within_the_file_is_refused_before_torch_reads_it(
    tmp_path, monkeypatch, form, lie
):
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CorruptCheckpoint, match="is not a valid file of torch.save") as caught:
        read_pickle(FORMS[form](tmp_path / "a", *LIES[lie]))
    assert "NoneType" not in str(caught.value)


@pytest.mark.parametrize("keys", [(), ("0", "0"), ("1",), ("0", "1")])
def test_storages_that_an_old_file_does_not_fill_are_refused(tmp_path, monkeypatch, keys):
    """Their values would be what happens to be in memory."""
    monkeypatch.setattr(torch, "load", None)
    path = old_file(tmp_path / "a", tensor(storage(4)), keys=keys)
    with pytest.raises(CorruptCheckpoint, match="does not list the storages of its tensors"):
        read_pickle(path)


def renamed(name):
    """The extra field that gives an entry another name, which torch does not read."""
    field = struct.pack("<BL", 1, zlib.crc32(b"archive/data.pkl")) + name
    return struct.pack("<HH", 0x7075, len(field)) + field


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"pickle": "DATA.PKL"}, "archive/DATA.PKL is not spelt data.pkl"),
        ({"pickle": "dAta.pkl"}, "archive/dAta.pkl is not spelt data.pkl"),
        ({"extra": renamed(b"archive/readme")}, "a tensor is not within its storage"),
    ],
)
def test_no_pickle_of_an_archive_hides_from_the_scan(tmp_path, monkeypatch, keys, says):
    monkeypatch.setattr(torch, "load", None)
    path = archive(tmp_path / "a", tensor(storage(4), (HUGE,)), **keys)
    with pytest.raises(CorruptCheckpoint, match=says):
        read_pickle(path)


def test_records_that_differ_in_case_are_one(tmp_path):
    path = archive(tmp_path / "a", tensor(storage(4)))
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("ARCHIVE/data/0", b"abcd")
    with pytest.raises(CorruptCheckpoint, match="two records of one name"):
        read_pickle(path)


def test_an_archive_has_one_directory(tmp_path):
    """torch goes to where the end says, others to what stands before the end."""
    honest = archive(tmp_path / "a", tensor(storage(4))).read_bytes()
    lying = archive(tmp_path / "b", tensor(storage(4), (HUGE,))).read_bytes()
    assert len(honest) < len(lying)
    (tmp_path / "c").write_bytes(lying[:-22] + honest[:-22] + lying[-22:])
    for path, data in (
        ("c", lying[:-22] + honest[:-22] + lying[-22:]),
        ("d", b"PK\x03\x04" + honest),
        ("e", honest[:-22] + b"more" + honest[-22:]),
    ):
        (tmp_path / path).write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="something behind its directory"):
            read_pickle(tmp_path / path)
    (tmp_path / "f").write_bytes(honest[:-2] + b"\x01\x00 ")
    with pytest.raises(CorruptCheckpoint, match="whose end is missing"):
        read_pickle(tmp_path / "f")


def test_so_has_one_with_numbers_of_64_bits(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    assert data[-42:-38] == b"PK\x06\x07" and read_pickle(tmp_path / "a")
    other = data[:-42] + data[-98:-42] + data[-42:]
    (tmp_path / "a").write_bytes(other)
    with pytest.raises(CorruptCheckpoint, match="something behind its directory"):
        read_pickle(tmp_path / "a")


@pytest.mark.parametrize("is_mapped", [True, False])
def test_an_old_file_that_ends_in_an_archive_is_scanned_as_old(tmp_path, monkeypatch, is_mapped):
    path = old_file(tmp_path / "a", tensor(storage(4), (HUGE,)))
    archive(tmp_path / "b", tensor(storage(4)))
    path.write_bytes(path.read_bytes() + (tmp_path / "b").read_bytes())
    assert zipfile.is_zipfile(path)
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CorruptCheckpoint, match="a tensor is not within its storage"):
        read_pickle(path, is_mapped=is_mapped)


def test_a_dict_with_attributes_is_read_as_a_dict(tmp_path):
    value = b"ccollections\nOrderedDict\n)R(" + text("name") + tensor(storage(4)) + b"u}("
    value += text("items") + text("none") + b"ub."
    path = archive(tmp_path / "a")
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", b"\x80\x02" + value)
        made.writestr("archive/data/0", b"abcd")
        made.writestr("archive/version", b"3\n")
    assert read_pickle(path)["name"].tolist() == [97, 98, 99, 100]
