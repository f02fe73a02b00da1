"""Makes the drafter of a plan. What is not used is not imported."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.speculation import NETWORK_METHODS, SpeculationPlan
from quire.errors import NotBuiltYet
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
    """Make the drafter that a plan names. Raises RequestError or LoadError where it cannot be."""
    if plan.method in NETWORK_METHODS or plan.method == "extract_hidden_states":
        raise NotBuiltYet("speculative_config['method']", plan.method, "Use ngram or suffix.")
    from quire.runner.drafting.from_tokens import open_guessers
    from quire.runner.drafting.guesser import GuessingDrafter

    open_guesser = open_guessers(plan)
    assert open_guesser is not None, "the other methods guess from tokens"
    return GuessingDrafter(open_guesser, target.model.spec.vocab)
