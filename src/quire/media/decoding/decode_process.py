"""The process in which pictures are decoded and processed, one after the other and within limits.
decoder.py is the other end. It opens no file and no connection of its own.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import sys

import msgspec
import numpy as np

from quire.encodable import to_json, to_msgpack
from quire.errors import EngineError
from quire.media.decoding.rgb import as_rgb, from_array, load_pillow, opened, upright_size
from quire.media.decoding.tasks import ArrayHeader, PictureAnswer, PictureTask
from quire.media.faults import MediaFault
from quire.media.image_processors.processor import Arrays, ImageProcessor, PictureLayout
from quire.media.image_processors.table import read_processor
from quire.processes.child_main import ChildProgram
from quire.processes.task_main import TaskStart, lower_priority, serve_tasks

_decoder = msgspec.msgpack.Decoder(PictureTask)
_MOST_KEPT = 16
_MOST_FILES = 64
_PR_SET_NO_NEW_PRIVS = 38


class DecodeStart(TaskStart, kw_only=True):
    """The limits of the process."""


class PictureWorker:
    """Does tasks; keeps the processors that it has read."""

    def __init__(self) -> None:
        self._processors: dict[bytes, ImageProcessor] = {}

    def answer(self, data: bytes | bytearray, fds: list[int]) -> bytes:
        """Do a task of MessagePack, whose picture is in `fds[0]`; the arrays go to `fds[1]`."""
        try:
            return to_msgpack(self._answer(_decoder.decode(data), *fds))
        except MediaFault as fault:
            return to_msgpack(PictureAnswer(words=fault.words))
        except EngineError as error:
            return to_msgpack(PictureAnswer(error=str(error)))
        except MemoryError:
            return to_msgpack(PictureAnswer(words="takes too much memory to decode"))
        except Exception as error:  # texts of libraries may show addresses
            return to_msgpack(PictureAnswer(words=f"cannot be decoded ({type(error).__name__})"))

    def _answer(self, task: PictureTask, source: int, target: int) -> PictureAnswer:
        processor = self._processor(task)
        layout, arrays = _processed(processor, task, os.pread(source, task.num_bytes, 0))
        headers, place = [], 0
        for name, array in arrays.items():
            headers.append(ArrayHeader(name, array.dtype.str, list(array.shape)))
            place = _write(target, np.ascontiguousarray(array), place)
        return PictureAnswer(layout, headers)

    def _processor(self, task: PictureTask) -> ImageProcessor:
        key = to_json(task.processor)
        if key not in self._processors:
            # requests may change settings, so that there is any number of them
            if len(self._processors) >= _MOST_KEPT:
                self._processors.clear()
            self._processors[key] = read_processor(task.processor)
        return self._processors[key]


def _processed(
    processor: ImageProcessor, task: PictureTask, data: bytes
) -> tuple[PictureLayout, Arrays]:
    if task.raw is not None:
        pixels = np.frombuffer(data, task.raw.dtype).reshape(task.raw.shape)
        image = from_array(pixels)
        size = image.height, image.width
        _check_pixels(size, task.max_pixels)
    else:
        image = opened(data, task.max_pixels)
        size = upright_size(image)
    layout = processor.layout(*size)
    # by the header alone, before a pixel is decoded
    if layout.num_values > task.max_values:
        raise MediaFault(
            f"has {size[1]} x {size[0]} pixels and would become {layout.num_values} numbers, and "
            f"at most {task.max_values} are made of one"
        )
    image = as_rgb(image, task.background)
    # a PNG whose EXIF came after its pixels is turned only now
    if (image.height, image.width) != size:
        layout = processor.layout(image.height, image.width)
    return layout, processor.arrays(image, layout)


def _check_pixels(size: tuple[int, int], most: int) -> None:
    if size[0] * size[1] > most:
        raise MediaFault(f"has {size[1]} x {size[0]} pixels, and at most {most} are processed")


def _write(target: int, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]], at: int) -> int:
    """Write an array to a file; where the next one begins."""
    view = array.reshape(-1).view(np.uint8).data
    done = 0
    while done < len(view):
        done += os.pwrite(target, view[done:], at + done)
    return at + done


def _confine(most_bytes: int) -> None:
    """Take from this process what it does not need."""
    # memory files count as files: without this the arrays could exceed the limit of memory
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_MOST_FILES, _MOST_FILES))
    if sys.platform == "linux":
        # code that a hostile picture has run gains nothing from programs with other rights
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _run(start: DecodeStart, pipe: socket.socket) -> int:
    """Do tasks until the pipe is closed; the exit code."""
    lower_priority()
    worker = PictureWorker()
    load_pillow()
    _confine(start.memory_bytes)
    return serve_tasks(pipe, start, worker.answer)


PROGRAM = ChildProgram(DecodeStart, lambda start: "MediaProcess", _run)
