"""Puts a draft network next to a model: its layers in the model's pool, the programs of its passes,
and the drafter that runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from quire.config.speculation import DraftPlan
from quire.errors import LoadError, NotBuiltYet
from quire.executor.platform import Platform
from quire.executor.worker_config import WorkerConfig
from quire.models import read_spec
from quire.models.decoder import DecoderModel
from quire.models.drafting.later_pass import LaterPass
from quire.models.drafting.load import (
    load_network,
    loading_arguments,
    read_ids,
    read_token_ids,
    tensor_names,
)
from quire.models.drafting.medusa import read_medusa
from quire.models.drafting.medusa_heads import load_medusa
from quire.models.drafting.network import DraftNetwork
from quire.models.drafting.read import POOLED_METHODS, read_network
from quire.models.drafting.spec import DraftDecoder
from quire.models.loading.folder_files import LoadFormat
from quire.models.loading.rounding.recipes import recipe_of
from quire.models.spec import Decoder
from quire.runner.batch import BatchBuilder
from quire.runner.drafting.draft_rows import DraftRows
from quire.runner.drafting.drafter import Drafter
from quire.runner.drafting.heads import HeadsDrafter
from quire.runner.drafting.networks import NetworkDrafter, NetworkInputs, Pass
from quire.runner.forward.forward import EagerForward, Forward
from quire.runner.model import RunnableModel
from quire.runner.residence import Loadable
from quire.runner.runner import ModelRunner
from quire.runner.sampling import Sampler

if TYPE_CHECKING:
    from quire.models.updates.plan import UpdatePlan
    from quire.models.updates.update import WeightUpdate


@dataclass(frozen=True, slots=True)
class DraftParts:
    """Weights that draft, what loads them again, and what runs them."""

    model: Loadable
    load: Callable[[], Loadable]
    forwards: tuple[Forward, ...]
    drafter: Drafter


def open_draft(
    config: WorkerConfig, method: str, draft: DraftPlan, target: Decoder | None
) -> DraftNetwork | None:
    """Read what the network is whose layers are in the model's pool; None: heads alone draft.
    target: the model's spec, None for one that Quire does not run itself. Raises LoadError or
    NotBuiltYet.
    """
    if method not in POOLED_METHODS:
        return None
    if target is None:
        hint = "Use ngram, or a model that Quire runs itself."
        raise NotBuiltYet("speculative_config['method']", method, hint)
    names = (
        ()
        if draft.is_target or method == "draft_model"
        else tensor_names(Path(draft.folder), _format(config, draft), target)
    )
    return read_network(method, draft.hf_config, target, names)


def build_network_drafter(
    config: WorkerConfig,
    platform: Platform,
    draft: DraftPlan,
    network: DraftNetwork,
    runner: ModelRunner,
    sampler: Sampler,
) -> DraftParts:
    """Load the network and make what runs it."""
    target = runner.model
    assert isinstance(target, DecoderModel), "a model that Quire runs itself"
    load = partial(_load, config, platform, network, draft, target)
    model = load()
    spec, lengths = network.spec, DraftRows(runner.rows)
    reads, width = NetworkInputs(), 0
    if isinstance(spec, DraftDecoder):
        reads, width = NetworkInputs(1, bool(spec.inputs.aux_layers)), spec.inputs.states_width
    make = partial(_make_pass, config, platform, draft, runner, lengths, reads)
    first = make(model, width)
    later = first
    if isinstance(spec, DraftDecoder) and spec.inputs.join == "attention":
        later = make(LaterPass(model), spec.dim)
    drafter = NetworkDrafter(
        lengths=lengths,
        first=first,
        later=later,
        reads=reads,
        sampler=sampler,
        device=platform.device,
        max_len=min(draft.max_model_len or config.max_len, config.max_len),
        window=min((m.window for m in spec.memories if m is not None and m.window), default=None),
        token_ids=read_token_ids(
            network, Path(draft.folder), _format(config, draft), platform.device.torch
        ),
        is_greedy=draft.is_greedy,
    )
    forwards = (first.forward,) if later is first else (first.forward, later.forward)
    return DraftParts(model, load, forwards, drafter)


def build_heads_drafter(
    config: WorkerConfig, platform: Platform, draft: DraftPlan, target: Decoder, sampler: Sampler
) -> DraftParts:
    """Load Medusa heads and make what runs them. Raises LoadError for fewer heads than drafts."""
    spec = read_medusa(draft.hf_config, target)
    if spec.heads < config.num_drafts:
        raise LoadError(
            f"{draft.folder} has {spec.heads} heads, and num_speculative_tokens="
            f"{config.num_drafts}: each head guesses one token."
        )
    load = partial(
        load_medusa,
        *(Path(draft.folder), spec, target, platform.ops),
        load_format=_format(config, draft),
        dtype=config.torch_dtype,
        device=platform.device.torch,
    )
    heads = load()
    return DraftParts(
        heads, load, (), HeadsDrafter(heads, sampler, platform.device, is_greedy=draft.is_greedy)
    )


def _facts(config: WorkerConfig, platform: Platform, draft: DraftPlan) -> dict[str, Any]:
    """Arguments of `load_network` besides what it loads. The layers of the whole target come first
    in the pool.
    """
    return {
        "config": draft.hf_config,
        "load_format": _format(config, draft),
        "first_layer": len(read_spec(config.model.hf_config, config.model.pooler).memories),
        "max_model_len": config.max_len,
        "dtype": config.torch_dtype,
        "kv_dtype": config.kv_dtype,
        "device": platform.device.torch,
        "recipe": recipe_of(
            draft.quantization, config.model.rounding_rules if draft.is_target else None
        ),
        "seed": config.weights_seed,
    }


def draft_updates(
    config: WorkerConfig, platform: Platform, network: DraftNetwork, model: Loadable, target: object
) -> Callable[..., WeightUpdate]:
    """Return the function that begins an update of a network, which drafts for the `target`."""
    assert isinstance(model, DecoderModel) and isinstance(target, DecoderModel)
    assert config.speculation is not None and config.speculation.draft is not None
    draft, folder = config.speculation.draft, Path(config.speculation.draft.folder)
    plans: list[UpdatePlan] = []

    def begin(*, is_repair: bool) -> WeightUpdate:
        from quire.models.updates.plan import UpdatePlan  # few engines have new weights
        from quire.models.updates.update import WeightUpdate

        if not plans:
            given, named = loading_arguments(
                network, folder, platform.ops, target, **_facts(config, platform, draft)
            )
            fixed = read_ids(network, folder, _format(config, draft))
            plans.append(UpdatePlan(model, *given, **named, writer=platform.writer, fixed=fixed))
        return WeightUpdate(plans[0], is_repair=is_repair)

    return begin


def _load(
    config: WorkerConfig,
    platform: Platform,
    network: DraftNetwork,
    draft: DraftPlan,
    target: DecoderModel,
) -> DecoderModel:
    facts = _facts(config, platform, draft)
    return load_network(network, Path(draft.folder), platform.ops, target, **facts)


def _make_pass(
    config: WorkerConfig,
    platform: Platform,
    draft: DraftPlan,
    runner: ModelRunner,
    lengths: DraftRows,
    reads: NetworkInputs,
    model: RunnableModel,
    width: int,
) -> Pass:
    """A way to run the network on states of `width` numbers (0: it reads none). A first pass may
    have a token more of each row than the target's step.
    """
    capacity = config.step_size + config.num_rows
    if isinstance(model, LaterPass):
        capacity = config.num_rows
    sizes = platform.sizes if draft.use_graphs else ()
    size = max([capacity, *sizes])
    states = None
    if width:
        states = torch.zeros((size, width), dtype=config.torch_dtype, device=platform.device.torch)
    batches = BatchBuilder(
        rows=lengths,
        ops=platform.ops,
        device=platform.device,
        pool=runner.kv_cache.pool,
        kv=runner.kv_cache.layers,
        capacity=capacity,
        sizes=sizes,
        ahead=reads.lag,
        states=states,
    )
    forward: Forward = EagerForward(model)
    if draft.use_graphs:
        forward = platform.make_forward(model, batches, config.max_sampled)
    return Pass(batches, forward)


def _format(config: WorkerConfig, draft: DraftPlan) -> LoadFormat:
    return cast(LoadFormat, "dummy" if config.model.has_drawn_weights else draft.weights_format)
