"""Makes the drafter of a plan. What is not used is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from quire.config.speculation import SpeculationPlan
from quire.errors import NotBuiltYet
from quire.runner.devices.device import Device
from quire.runner.drafting.drafter import Drafter
from quire.runner.drafting.guesser import Guesser, GuessingDrafter, OpenGuesser
from quire.runner.forward.forward import Forward
from quire.runner.kv_cache import KVCache
from quire.runner.model import RunnableModel
from quire.runner.rows import Rows


@dataclass(frozen=True, slots=True)
class Target:
    """What drafts are made for: the model that verifies them, and its runner's parts."""

    model: RunnableModel
    forward: Forward
    rows: Rows
    kv_cache: KVCache
    device: Device


def build_drafter(plan: SpeculationPlan, target: Target) -> Drafter:
    """Make the drafter that a plan names. Raises RequestError or LoadError where it cannot be."""
    open_guesser = _guessers(plan)
    if open_guesser is None:
        hint = "Use ngram."
        raise NotBuiltYet("speculative_config['method']", plan.method, hint)
    return GuessingDrafter(open_guesser, target.model.spec.vocab)


def _guessers(plan: SpeculationPlan) -> OpenGuesser | None:
    """What guesses from the tokens alone; None for the methods that need a model."""
    if plan.method == "ngram":
        return partial(_open_ngram, plan.ngram.shortest, plan.ngram.longest)
    return None


def _open_ngram(
    shortest: int, longest: int, prompt: Sequence[int], output: Sequence[int]
) -> Guesser:
    from quire.runner.drafting.ngram import NgramGuesser

    return NgramGuesser([*prompt, *output], shortest, longest)
