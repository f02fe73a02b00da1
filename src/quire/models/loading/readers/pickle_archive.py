"""The archive that torch.save writes, checked before anything in it is unpickled. Free of torch.

torch finds records in its own way, so an archive in which two readers could see different things is
refused.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

from quire.errors import CorruptCheckpoint
from quire.models.loading.readers.pickle_scan import PickledStorage, ScannedPickle, scan_pickle

MOST_PICKLE_BYTES = 64 << 20
"""Bytes of the pickle in a file, which has the names and shapes."""
_PICKLE = "data.pkl"
_LONGEST_END = 98
"""Bytes after an archive's directory: its end, in numbers of 64 and of 32 bits."""


def is_archive(stream: IO[bytes]) -> bool:
    """Whether torch takes a file for an archive: one that only ends in an archive is none."""
    stream.seek(0)
    return stream.read(4) == b"PK\x03\x04"


def check_archive(file: Path, stream: IO[bytes], most_bytes: int) -> dict[str, ScannedPickle]:
    """The pickles of an archive, read as data, by the folders that they are in.

    Raises CorruptCheckpoint, which names `file`, for an archive that is compressed, or whose
    directory or pickles have more than `most_bytes`, either of which may take any amount of memory,
    or whose records do not hold the tensors.
    """
    _check_end(file, stream, most_bytes)
    with zipfile.ZipFile(stream) as archive:
        # filename may be another name, of which torch knows nothing; torch finds a.pkl as A.PKL
        records = {entry.orig_filename.lower(): entry for entry in archive.infolist()}
        if len(records) < len(archive.infolist()):
            raise CorruptCheckpoint(f"{file} has two records of one name.")
        for entry in records.values():
            _check_record(file, entry)
        _check_pickles(file, records, most_bytes)
        sizes = {name: entry.file_size for name, entry in records.items()}
        found = {}
        for name, entry in records.items():
            if name.rpartition("/")[2] == _PICKLE:
                pickle = io.BytesIO(archive.open(entry).read())
                folder = name.removesuffix(_PICKLE)
                found[folder] = scan_pickle(file, pickle, most_bytes)
                _check_storages(file, folder, found[folder].storages.values(), sizes)
        return found


def read_record(stream: IO[bytes], name: str) -> bytes | None:
    """The record of a checked archive with this name, in whatever case; None: it has none."""
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if entry.orig_filename.lower() == name.lower():
                return archive.open(entry).read()
    return None


def _check_end(file: Path, stream: IO[bytes], most_bytes: int) -> None:
    """Raise CorruptCheckpoint unless an archive ends as torch.save ends it: its directory, of at
    most `most_bytes`, and after that nothing but where the directory is. Readers of other archives
    may find several.
    """
    size = stream.seek(0, io.SEEK_END)
    stream.seek(max(0, size - _LONGEST_END))
    tail = stream.read()
    end, locator, wide = tail[-22:], tail[-42:-22], tail[-98:-42]
    if len(end) < 22 or end[:4] != b"PK\x05\x06":
        raise CorruptCheckpoint(
            f"{file} is an archive whose end is missing. It may be an incomplete download: "
            "fetch it again."
        )
    num_bytes, start = struct.unpack_from("<II", end, 12)
    begin = size - 22
    if locator[:4] == b"PK\x06\x07":  # with numbers of 64 bits
        begin = size - _LONGEST_END
        is_there = wide[:4] == b"PK\x06\x06" and struct.unpack_from("<Q", locator, 8)[0] == begin
        num_bytes, start = struct.unpack_from("<QQ", wide, 40) if is_there else (0, -1)
    if num_bytes + start != begin:
        raise CorruptCheckpoint(f"{file} is an archive with something behind its directory.")
    if num_bytes > most_bytes:
        raise CorruptCheckpoint(
            f"{file} is an archive whose directory has {num_bytes} bytes, and it may have at most "
            f"{most_bytes}."
        )


def _check_record(file: Path, entry: zipfile.ZipInfo) -> None:
    name = entry.orig_filename
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CorruptCheckpoint(f"{file}: {name} is compressed, which torch.save never does.")
    last = name.rpartition("/")[2]
    if last.lower() == _PICKLE != last:
        raise CorruptCheckpoint(f"{file}: {name} is not spelt {_PICKLE}.")


def _check_pickles(file: Path, records: Mapping[str, zipfile.ZipInfo], most_bytes: int) -> None:
    found = [entry for name, entry in records.items() if name.endswith(".pkl")]
    if (num_bytes := sum(entry.file_size for entry in found)) > most_bytes:
        raise CorruptCheckpoint(
            f"{file}: {found[0].orig_filename} and other pickles have {num_bytes} bytes, and those "
            f"of this file may have at most {most_bytes}."
        )


def _check_storages(
    file: Path, folder: str, storages: Iterable[PickledStorage], sizes: Mapping[str, int]
) -> None:
    """Raise CorruptCheckpoint unless each storage has a record of its size."""
    for storage in storages:
        record = f"{folder}data/{storage.key}"
        found = sizes.get(record.lower(), "no")
        if found != storage.num_bytes:
            raise CorruptCheckpoint(
                f"{file}: {record[:100]} has {found} bytes, and the tensors in it need "
                f"{storage.num_bytes}."
            )
