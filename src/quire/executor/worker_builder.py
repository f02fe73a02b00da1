"""Makes a worker: loads the model, allocates the KV cache, puts the runner's parts together."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from torch import Tensor

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.worker_group import WorkerGroup
from quire.executor.drafting import build_drafting, read_draft_network
from quire.executor.encoders import OpenEncoders, open_encoders
from quire.executor.kv_sizing import PROBE_BLOCKS, size_kv_cache
from quire.executor.kv_tier.opening import open_transfers
from quire.executor.kv_tier.root import RootParts, kept_digests, model_files, root_parts
from quire.executor.kv_tier.tiered_encoder import TieredEncoder
from quire.executor.platform import Platform
from quire.executor.profiler import Profiler
from quire.executor.weight_transfer.session import (
    DraftWeights,
    WorkerWeights,
    ignored_update,
)
from quire.executor.weights import (
    checkpoint_files,
    make_checker,
    make_loader,
    make_saver,
    make_snapshots,
    make_transfer,
    make_updater,
    stored_weights,
)
from quire.executor.worker import Worker
from quire.executor.worker_config import WorkerConfig, WorkerFacts
from quire.executor.worker_extension import worker_class
from quire.hardware.prepared_memory import end_preparation
from quire.models import read_spec
from quire.models.cutting.sharding import shard
from quire.models.cutting.stages import memory_places
from quire.models.decoder import DecoderModel
from quire.models.drafting.network import DraftNetwork
from quire.models.foreign.implementation import AnyDecoder
from quire.models.formats import read_storage
from quire.models.kv_pool import memories_of, plan_kv_pool
from quire.models.loading.weights import inputs_together
from quire.models.pooling.spec import PoolerSpec
from quire.models.spec import Decoder, PipelineStage
from quire.params import PoolingParams, SamplingParams
from quire.runner.adapters import AdapterSlots
from quire.runner.batch import BatchBuilder
from quire.runner.block_transfers import BlockTransfers
from quire.runner.encoder_outputs import EncoderOutputs
from quire.runner.forward.forward import Forward
from quire.runner.forward.lockstep_forward import LockStepForward
from quire.runner.forward.shared_scores import SharedScores
from quire.runner.head import IdleHead, RowHead
from quire.runner.kv_cache import KVCache
from quire.runner.model import RunnableModel, StepModel
from quire.runner.residence import LoadedModel, Residence
from quire.runner.routed_experts import ExpertRecorder
from quire.runner.rows import Rows
from quire.runner.runner import ModelRunner
from quire.runner.sampling import Sampler
from quire.runner.sampling.logprobs import LogprobsMode
from quire.runner.token_follower import TokenFollower
from quire.runner.token_head import TokenHead
from quire.runner.token_types import TokenTypes
from quire.runner.warm_up import warm_up, warm_up_pooling

if TYPE_CHECKING:
    from quire.executor.adapter_support import AdapterSupport
    from quire.executor.draft_network import DraftParts

logger = logging.getLogger(__name__)


def build_worker(
    config: WorkerConfig,
    platform: Platform,
    *,
    exchange: ExpertExchange | None = None,
    group: WorkerGroup | None = None,
    stage: PipelineStage | None = None,
) -> Worker:
    """Build a model with its memory on its device, warm and ready for steps.

    With an `exchange` its experts are shared with other cores. With a `group` it has its share of
    each layer's heads and feed-forward width; all workers of the group are built at the same time,
    and the first one samples. As a `stage` it has some of the layers, and the last stage samples.
    """
    device = platform.device
    # before anything is loaded
    kind = worker_class(config.parallel)
    if group is not None:
        group = platform.connect(group)
    free_at_start = platform.free_bytes() if platform.free_bytes is not None else 0
    if config.weights_folder is not None:
        logger.warning(
            "Weights are kept in mapped files in %s: what does not stay in memory is read from the "
            "disk in every step.",
            config.weights_folder,
        )
    support = _adapter_support(config)
    network = read_draft_network(config)
    is_last = stage is None or stage.is_last
    if stage is not None and is_last and network is not None:
        stage = replace(stage, lends_table=network.borrows_table)
    room = None if support is None else support.room
    # the files are those of whole models
    stored = None if stage is not None else stored_weights(config, platform, exchange, group)
    load = make_loader(config, platform, exchange, group, room, network, stored, stage)
    # before loading: a file that changes meanwhile must not name what was read
    files, began = model_files(config), time.time()
    try:
        model = load()
    finally:
        end_preparation()
    reports = is_last and (group is None or group.rank == 0)
    samples = config.model.generates and reports
    whole, places = _whole_spec(config, model, group, stage)
    specs = [whole] if network is None else [whole, network.spec]
    if places is not None and network is not None and samples:
        own_places, after = len(whole.memories), len(memories_of(specs))
        places = [*places, *range(own_places, after)]
    kv_cache = _kv_cache(config, specs, platform, places)
    encoders = open_encoders(config, platform, model)
    shares_head = isinstance(model, DecoderModel) and model.shares_head
    num_sampled = config.max_sampled if samples or shares_head else 0
    runner, forward = _runner(config, platform, model, kv_cache, exchange, num_sampled, encoders)
    draft: DraftParts | None = None
    if samples:
        head, draft = _token_head(config, platform, runner, forward, group, network)
        runner.register(SamplingParams, head)
    elif config.model.generates:
        runner.register(SamplingParams, _follower(runner, group, forward if shares_head else None))
    if config.model.pooler is not None:
        runner.register(PoolingParams, _pooling_head(runner, config.model.pooler))
    if is_last:
        _watch(config, runner, kv_cache, whole, writes_states=reports)
    residents = [LoadedModel(model, load, make_checker(config, platform, group)), *encoders.models]
    forwards = [forward]
    if draft is not None:
        residents.append(LoadedModel(draft.model, draft.load))
        forwards += draft.forwards
    # before memory is measured: the workspaces of the largest steps have to be in it
    if not platform.is_host:
        _warm_up(config, runner)
    if config.memory.measures_memory:
        rows_bytes = 0 if runner.media is None else runner.media.bytes_of(encoders.facts.num_rows)
        size_kv_cache(
            *(config, platform.free_bytes, runner, forwards),
            free_at_start=free_at_start,
            reserved_bytes=rows_bytes,
        )
    ranks = group and (group.rank, group.size), stage
    own_parts = partial(root_parts, config, platform, kv_cache.pool, files, ranks)
    if config.memory.kv_tier is not None:
        runner.transfers = _transfers(config, platform, kv_cache, own_parts(), group, stage)
        for encoder in encoders.by_modality.values():
            if isinstance(encoder, TieredEncoder):
                encoder.bind(runner.transfers)
    residence = Residence(models=residents, kv_cache=kv_cache, forwards=forwards, device=device)
    residence.loaded_at = began
    mesh = config.parallel.mesh
    rank = 0 if group is None else group.rank
    if stage is not None:
        rank += mesh.tp * stage.number
    core = 0 if config.parallel.weight_transfer is None else config.parallel.weight_transfer.core
    runner.vllm_config = config.plan
    worker = kind(
        runner,
        residence,
        WorkerFacts(
            kv_cache.num_blocks,
            tuple(group.spec for group in kv_cache.pool.groups),
            has_own_memory=not platform.is_host,
            media=encoders.facts,
        ),
        rank=rank,
        profiler=None if config.parallel.profiler is None else Profiler(config.parallel.profiler),
        save=make_saver(config, platform, group, stage),
        adapters=support,
        stored=stored,
        weights=WorkerWeights(
            model,
            make_updater(
                *(config, platform, model, exchange, group, room, network, stage),
                has_encoders=bool(encoders.by_modality),
            ),
            make_transfer(config, platform, model, rank),
            before_change=lambda: None if stored is None else stored.give_up(),
            drafts=_draft_weights(config, platform, network, model, draft, samples=samples),
            snapshots=make_snapshots(config, rank),
            files=checkpoint_files(config),
        ),
        place=(core, mesh.tp, mesh.world_size),
        folder=Path(config.model.model_folder),
    )
    if config.memory.kv_connector is not None:
        _connect(worker, config, platform, kv_cache, own_parts(), rank)
    worker.origin = partial(_origin, config, own_parts)
    return worker


def _watch(
    config: WorkerConfig,
    runner: ModelRunner,
    kv_cache: KVCache,
    spec: AnyDecoder,
    *,
    writes_states: bool,
) -> None:
    """Have the runner's steps followed by what records experts and hidden states."""
    if config.reports_experts:
        assert isinstance(spec, Decoder), "experts of Quire's own decoder"
        runner.heads.watch(ExpertRecorder(spec, runner.rows, kv_cache, runner.device))
    if config.sampling.hidden_states is not None and writes_states:
        from quire.runner.hidden_states import HiddenStatesRecorder  # few ask for files

        runner.heads.watch(HiddenStatesRecorder(config.sampling.hidden_states, runner.rows))


def _connect(
    worker: Worker,
    config: WorkerConfig,
    platform: Platform,
    kv_cache: KVCache,
    parts: RootParts,
    rank: int,
) -> None:
    """Have the worker open its side of a connector when the engine asks for it."""
    from quire.executor.kv_tier.connected_ranks import ConnectedRank  # few engines have one
    from quire.executor.kv_tier.connected_worker import open_connector

    assert config.memory.kv_connector is not None, "there is one"
    worker.connect = partial(open_connector, platform, kv_cache, parts)
    own = msgspec.structs.replace(config.memory.kv_connector, worker=rank)
    worker.connected_rank = ConnectedRank(worker.connect, config.plan, own)


def _draft_weights(
    config: WorkerConfig,
    platform: Platform,
    network: DraftNetwork | None,
    target: RunnableModel,
    draft: DraftParts | None,
    *,
    samples: bool,
) -> DraftWeights | None:
    """The weights of the network that drafts, which the worker that samples has; None: none
    does.
    """
    if network is None or (samples and draft is None):
        return None
    if draft is None:
        return DraftWeights(None, ignored_update)
    from quire.executor.draft_network import draft_updates

    begin = draft_updates(config, platform, network, draft.model, target)
    return DraftWeights(draft.model, begin)


def _origin(config: WorkerConfig, own_parts: Callable[[], RootParts]) -> list[str]:
    """The answer of `Worker.name_origin`."""
    # a shorter limit would end streams that go on here earlier
    drawn = config.sampling, config.max_len
    return own_parts().origin(kept_digests(), repr(drawn))


def _whole_spec(
    config: WorkerConfig,
    model: RunnableModel,
    group: WorkerGroup | None,
    stage: PipelineStage | None,
) -> tuple[AnyDecoder, Collection[int] | None]:
    """The spec of the worker's share of all layers, whose pool all stages have, and the places
    among its memories of a stage's own; None: all.
    """
    if stage is None:
        return model.spec, None
    whole = read_spec(config.model.hf_config, config.model.pooler)
    places = memory_places(whole, stage)
    if group is None:
        return whole, places
    # as its weights are cut: heads whose inputs have one scale stay together
    inputs = inputs_together(config.recipe, read_storage(config.model.hf_config))
    return shard(whole, group.size, inputs), places


def _transfers(
    config: WorkerConfig,
    platform: Platform,
    kv_cache: KVCache,
    parts: RootParts,
    group: WorkerGroup | None,
    stage: PipelineStage | None,
) -> BlockTransfers:
    """Open the worker's share of the memory outside of the pool."""
    assert config.memory.kv_tier is not None, "there is some"
    share = 1.0 if group is None else 1 / group.size
    share *= 1.0 if stage is None else (stage.last - stage.first) / stage.count
    return open_transfers(config.memory.kv_tier, platform, kv_cache, parts, share)


def _runner(
    config: WorkerConfig,
    platform: Platform,
    model: RunnableModel,
    kv_cache: KVCache,
    exchange: ExpertExchange | None,
    num_sampled: int,
    encoders: OpenEncoders,
) -> tuple[ModelRunner, Forward]:
    """Make the runner of a model, and what runs its steps, which sample up to `num_sampled` rows:
    recorded if the platform records.
    """
    rows = Rows(
        num_rows=config.num_rows,
        max_len=config.max_len,
        block_sizes=[
            None if group.kind == "state" else group.block_size for group in kv_cache.pool.groups
        ],
        device=platform.device,
        ring_size=config.num_drafts + 2,
    )
    types = None
    if isinstance(model.spec, Decoder) and model.spec.token_types:
        types = TokenTypes(config.num_rows, model.spec.token_types)
        rows.parts.append(types)
    embeds, media, deep = None, None, []
    if encoders.by_modality:
        assert isinstance(model, DecoderModel), "media of Quire's own decoder"
        size = config.step_size, model.spec.table_width
        embeds = torch.zeros(size, dtype=config.torch_dtype, device=platform.device.torch)
        deep = [torch.zeros_like(embeds) for _ in range(encoders.num_deep)]
        inputs = model.spec.layer_inputs
        media_id = None if inputs is None else inputs.media_id
        media = EncoderOutputs(
            *(encoders.by_modality, model.look_up, embeds, deep, media_id, encoders.result_width)
        )
    batches = BatchBuilder(
        rows=rows,
        ops=platform.ops,
        device=platform.device,
        pool=kv_cache.pool,
        kv=kv_cache.layers,
        capacity=config.step_size,
        sizes=platform.sizes,
        types=types,
        has_adapters=config.adapters is not None,
        states=_stage_input(config, platform, model),
        embeds=embeds,
        deep=deep,
        axes=encoders.facts.axes,
    )
    forward = record_steps(platform, model, batches, num_sampled)
    if exchange is not None:
        forward = LockStepForward(forward, exchange)
    runner = ModelRunner(
        model=model,
        rows=rows,
        batches=batches,
        kv_cache=kv_cache,
        device=platform.device,
        forward=forward,
        adapters=None if config.adapters is None else AdapterSlots(model),
        media=media,
    )
    return runner, forward


def _stage_input(config: WorkerConfig, platform: Platform, model: RunnableModel) -> Tensor | None:
    """Make the tensor for the hidden states that enter a later stage; None: the model embeds."""
    spec = model.spec
    if not isinstance(spec, Decoder) or spec.embeds:
        return None
    width = max([config.step_size, *platform.sizes])
    return torch.zeros((width, spec.dim), dtype=config.torch_dtype, device=platform.device.torch)


def _warm_up(config: WorkerConfig, runner: ModelRunner) -> None:
    tokens, rows, length = (
        config.step_size, config.num_rows, config.max_len
    )  # fmt: skip
    if config.model.pooler is not None:
        tasks = config.model.pooler.tasks
        warm_up_pooling(runner, tasks=tasks, num_tokens=tokens, num_rows=rows, max_len=length)
    if config.model.generates:
        warm_up(
            runner,
            num_tokens=tokens,
            num_rows=rows,
            max_len=length,
            max_logprobs=config.sampling.max_logprobs,
        )


def _kv_cache(
    config: WorkerConfig,
    specs: Sequence[AnyDecoder],
    platform: Platform,
    places: Collection[int] | None,
) -> KVCache:
    return KVCache(
        ops=platform.ops,
        pool=plan_kv_pool(
            memories_of(specs), config.key_size, config.number_bytes, config.num_drafts
        ),
        num_blocks=PROBE_BLOCKS if config.memory.measures_memory else config.memory.num_blocks,
        dtype=config.kv_dtype,
        send=platform.device.send,
        places=places,
    )


def _token_head(
    config: WorkerConfig,
    platform: Platform,
    runner: ModelRunner,
    forward: Forward,
    group: WorkerGroup | None,
    network: DraftNetwork | None,
) -> tuple[RowHead, DraftParts | None]:
    """Make the head of generating rows of the worker that samples, and the network that drafts for
    it.
    """
    rows, device = runner.rows, platform.device
    sampler = Sampler(
        ops=platform.ops,
        num_rows=config.num_rows,
        vocab_size=runner.model.spec.vocab,
        device=device,
        history=rows,
        max_logprobs=config.sampling.max_logprobs,
        logprobs_mode=cast(LogprobsMode, config.sampling.logprobs_mode),
        logits_processors=config.make_processors(device.torch),
    )
    if config.speculation is not None and not sampler.takes_drafts:
        logger.warning(
            "A logits processor edits all rows of a step at once, and cannot be asked about tokens "
            "that may not come: no tokens are drafted."
        )
    drafting, draft = None, None
    if config.speculation is not None and sampler.takes_drafts:
        drafting, draft = build_drafting(config, platform, runner, sampler, network)
    head = TokenHead(
        model=runner.model,
        forward=forward,
        rows=rows,
        sampler=sampler,
        device=device,
        drafting=drafting,
        share=None if group is None else group.broadcast,
    )
    return head, draft


def _follower(runner: ModelRunner, group: WorkerGroup | None, forward: Forward | None) -> RowHead:
    """Make the head of generating rows of a worker that does not sample."""
    if group is None:
        return IdleHead(("generate",))  # their ids come with a later step
    return TokenFollower(runner.rows, group, forward)


def _pooling_head(runner: ModelRunner, pooler: PoolerSpec) -> RowHead:
    """Make the head of rows that pool."""
    model = runner.model
    assert isinstance(model, DecoderModel), "a model that pools"
    if model.pooler is None:
        return IdleHead(pooler.tasks)
    from quire.runner.pooling.pooling_head import PoolingHead  # few models pool

    results = None if runner.media is None else runner.media.result_of
    return PoolingHead(model, runner.rows, runner.device, runner.adapters, results)


def _adapter_support(config: WorkerConfig) -> AdapterSupport | None:
    if config.adapters is None:
        return None
    from quire.executor.adapter_support import adapter_support  # few engines have adapters

    return adapter_support(config, config.adapters)


def record_steps(
    platform: Platform, model: RunnableModel, batches: BatchBuilder, num_sampled: int
) -> Forward:
    """Make the object that runs the model's steps, recorded if the platform records."""
    stepped: StepModel = model
    if isinstance(model, DecoderModel) and model.shares_head:
        stepped = SharedScores(model)
    return platform.make_forward(stepped, batches, num_sampled)
