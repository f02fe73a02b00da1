"""Pictures to the inputs of an encoder, in one or two processes that may be ended at any time."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from quire.encodable import to_msgpack
from quire.errors import EngineError
from quire.media.decoding.decode_process import DecodeStart
from quire.media.decoding.rgb import MAX_PIXELS, check_pillow
from quire.media.decoding.tasks import PictureAnswer, PictureTask, RawPixels
from quire.media.faults import MediaFault
from quire.media.image_processors.processor import Arrays, PictureLayout
from quire.processes.task_lane import TaskEnded, TaskLane

_MODULE = "quire.media.decoding.decode_process"
_WHITE = (255, 255, 255)


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """Limits of a picture: CPU time and memory of its process, pixels by its header, numbers that
    it may become. `num_processes` work at once.
    """

    time_s: float = 20.0
    memory_bytes: int = 2 * 2**30
    max_pixels: int = MAX_PIXELS
    max_values: int = 2**26
    num_processes: int = 2


@dataclass(frozen=True, slots=True)
class ProcessedPicture:
    """The inputs of an encoder by the names that transformers has for them, in no batch."""

    layout: PictureLayout
    arrays: Arrays

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class PictureDecoder:
    """Decodes and processes pictures. Its processes start when they are first needed."""

    def __init__(self, limits: DecodeLimits | None = None) -> None:
        self.limits = limits or DecodeLimits()
        start = DecodeStart(time_s=self.limits.time_s, memory_bytes=self.limits.memory_bytes)
        self._lanes = [
            TaskLane(_MODULE, start, "decodes pictures") for _ in range(self.limits.num_processes)
        ]

    async def processed(
        self,
        picture: bytes | npt.NDArray[Any],
        processor: Mapping[str, Any],
        *,
        label: str = "The picture",
        background: tuple[int, int, int] = _WHITE,
    ) -> ProcessedPicture:
        """The inputs of one picture, given encoded or as an array of pixels; `processor` is the
        JSON of its processor, `label` names it in errors.

        Raises MediaFault for a picture that cannot be used or takes more than the limits,
        CapacityError when too many others wait.
        """
        check_pillow()
        raw = None
        if isinstance(picture, np.ndarray):
            # its bytes are addresses, which mean nothing to another process
            if picture.dtype.hasobject:
                raise MediaFault("has elements that are not numbers", label=label)
            raw = RawPixels(list(picture.shape), picture.dtype.str)
            view = np.ascontiguousarray(picture).reshape(-1).view(np.uint8).data
        else:
            view = memoryview(picture)
        limits = self.limits
        task = PictureTask(
            num_bytes=view.nbytes,
            processor=dict(processor),
            background=background,
            max_pixels=limits.max_pixels,
            max_values=limits.max_values,
            raw=raw,
        )
        # files and not the pipe: pixels are megabytes, and the pipe's messages small
        source, target = _MemoryFile(), _MemoryFile()
        # a picture may be a quarter of a gigabyte, whose copy would hold up the loop
        await asyncio.to_thread(source.write, view)
        lane = min(self._lanes, key=lambda lane: lane.num_waiting)
        try:
            data = await lane.answer(to_msgpack(task), (source.fd, target.fd))
        except TaskEnded as ended:
            raise MediaFault(f"{ended.reason} to decode", label=label) from None
        answer = msgspec.msgpack.decode(data, type=PictureAnswer)
        if answer.words is not None:
            raise MediaFault(answer.words, label=label)
        if answer.error is not None or answer.layout is None:
            raise EngineError(answer.error or "Pictures cannot be decoded.")
        arrays = await asyncio.to_thread(_arrays, target, answer)
        return ProcessedPicture(answer.layout, arrays)

    def close(self) -> None:
        for lane in self._lanes:
            lane.end()


class _MemoryFile:
    """A file without a name, in memory where the system has such. It is closed with the last
    reference: a thread may still use it when the request that waits for it has been cancelled.
    """

    def __init__(self) -> None:
        if sys.platform == "linux":
            self.fd = os.memfd_create("quire-media", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as file:
                self.fd = os.dup(file.fileno())

    def __del__(self) -> None:
        os.close(self.fd)

    def write(self, view: memoryview) -> None:
        """Write all of it to the beginning."""
        done = 0
        while done < len(view):
            done += os.pwrite(self.fd, view[done:], done)


def _arrays(file: _MemoryFile, answer: PictureAnswer) -> Arrays:
    """The arrays in the file. They are copied out: the process that wrote them may still hold it,
    and it has read a stranger's bytes.
    """
    arrays: Arrays = {}
    place = 0
    for header in answer.arrays:
        array = np.empty(header.shape, np.dtype(header.dtype))
        view, done = array.reshape(-1).view(np.uint8).data, 0
        while done < array.nbytes:
            num = os.preadv(file.fd, [view[done:]], place + done)
            if not num:
                raise EngineError("The process that decodes pictures gave less than it said.")
            done += num
        arrays[header.name] = array
        place += array.nbytes
    return arrays
