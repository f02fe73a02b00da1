"""The end of a step on a rank, whoever has sent it."""

from __future__ import annotations

import logging

import msgspec

from quire.distributed.mesh import MeshPlace
from quire.errors import EngineDeadError
from quire.executor.ranks.messages import RankAnswer
from quire.runner.runner import NoTokens, Step
from quire.step.plan import StepPlan

logger = logging.getLogger(__name__)


def only_changes(plan: StepPlan) -> StepPlan:
    """A plan without its tokens: its changes of rows count on all ranks, whatever became of it."""
    return msgspec.structs.replace(plan, decode_rows=[], decode_drafts=None, chunks=[])


def read_step(
    step: Step | NoTokens, serial: int, place: MeshPlace, *, moves_rows: bool, waited_s: float = 0.0
) -> RankAnswer | None:
    """Wait for the results of a step that has advanced the rows; the answer of the rank that
    samples, None on others. What goes wrong now fails no more than this reading. `waited_s`: see
    `RankAnswer`.
    """
    try:
        output = step.result()
    except EngineDeadError:
        raise
    except Exception:
        logger.exception("failed to read the results of a step")
        try:
            output = step.result()
        except Exception as error:
            if place.samples:
                why = f"{type(error).__name__}: {error}"
                return RankAnswer(serial, unread=why, waited_s=waited_s)
            raise
    if not place.samples:
        return None
    follows = moves_rows or place.mesh.pp > 1
    tokens = step.new_tokens() if follows else None
    return RankAnswer(
        serial, output=output, tokens=tokens, moves_rows=moves_rows, waited_s=waited_s
    )
