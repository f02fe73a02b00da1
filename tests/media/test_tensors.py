"""Tensors in the files that requests may bring, and everything else refused in one sentence."""

import base64
import io
import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save

from quire.errors import InvalidParameter, InvalidType
from quire.media.tensors import tensor_of_bytes, tensor_of_text

ROWS = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7


def torch_file(value, **options):
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def numpy_file(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


GOOD = {
    "torch": lambda: torch_file(ROWS),
    "torch, a view": lambda: torch_file(ROWS.repeat(2, 2)[1:4, 2:6].contiguous()),
    "torch, strides": lambda: torch_file(ROWS.T.contiguous().T),
    "torch, a part": lambda: torch_file(torch.cat([ROWS, ROWS])[3:]),
    "torch, half": lambda: torch_file(ROWS.half()),
    "torch, bfloat16": lambda: torch_file(ROWS.bfloat16()),
    "numpy": lambda: numpy_file(ROWS.numpy()),
    "numpy, columns first": lambda: numpy_file(np.asfortranarray(ROWS.numpy())),
    "numpy, big": lambda: numpy_file(ROWS.numpy().astype(">f4")),
    "safetensors": lambda: save({"a": ROWS}),
    "safetensors, bfloat16": lambda: save({"a": ROWS.bfloat16()}, {"format": "pt"}),
}
RIGHT = {
    "torch, a view": ROWS.repeat(2, 2)[1:4, 2:6],
    "torch, half": ROWS.half(),
    "torch, bfloat16": ROWS.bfloat16().float(),
    "safetensors, bfloat16": ROWS.bfloat16().float(),
}


@pytest.mark.parametrize("name", GOOD)
def test_tensors_are_read(name):
    found = tensor_of_text("x", base64.b64encode(GOOD[name]()).decode())
    assert found.flags["C_CONTIGUOUS"] and found.dtype.isnative
    assert np.array_equal(found, RIGHT.get(name, ROWS).numpy())
    assert found.dtype == (np.float16 if name.endswith("half") else np.float32)


@pytest.mark.parametrize("write", [torch_file, lambda t: numpy_file(t.numpy()),
                                   lambda t: save({"a": t})])  # fmt: skip
def test_whole_numbers_are_read_where_they_are_wanted(write):
    grid = torch.tensor([[1, 4, 6]])
    assert tensor_of_bytes("x", write(grid), is_whole=True).tolist() == [[1, 4, 6]]
    with pytest.raises(InvalidParameter, match="float16, bfloat16 or float32"):
        tensor_of_bytes("x", write(grid))
    with pytest.raises(InvalidParameter, match="int32 or int64"):
        tensor_of_bytes("x", write(ROWS), is_whole=True)


class Bomb:
    """Asks to be called while it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


def safetensors_of(header, body=b"\0" * 48):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def lying_numpy(shape):
    """A header that promises more than follows."""
    stream = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue() + b"\0" * 48


def numpy_header(text):
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def repacked(data, change=lambda name, data: data, more=0):
    """An archive with changed records, of the name they have, and `more` empty ones."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(stream, "w") as new:
        for entry in old.infolist():
            new.writestr(entry.filename, change(entry.filename, old.read(entry)))
        for index in range(more):
            new.writestr(f"archive/data/{index + 100:030}", b"")
    return stream.getvalue()


def big_endian(name, data):
    return b"big" if name.endswith("byteorder") else data


def padded_pickle(name, data):
    """Instructions that take long to follow, and whose result is not used."""
    return data[:2] + b"N0" * 2**16 + data[2:] if name.endswith("data.pkl") else data


ENTRY = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}
REFUSED = {
    "code": (lambda: torch_file(Bomb()), "print while it is unpickled"),
    "a dict": (lambda: torch_file({"a": ROWS}), "something else than one dense tensor"),
    "sparse": (lambda: torch_file(ROWS.to_sparse()), "something else than one dense tensor"),
    "a number": (lambda: torch_file(5), "something else than one dense tensor"),
    "repeated": (lambda: torch_file(ROWS[:1].expand(2**40, 4)), "repeats its values"),
    "doubles": (lambda: torch_file(ROWS.double()), "the type Double, not float16"),
    "old torch": (
        lambda: torch_file(ROWS, _use_new_zipfile_serialization=False), "none of them"),
    "cut": (lambda: torch_file(ROWS)[:-30], "end is missing"),
    "another byte order": (lambda: repacked(torch_file(ROWS), big_endian), "another byte order"),
    "a shorter record": (
        lambda: repacked(torch_file(ROWS), lambda n, d: d[:8] if "data/" in n else d),
        "has 8 bytes, and the tensors in it need 48"),
    "objects": (lambda: numpy_file(np.array([{}]), allow_pickle=True), "the type object"),
    "double array": (lambda: numpy_file(ROWS.double().numpy()), "the type float64"),
    "lying array": (lambda: lying_numpy((2**40, 4)), "says that it has the shape"),
    "negative": (lambda: lying_numpy((-3, -4)), "shape that no tensor has"),
    "numpy 3": (lambda: b"\x93NUMPY\x03\x00" + b"\0" * 90, "version 3.0"),
    "two tensors": (lambda: save({"a": ROWS, "b": ROWS.clone()}), "has 2 tensors"),
    "offsets": (lambda: safetensors_of({"a": ENTRY | {"data_offsets": [8, 48]}}), "no tensor"),
    "lying shape": (lambda: safetensors_of({"a": ENTRY | {"shape": [2**40]}}), "has the shape"),
    "dtype": (lambda: safetensors_of({"a": ENTRY | {"dtype": "F64"}}), "the type F64"),
    "dtype list": (lambda: safetensors_of({"a": ENTRY | {"dtype": [1]}}), "none of them"),
    "text shape": (lambda: safetensors_of({"a": ENTRY | {"shape": "x"}}), "no tensor has"),
    "long header": (lambda: (2**40).to_bytes(8, "little") + b"{}", "none of them"),
    "deep": (lambda: safetensors_of(0, b"")[:8] + b"[" * 100_000, "none of them"),
    "empty": (lambda: b"", "none of them"),
    "a list of tensors": (lambda: safetensors_of([]), "none of them"),
    "wide shape": (lambda: safetensors_of({"a": ENTRY | {"shape": [0, 2**70], "data_offsets":
                                                         [0, 0]}}, b""), "none of them"),
    "nested header": (lambda: numpy_header(b"((" * 50), "none of them"),
    "indented header": (lambda: numpy_header(b"  x\n y"), "none of them"),
    "signs": (lambda: numpy_header(b"-" * 9000 + b"1"), "none of them"),
    "damaged record": (lambda: torch_file(ROWS).replace(b"little", b"litter"), "none of them"),
    "long pickle": (lambda: repacked(torch_file(ROWS), padded_pickle), "at most 65536"),
    "many records": (lambda: repacked(torch_file(ROWS), more=1000), "directory has"),
    "a picture": (lambda: b"\x89PNG\r\n\x1a\n" + b"\0" * 100, "none of them"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_one_sentence(name, capsys):
    make, text = REFUSED[name]
    with pytest.raises(InvalidParameter) as caught:
        tensor_of_bytes("prompt_embeds", make())
    message = str(caught.value)
    assert text in message and message.startswith("prompt_embeds='<data>' is not allowed: ")
    assert "\n" not in message and len(message) < 400
    assert capsys.readouterr().out == "", "nothing was unpickled"


def test_what_is_not_base64_is_refused():
    with pytest.raises(InvalidParameter, match="this is not base64"):
        tensor_of_text("x", "%%%")
    with pytest.raises(InvalidType, match="it must be base64"):
        tensor_of_text("x", {"tp_size": 1})
