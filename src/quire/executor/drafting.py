"""Drafters for a worker's model. Modules that are not used are not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.executor.platform import Platform
from quire.executor.worker_config import WorkerConfig
from quire.models import read_spec
from quire.models.drafting.network import DraftNetwork
from quire.models.spec import Decoder
from quire.runner.drafting.drafting import Drafting
from quire.runner.drafting.pace import FixedPace, MeasuredPace, Pace
from quire.runner.runner import ModelRunner
from quire.runner.sampling import Sampler

if TYPE_CHECKING:
    from quire.executor.draft_network import DraftParts


def read_draft_network(config: WorkerConfig) -> DraftNetwork | None:
    """Read what drafts next to the model; None: no network does. Raises LoadError or
    NotBuiltYet.
    """
    plan = config.speculation
    if plan is None or plan.draft is None:
        return None
    from quire.executor.draft_network import open_draft

    is_own = not config.model.is_foreign
    return open_draft(
        config, plan.method, plan.draft, read_spec(config.model.hf_config) if is_own else None
    )


def build_drafting(
    config: WorkerConfig,
    platform: Platform,
    runner: ModelRunner,
    sampler: Sampler,
    network: DraftNetwork | None,
) -> tuple[Drafting, DraftParts | None]:
    """Make what drafts, and load its weights; None: the tokens are all it needs."""
    plan = config.speculation
    assert plan is not None, "nothing is drafted"
    pace: Pace = FixedPace(plan.num_tokens, plan.by_batch)
    if plan.is_adaptive:
        pace = MeasuredPace(plan.num_tokens, config.num_rows, plan.max_drafts)
    if plan.draft is None:
        from quire.runner.drafting.from_tokens import open_guessers
        from quire.runner.drafting.guesser import GuessingDrafter

        return Drafting(GuessingDrafter(open_guessers(plan), runner.model.spec.vocab), pace), None
    from quire.executor.draft_network import build_heads_drafter, build_network_drafter

    if network is not None:
        parts = build_network_drafter(config, platform, plan.draft, network, runner, sampler)
    else:
        assert isinstance(runner.model.spec, Decoder), "a model that Quire runs itself"
        parts = build_heads_drafter(config, platform, plan.draft, runner.model.spec, sampler)
    return Drafting(parts.drafter, pace), parts
