"""Inputs that are longer than the model takes: embedded in pieces, whose vectors are averaged."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np

from quire.server.pooling.inputs import PoolingPrompt
from quire.server.pooling.runs import Pooled

_UNIT = 1e-2
"""Deviation from 1 up to which the length of a vector counts as normalised."""


async def pieces_of(
    prompts: AsyncGenerator[PoolingPrompt], longest: int, counts: list[int]
) -> AsyncGenerator[PoolingPrompt]:
    """The prompts in pieces of at most `longest` tokens; `counts` gets how many each one has."""
    async with aclosing(prompts):
        async for prompt in prompts:
            ids, starts = prompt.ids, range(0, max(len(prompt.ids), 1), longest)
            counts.append(len(starts))
            if len(starts) == 1 or prompt.media is not None:  # which the engine refuses whole
                counts[-1] = 1
                yield prompt
                continue
            for start in starts:
                yield prompt._replace(ids=ids[start : start + longest])


def joined(parts: Sequence[Pooled], counts: Sequence[int], *, activates: bool) -> list[Pooled]:
    """One vector for each prompt: the mean of its pieces', weighted by their tokens. It is
    normalised again if `activates` and every piece's is. (Of models that average their tokens, and
    of these nearly, it is what the whole would give.)
    """
    found, start = [], 0
    for count in counts:
        of_prompt = parts[start : start + count]
        start += count
        found.append(of_prompt[0] if count == 1 else _mean(of_prompt, activates=activates))
    return found


def _mean(parts: Sequence[Pooled], *, activates: bool) -> Pooled:
    weights = [part.num_tokens for part in parts]
    vectors = np.stack([part.numbers for part in parts]).astype(np.float64)
    mean = np.average(vectors, axis=0, weights=weights)
    # a model that does not normalise must not get it here
    lengths = np.linalg.norm(vectors, axis=1)
    if activates and (abs(lengths - 1) <= _UNIT).all():
        mean /= max(float(np.linalg.norm(mean)), 1e-12)
    return Pooled(mean.astype(np.float32), sum(weights))
