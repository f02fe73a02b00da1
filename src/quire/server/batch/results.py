"""The output of a batch: one line for each result, which outlives the process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.encodable import to_json
from quire.errors import InvalidParameter
from quire.file_errors import naming
from quire.server.batch.lines import Line

_ID = re.compile(r"batch_req_(\d{1,18})_[0-9a-f]{16}")


class BatchResponse(msgspec.Struct, frozen=True):
    """Answer of the app; `body` is its JSON."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True):
    """Error of a line: the status as text, and a sentence."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    """One line of the output. `error` is None exactly for status 200."""

    id: str
    custom_id: str | None
    response: BatchResponse
    error: BatchError | None = None


class _Kept(msgspec.Struct):
    """The fields of a result in the file that are read."""

    id: str
    error: msgspec.Raw = msgspec.Raw(b"null")


class Results:
    """The results in a file that this process alone writes.

    Invariants: `num_failed` of the results are errors; every line of the file is whole, but for the
    last one while it is written.
    """

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._places: dict[int, tuple[int, int]] = {}  # line of the input -> offset, bytes
        self._ids: dict[int, str] = {}
        self._size = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._places)

    def holds(self, line: Line) -> bool:
        """Whether the line has its result. Raises InvalidParameter where another text's stands."""
        kept = self._ids.get(line.number)
        if kept is not None and kept != line.id:
            text = f"line {line.number} of the input has changed since its result was written"
            raise self._refused(text)
        return kept is not None

    def add(self, line: Line, result: BatchResult) -> None:
        """Write the line's result; it outlives this process."""
        data = to_json(result) + b"\n"
        with naming(self._file):
            self._stream.write(data)
            # to the system, where it survives this process; a line that the machine loses is made
            # again
            self._stream.flush()
        self._note(line.number, line.id, len(data), result.error is not None)

    def put_in_order(self) -> None:
        """The lines in the order of the input; the old file stands until the new one is whole."""
        places = [self._places[number] for number in sorted(self._places)]
        if places == sorted(places):
            return
        new = self._file.with_name(f".{self._file.name}.ordered")
        with naming(new), new.open("wb") as target, self._file.open("rb") as source:
            for offset, size in places:
                source.seek(offset)
                target.write(source.read(size))
            target.flush()
            # before the name moves: a crash must not leave an empty file in place of the results
            os.fsync(target.fileno())
        new.replace(self._file)

    def read(self) -> None:
        """Read earlier results, drop a cut last line. Raises InvalidParameter for anything else."""
        with self._file.open("rb") as stream:
            for data in stream:
                if not data.endswith(b"\n"):
                    break
                self._take(data)
        # an earlier run may have ended in the middle of a line
        self._stream.truncate(self._size)

    def _take(self, data: bytes) -> None:
        try:
            kept = msgspec.json.decode(data, type=_Kept)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            kept = _Kept("")
        match = _ID.fullmatch(kept.id)
        if match is None or int(match[1]) in self._places:
            raise self._refused(f"its line {len(self) + 1} is not a result of this command")
        self._note(int(match[1]), kept.id, len(data), bytes(kept.error) != b"null")

    def _note(self, number: int, id: str, size: int, is_error: bool) -> None:
        self._places[number] = (self._size, size)
        self._ids[number] = id
        self._size += size
        self.num_failed += is_error

    def _refused(self, text: str) -> InvalidParameter:
        hint = "Name another file, or start over with --overwrite."
        return InvalidParameter("--output-file", str(self._file), text, hint)


@contextlib.contextmanager
def open_results(file: Path, *, overwrite: bool) -> Iterator[Results]:
    """The results in `file`, which is created if it does not exist; emptied first with `overwrite`.

    Raises InvalidParameter for a file that cannot be written, that another run is writing, or whose
    lines are not results.
    """
    file = file.resolve()  # a link stays one when the file is put in order
    if file.exists() and not file.is_file():
        raise InvalidParameter("--output-file", str(file), "it must be a file")
    try:
        stream = file.open("ab")
    except OSError as error:
        raise InvalidParameter("--output-file", str(file), error.strerror or str(error)) from None
    try:
        try:
            # the lock ends with the process, whatever ends it
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidParameter("--output-file", str(file), "another run writes it") from None
        if overwrite:
            stream.truncate(0)
        results = Results(file, stream)
        results.read()
        yield results
    finally:
        with naming(file):  # what a full disk did not take is tried again
            stream.close()
