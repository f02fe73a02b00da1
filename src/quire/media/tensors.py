"""Tensors that requests bring: a file of safetensors, of numpy (.npy) or of torch.save, in base64.

Nothing is unpickled: a pickle is read as data (models/loading/readers/pickle_scan.py), and the one
dense tensor that it may hold is taken from its record. Free of torch.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.errors import InvalidParameter, InvalidType, LoadError
from quire.media.base64_text import NotBase64, decode_base64
from quire.models.loading.readers.pickle_archive import check_archive, is_archive, read_record
from quire.models.loading.readers.pickle_scan import PickledTensor

Numbers: TypeAlias = npt.NDArray[Any]

MOST_BYTES = 1 << 30
"""Bytes of a tensor that a request may bring."""
_MOST_HEADER = 1 << 20
_MOST_PICKLE = 1 << 16
"""Most bytes of a pickle: one tensor's has some 200, as its archive's directory per record."""
_MOST_AXES = 8
_FORMS = "it must be base64 of a file of safetensors, numpy (.npy) or torch.save with one tensor"
_FLOATS = "float16, bfloat16 or float32"
_SAFETENSORS = {"F16": "<f2", "BF16": "<u2", "F32": "<f4"}
_WHOLE_SAFETENSORS = {"I32": "<i4", "I64": "<i8"}
_PICKLED = {"BFloat16": "<u2", "Half": "<f2", "Float": "<f4"}
_WHOLE_PICKLED = {"Int": "<i4", "Long": "<i8"}


def tensor_of_text(name: str, text: object, *, is_whole: bool = False) -> Numbers:
    """The tensor in a text, as float16 or float32 (which bfloat16 becomes), or where it `is_whole`
    int32 or int64. `name`: the field that errors name. Raises InvalidParameter, InvalidType.
    """
    if not isinstance(text, str | bytes):
        raise InvalidType(name, text, _FORMS)
    try:
        data = decode_base64(text)
    except NotBase64:
        raise _refusal(name, "this is not base64") from None
    return tensor_of_bytes(name, data, is_whole=is_whole)


def tensor_of_bytes(name: str, data: bytes, *, is_whole: bool = False) -> Numbers:
    """As `tensor_of_text`, of the bytes of the file."""
    if len(data) > MOST_BYTES:
        raise _refusal(name, f"this has {len(data)} bytes, more than {MOST_BYTES}")
    try:
        # safetensors last: the other two say what they are in their first bytes
        if data[:6] == b"\x93NUMPY":
            return _of_numpy(name, data, is_whole)
        if is_archive(io.BytesIO(data)):
            return _of_torch(name, data, is_whole)
        return _of_safetensors(name, data, is_whole)
    except LoadError as error:  # as the owner of a checkpoint is told; the first sentence says why
        raise _refusal(name, str(error).partition(". ")[0].rstrip(".")) from None
    except InvalidParameter:
        raise
    except Exception:  # of readers of files: BadZipFile, TokenError, MemoryError, OverflowError
        raise _refusal(name, "this is none of them, or a part of one") from None


def _of_numpy(name: str, data: bytes, is_whole: bool) -> Numbers:
    stream = io.BytesIO(data)
    version = np.lib.format.read_magic(stream)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise _refusal(name, f"this .npy file is of version {version[0]}.{version[1]}")
    shape, is_fortran, dtype = read(stream)
    allowed = ("i4", "i8") if is_whole else ("f2", "f4")
    # an array of objects is a pickle
    if dtype.hasobject or dtype.str[1:] not in allowed:
        raise _refusal(name, f"this has the type {str(dtype)[:40]}, not {_types(is_whole)}")
    found = _view(name, data[stream.tell() :], dtype, shape[::-1] if is_fortran else shape)
    native = found.astype(dtype.newbyteorder("="), copy=False)
    return np.ascontiguousarray(native.T if is_fortran else native)


def _of_torch(name: str, data: bytes, is_whole: bool) -> Numbers:
    stream = io.BytesIO(data)
    pickles = check_archive(Path("this"), stream, _MOST_PICKLE)
    [(folder, scanned)] = pickles.items() if len(pickles) == 1 else [("", None)]
    tensor = None if scanned is None else scanned.tensor
    if tensor is None:
        raise _refusal(name, "this file of torch.save has something else than one dense tensor")
    kind = tensor.storage.kind.rpartition(".")[2].removesuffix("Storage")
    types = _WHOLE_PICKLED if is_whole else _PICKLED
    if kind not in types:
        raise _refusal(name, f"this has the type {kind}, not {_types(is_whole)}")
    if (read_record(stream, f"{folder}byteorder") or b"little") != b"little":
        raise _refusal(name, "this was saved on a machine of another byte order")
    record = read_record(stream, f"{folder}data/{tensor.storage.key}")
    assert record is not None, "the archive was checked"
    values = np.frombuffer(record, types[kind])
    return _widened(_strided(name, values, tensor), types[kind])


def _strided(name: str, values: Numbers, tensor: PickledTensor) -> Numbers:
    """The tensor as an array of its own. Strides of 0 would make much of little."""
    shape, size = tensor.shape, values.itemsize
    _check_shape(name, shape)
    if math.prod(shape) > len(values):
        raise _refusal(name, "this is a tensor that repeats its values; save a contiguous one")
    strides = [stride * size for stride in tensor.strides]
    part = np.lib.stride_tricks.as_strided(values[tensor.offset :], shape, strides, writeable=False)
    return np.ascontiguousarray(part)


def _of_safetensors(name: str, data: bytes, is_whole: bool) -> Numbers:
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(_MOST_HEADER, len(data) - 8):
        raise _refusal(name, "this is none of them, or a part of one")
    header = json.loads(data[8 : 8 + size])
    entries = [entry for key, entry in header.items() if key != "__metadata__"]
    if len(entries) != 1:
        raise _refusal(name, f"this has {len(entries)} tensors")
    [entry] = entries
    types = _WHOLE_SAFETENSORS if is_whole else _SAFETENSORS
    if entry["dtype"] not in types:
        raise _refusal(name, f"this has the type {entry['dtype'][:40]}, not {_types(is_whole)}")
    body, (begin, end) = data[8 + size :], entry["data_offsets"]
    if (begin, end) != (0, len(body)):
        raise _refusal(name, "this has bytes that belong to no tensor")
    stored = types[entry["dtype"]]
    return _widened(_view(name, body, np.dtype(stored), tuple(entry["shape"])), stored)


def _view(name: str, data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Numbers:
    _check_shape(name, shape)
    if math.prod(shape) * dtype.itemsize != len(data):
        raise _refusal(name, f"this says that it has the shape {list(shape)}, and it has not")
    return np.frombuffer(data, dtype).reshape(shape)


def _check_shape(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) > _MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise _refusal(name, "this has a shape that no tensor has")


def _widened(values: Numbers, stored: str) -> Numbers:
    """Numbers of bfloat16, which numpy does not have, as float32."""
    if stored != "<u2":
        return values
    return (values.astype(np.uint32) << 16).view(np.float32)


def _types(is_whole: bool) -> str:
    return "int32 or int64" if is_whole else _FLOATS


def _refusal(name: str, why: str) -> InvalidParameter:
    return InvalidParameter(name, "<data>", f"{_FORMS}; {why}")


def is_tensor(given: Any) -> bool:
    """Whether it is one of torch, which is not imported for that."""
    is_of_torch = type(given).__module__.partition(".")[0] == "torch"
    return is_of_torch and hasattr(given, "is_floating_point")


def numbers_of(tensor: Any) -> Numbers:
    """The values of a dense tensor of torch; those of bfloat16, which numpy lacks, as float32."""
    on_host = tensor.detach().cpu()
    is_bfloat16 = str(on_host.dtype) == "torch.bfloat16"
    values: Numbers = (on_host.float() if is_bfloat16 else on_host).numpy()
    return values


def checked_rows(given: Any, name: str, *widths: int) -> Numbers:
    """A copy of embeddings as float16 or float32 [n, width], where width is one of `widths`.
    `name`: what errors call them. Raises InvalidType or InvalidParameter.
    """
    rows = _as_array(given, name)
    # a batch of one prompt
    if rows.ndim == 3 and len(rows) == 1:
        rows = rows[0]
    if rows.ndim != 2 or rows.shape[1] not in widths or not len(rows):
        wanted = " or ".join(map(str, widths))
        allowed = f"its shape must be [tokens, {wanted}], as wide as this model's embeddings"
        raise InvalidParameter(name, list(np.shape(rows)), allowed)
    if not np.isfinite(rows).all():
        raise InvalidParameter(name, "<tensor>", "it has numbers that are not finite (NaN or inf)")
    return rows


def _as_array(given: Any, name: str) -> Numbers:
    """An array, or a tensor without importing its library."""
    allowed = "it must be a dense tensor or an array of float16, bfloat16 or float32"
    if is_tensor(given):
        if str(given.layout) != "torch.strided":
            raise InvalidParameter(name, str(given.layout), allowed, "Call to_dense().")
        given = numbers_of(given)
    if not isinstance(given, np.ndarray):
        raise InvalidType(name, type(given).__name__, allowed)
    if given.dtype.newbyteorder("=") not in (np.float16, np.float32):
        raise InvalidParameter(name, str(given.dtype), allowed)
    # A copy: the caller may change its own while the request runs.
    return np.array(given, given.dtype.newbyteorder("="), order="C")
