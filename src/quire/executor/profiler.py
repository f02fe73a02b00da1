"""Traces of a worker's steps, in files for Perfetto and chrome://tracing."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from quire.config.profiler_config import ProfilerConfig
from quire.errors import ProfilerAlreadyActive
from quire.file_errors import naming
from quire.params import checks

logger = logging.getLogger(__name__)


class Profiler:
    """torch.profiler over steps, one trace at a time. The thread that runs the steps calls it."""

    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._file: Path | None = None
        self._trace: torch.profiler.profile | None = None
        self._num_steps = 0
        self._delay, self._most = config.delay_iterations, config.max_iterations
        self._failure: OSError | None = None
        """The reason why the trace that ended with a step was not written."""

    def start(
        self,
        prefix: str | None,
        rank: int,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begin a trace, after so many steps and of at most so many (None: as configured; at most
        0: until `stop`). Raises InvalidParameter, ProfilerAlreadyActive.
        """
        delay = _steps("delay_iterations", delay_iterations, self._config.delay_iterations)
        most = _steps("max_iterations", max_iterations, self._config.max_iterations)
        if self._file is not None:
            raise ProfilerAlreadyActive("A trace was started; call stop_profile() first.")
        folder = Path(self._config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        ending = "json.gz" if self._config.torch_profiler_use_gzip else "json"
        name = f"{prefix or 'quire'}_rank{rank}_{time.time_ns()}.pt.trace.{ending}"
        self._file, self._num_steps = folder / name, 0
        self._delay, self._most = delay, most
        if delay == 0:
            self._begin()

    def stop(self) -> Path | None:
        """End the trace and write it; returns its file, or None if no step was traced. Raises
        OSError if it could not be written.
        """
        file, self._file = self._file, None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        self._end(file)
        return file if file is not None and file.exists() else None

    @contextmanager
    def step(self, step_id: int, num_tokens: int) -> Iterator[None]:
        """Mark one step in the trace, which begins and ends between steps."""
        if self._file is None:
            yield
            return
        if self._num_steps == self._delay and self._trace is None:
            self._begin()
        with torch.profiler.record_function(f"step {step_id}: {num_tokens} tokens"):
            yield
        self._num_steps += 1
        if self._num_steps == self._delay + self._most:
            try:
                self._end(self._file)
            except OSError as error:  # which is not the fault of the step's requests
                logger.error("The trace was not written: %s", error)
                self._failure = error

    def _begin(self) -> None:
        config = self._config
        self._trace = torch.profiler.profile(
            activities=_activities(),
            record_shapes=config.torch_profiler_record_shapes,
            profile_memory=config.torch_profiler_with_memory,
            with_stack=config.torch_profiler_with_stack,
            with_flops=config.torch_profiler_with_flops,
        )
        self._trace.start()

    def _end(self, file: Path | None) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()
            assert file is not None, "a trace that was begun has a file"
            try:
                with naming(file):
                    trace.export_chrome_trace(str(file))
            except OSError:
                file.unlink(missing_ok=True)
                raise


def _steps(name: str, given: int | None, configured: int) -> int:
    if given is None:
        return configured
    return checks.integer(name, given, 0, checks.MAX_INT, "it must be a number of steps")


def _activities() -> list[torch.profiler.ProfilerActivity]:
    """The CPU's, and the GPU's kernels where there is one."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return activities
