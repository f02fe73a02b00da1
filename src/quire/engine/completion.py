"""Drives an engine until the requests that somebody waits for are finished."""

from __future__ import annotations

from collections.abc import Collection

from quire.engine.interrupt import DeferredInterrupt
from quire.engine.llm_engine import LLMEngine
from quire.engine.progress import Progress
from quire.errors import EngineDeadError, EngineError
from quire.outputs import RequestOutput


def complete(
    engine: LLMEngine,
    wanted: Collection[str],
    finished: dict[str, RequestOutput],
    progress: Progress,
) -> None:
    """Step until every request id in `wanted` is among `finished`, which takes the final outputs of
    all requests.

    Ctrl-C and any failure of the engine end all its requests, so that the engine is as new
    afterwards. Raises EngineError when the engine is asleep, because then the wait would have no
    end.
    """
    missing = set(wanted) - finished.keys()
    if missing:
        _require_awake(engine, len(missing))
    try:
        with DeferredInterrupt() as interrupt:
            while missing:
                outputs = engine.step()
                _require_outputs(engine, outputs, len(missing))
                for output in filter(lambda output: output.finished, outputs):
                    finished[output.request_id] = output
                    if output.request_id in missing:
                        missing.remove(output.request_id)
                        progress.note(output)
                interrupt.check()
    except EngineDeadError:
        raise
    except BaseException:
        engine.discard_all()
        raise


def _require_awake(engine: LLMEngine, num_missing: int) -> None:
    if engine.is_sleeping():
        raise EngineError(
            f"{num_missing} requests wait, but the engine is asleep. "
            f'Call wake_up(tags=["scheduling"]) first.'
        )


def _require_outputs(engine: LLMEngine, outputs: list[RequestOutput], num_missing: int) -> None:
    if not outputs and not engine.has_unfinished_requests():
        raise EngineError(
            f"{num_missing} requests have ended, but not in this call: "
            f"somebody else stepped the engine."
        )
