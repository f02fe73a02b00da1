"""Media of prompts, as a feature of the core."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.engine.core.features import CoreFeature
from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import RequestError
from quire.executor.worker_config import MediaFacts
from quire.scheduling.request import Request


class MediaOfPrompts(CoreFeature):
    """Gives requests the media of their prompts, of modalities that the workers have encoders for.

    The scheduler checks items against the prompt and its own limits (scheduling/encoder_cache.py).
    """

    fields = ("media",)

    def __init__(self, facts: MediaFacts) -> None:
        self._facts = facts

    def prepare(self, request: Request, message: EngineCoreRequest) -> None:
        """Take the items and positions over. Raises RequestError for what the model cannot take."""
        media, facts = message.media, self._facts
        assert media is not None, "the request concerns this feature"
        for item in media.items:
            if item.modality not in facts.modalities:
                raise RequestError(f"Unsupported modality: {item.modality}")
            if not all(isinstance(value, np.ndarray) for value in item.inputs.values()):
                raise RequestError(f"the inputs of an item of modality {item.modality} are arrays")
        request.give_media(media.items)
        if media.positions is not None:
            self._check(media.positions, request.num_prompt_tokens)
            request.positions = media.positions
            request.position_offset = int(media.positions.max()) + 1 - request.num_prompt_tokens

    def _check(self, positions: Any, num_tokens: int) -> None:
        wanted = (self._facts.axes, num_tokens)
        is_array = isinstance(positions, np.ndarray) and positions.dtype == np.int32
        if self._facts.axes == 1 or not is_array or positions.shape != wanted:
            raise RequestError(f"positions of a prompt are int32 {list(wanted)}, on several axes")
        if positions.min() < 0 or positions.max() >= num_tokens:
            raise RequestError("positions of a prompt are from 0 up to its length")
