"""Makes the drafter of a plan. What is not used is not imported."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.speculation import NETWORK_METHODS, SpeculationPlan
from quire.runner.devices.device import Device
from quire.runner.drafting.drafter import Drafter
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
    """Make the drafter of a method that guesses from tokens; executor/draft_network.py makes those
    that have weights. Raises RequestError or LoadError where it cannot be.
    """
    assert plan.method not in NETWORK_METHODS, "weights are loaded with the model's"
    from quire.runner.drafting.from_tokens import open_guessers
    from quire.runner.drafting.guesser import GuessingDrafter

    open_guesser = open_guessers(plan)
    assert open_guesser is not None, "the other methods guess from tokens"
    return GuessingDrafter(open_guesser, target.model.spec.vocab)
