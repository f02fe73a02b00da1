"""Makes a worker: loads the model, allocates the KV cache, puts the runner's parts together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.worker_group import WorkerGroup
from quire.executor.adapter_support import adapter_support
from quire.executor.kv_sizing import PROBE_BLOCKS, size_kv_cache
from quire.executor.platform import Platform
from quire.executor.profiler import Profiler
from quire.executor.worker import SaveWeights, Worker
from quire.executor.worker_config import WorkerConfig, WorkerFacts
from quire.models import find_family, read_spec
from quire.models.adapters.banks import AdapterRoom
from quire.models.decoder import DecoderModel
from quire.models.drafting.network import DraftNetwork
from quire.models.foreign.implementation import AnyDecoder
from quire.models.foreign.load import load_foreign_model
from quire.models.formats import read_storage
from quire.models.kv_pool import memories_of, plan_kv_pool
from quire.models.loading.options import ModelOptions
from quire.models.loading.weight_placement import WeightPlacement
from quire.models.loading.weights import load_model, save_sharded_state
from quire.models.spec import Decoder
from quire.ops import Ops
from quire.params import PoolingParams, SamplingParams
from quire.quantization import RECIPES, UNQUANTIZED, Recipe
from quire.runner.adapters import AdapterSlots
from quire.runner.batch import BatchBuilder
from quire.runner.drafting.build import Target, build_drafter
from quire.runner.drafting.drafting import Drafting
from quire.runner.drafting.pace import FixedPace, MeasuredPace, Pace
from quire.runner.forward.forward import Forward
from quire.runner.forward.lockstep_forward import LockStepForward
from quire.runner.head import RowHead
from quire.runner.kv_cache import KVCache
from quire.runner.model import RunnableModel
from quire.runner.offloaded_weights import OffloadedWeights
from quire.runner.pooling.pooling_head import PoolingHead
from quire.runner.residence import LoadedModel, Residence
from quire.runner.routed_experts import ExpertRecorder
from quire.runner.rows import Rows
from quire.runner.runner import ModelRunner
from quire.runner.sampling import Sampler
from quire.runner.token_follower import TokenFollower
from quire.runner.token_head import TokenHead
from quire.runner.token_types import TokenTypes
from quire.runner.warm_up import warm_up, warm_up_pooling

if TYPE_CHECKING:
    from quire.executor.draft_network import DraftParts

logger = logging.getLogger(__name__)


def build_worker(
    config: WorkerConfig,
    platform: Platform,
    *,
    exchange: ExpertExchange | None = None,
    group: WorkerGroup | None = None,
) -> Worker:
    """Build a model with its memory on its device, warm and ready for steps.

    With an `exchange` its experts are shared with other cores. With a `group` it has its share of
    each layer's heads and feed-forward width; all workers of the group are built at the same time,
    and the first one samples.
    """
    device = platform.device
    free_at_start = platform.free_bytes() if platform.free_bytes is not None else 0
    if config.weights_folder is not None:
        logger.warning(
            "Weights are kept in mapped files in %s: what does not stay in memory is read from the "
            "disk in every step.",
            config.weights_folder,
        )
    support = adapter_support(config)
    room = None if support is None else support.room
    network = _draft_network(config)
    load = _loader(config, platform, exchange, group, room, network)
    model = load()
    specs = [model.spec] if network is None else [model.spec, network.spec]
    kv_cache = _kv_cache(config, specs, platform.ops)
    pool = kv_cache.pool
    rows = Rows(
        num_rows=config.max_num_seqs,
        max_len=config.max_model_len,
        block_sizes=[None if g.kind == "state" else g.block_size for g in pool.groups],
        device=device,
        ring_size=config.num_drafts + 2,
    )
    types = None
    if isinstance(model.spec, Decoder) and model.spec.token_types:
        types = TokenTypes(config.max_num_seqs, model.spec.token_types)
        rows.parts.append(types)
    batches = BatchBuilder(
        rows=rows,
        ops=platform.ops,
        device=device,
        pool=pool,
        kv=kv_cache.layers,
        capacity=config.max_num_batched_tokens,
        sizes=platform.sizes,
        types=types,
        has_adapters=room is not None,
    )
    forward = record_steps(platform, model, batches)
    if exchange is not None:
        forward = LockStepForward(forward, exchange)
    runner = ModelRunner(
        model=model,
        rows=rows,
        batches=batches,
        kv_cache=kv_cache,
        device=device,
        forward=forward,
        adapters=None if room is None else AdapterSlots(model),
    )
    draft: DraftParts | None = None
    if config.pooler is None:
        head, draft = _token_head(config, platform, runner, forward, group, network)
        runner.register(SamplingParams, head)
    else:
        runner.register(PoolingParams, _pooling_head(config, runner))
    if config.keeps_experts:
        assert isinstance(model.spec, Decoder), "experts of Quire's own decoder"
        runner.heads.watch(ExpertRecorder(model.spec, rows, kv_cache, device))
    residents, forwards = [LoadedModel(model, load)], [forward]
    if draft is not None:
        residents.append(LoadedModel(draft.model, draft.load))
        forwards += draft.forwards
    if not platform.is_host:
        _warm_up(config, runner)
    if config.memory_share is not None:
        assert platform.free_bytes is not None, "a share of memory that cannot be measured"
        size_kv_cache(
            config,
            pool,
            runner,
            forwards,
            free_at_start=free_at_start,
            free_bytes=platform.free_bytes,
        )
    return Worker(
        runner,
        Residence(models=residents, kv_cache=kv_cache, forwards=forwards, device=device),
        WorkerFacts(
            kv_cache.num_blocks,
            tuple(group.spec for group in pool.groups),
            has_own_memory=not platform.is_host,
        ),
        rank=0 if group is None else group.rank,
        profiler=None if config.profiler is None else Profiler(config.profiler),
        save=_saver(config, platform, group),
        read_adapter=None if support is None else support.read,
    )


def _warm_up(config: WorkerConfig, runner: ModelRunner) -> None:
    tokens, rows, length = (
        config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len
    )  # fmt: skip
    if config.pooler is not None:
        tasks = config.pooler.tasks
        warm_up_pooling(runner, tasks=tasks, num_tokens=tokens, num_rows=rows, max_len=length)
        return
    warm_up(
        runner,
        num_tokens=tokens,
        num_rows=rows,
        max_len=length,
        max_logprobs=config.max_logprobs,
    )


def _draft_network(config: WorkerConfig) -> DraftNetwork | None:
    """Read what drafts next to the model; None: no network does."""
    if config.speculation is None or config.speculation.draft is None:
        return None
    from quire.executor.draft_network import open_draft

    is_own = config.model_impl != "transformers"
    return open_draft(config, read_spec(config.hf_config) if is_own else None)


def _loader(
    config: WorkerConfig,
    platform: Platform,
    exchange: ExpertExchange | None,
    group: WorkerGroup | None,
    room: AdapterRoom | None,
    network: DraftNetwork | None,
) -> Callable[[], RunnableModel]:
    """Return the function that loads the weights, at the start and after sleep."""
    if config.model_impl == "transformers":
        assert exchange is None and group is None, "one core, one worker"
        return partial(
            load_foreign_model,
            Path(config.model_folder),
            config.hf_config,
            platform.ops,
            dtype=config.dtype,
            device=platform.device,
            load_format=config.load_format,
            seed=config.seed,
        )
    return partial(
        load_model,
        Path(config.model_folder),
        read_spec(config.hf_config, config.pooler),
        platform.ops,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        device=platform.device.torch,
        load_format=config.load_format,
        weights_folder=config.weights_folder,
        seed=config.seed,
        max_model_len=config.max_model_len,
        family=find_family(config.hf_config, config.pooler),
        storage=read_storage(config.hf_config),
        options=ModelOptions(
            recipe=_recipe(config),
            spread=exchange,
            group=group,
            aux_layers=() if network is None else network.aux_layers,
            keeps_experts=config.keeps_experts,
            make_placement=_placement_maker(config, platform),
            adapter_room=room,
        ),
    )


def _placement_maker(
    config: WorkerConfig, platform: Platform
) -> Callable[[], WeightPlacement] | None:
    """Return the function that makes what keeps weights on the host; None: none are there."""
    offload = config.offload
    if offload is None:
        return None
    assert platform.driver is not None, "weights are offloaded from a device with its own memory"
    return partial(
        OffloadedWeights,
        *(platform.driver, offload.layers, offload.num_buffers, offload.weights),
    )


def _saver(
    config: WorkerConfig, platform: Platform, group: WorkerGroup | None
) -> SaveWeights | None:
    """Return the function that writes the worker's part of the weights; None for a model of
    transformers, whose weights are not parts of a decoder.
    """
    if config.model_impl == "transformers":
        return None
    return partial(
        save_sharded_state,
        Path(config.model_folder),
        read_spec(config.hf_config, config.pooler),
        device=platform.device.torch,
        load_format=config.load_format,
        seed=config.seed,
        family=find_family(config.hf_config, config.pooler),
        storage=read_storage(config.hf_config),
        recipe=_recipe(config),
        group=group,
    )


def _recipe(config: WorkerConfig) -> Recipe:
    return UNQUANTIZED if config.quantization is None else RECIPES[config.quantization]


def _kv_cache(config: WorkerConfig, specs: Sequence[AnyDecoder], ops: Ops) -> KVCache:
    return KVCache(
        ops=ops,
        pool=plan_kv_pool(
            memories_of(specs), config.block_size, config.number_bytes, config.num_drafts
        ),
        num_blocks=config.num_blocks if config.memory_share is None else PROBE_BLOCKS,
        dtype=config.kv_dtype,
    )


def _token_head(
    config: WorkerConfig,
    platform: Platform,
    runner: ModelRunner,
    forward: Forward,
    group: WorkerGroup | None,
    network: DraftNetwork | None,
) -> tuple[RowHead, DraftParts | None]:
    """Make the head of generating rows, and the network that drafts for it: the first worker of a
    group samples.
    """
    rows, device = runner.rows, platform.device
    if group is not None and group.rank > 0:
        return TokenFollower(rows, group), None
    sampler = Sampler(
        ops=platform.ops,
        num_rows=config.max_num_seqs,
        vocab_size=runner.model.spec.vocab,
        device=device,
        history=rows,
        max_logprobs=config.max_logprobs,
        logprobs_mode=config.logprobs_mode,
        logits_processors=config.make_processors(device.torch),
    )
    if config.speculation is not None and not sampler.takes_drafts:
        logger.warning(
            "A logits processor edits all rows of a step at once, and cannot be asked about tokens "
            "that may not come: no tokens are drafted."
        )
    takes_drafts = config.speculation is not None and sampler.takes_drafts
    draft = _draft_parts(config, platform, runner, sampler, network) if takes_drafts else None
    head = TokenHead(
        model=runner.model,
        forward=forward,
        rows=rows,
        sampler=sampler,
        device=device,
        drafting=_drafting(config, runner, forward, draft) if takes_drafts else None,
        share=None if group is None else group.broadcast,
    )
    return head, draft


def _draft_parts(
    config: WorkerConfig,
    platform: Platform,
    runner: ModelRunner,
    sampler: Sampler,
    network: DraftNetwork | None,
) -> DraftParts | None:
    """Load the weights that draft; None: there are none."""
    if config.speculation is None or config.speculation.draft is None:
        return None
    from quire.executor.draft_network import build_heads_drafter, build_network_drafter

    if network is not None:
        return build_network_drafter(config, platform, network, runner, sampler)
    assert isinstance(runner.model.spec, Decoder), "a model that Quire runs itself"
    return build_heads_drafter(config, platform, runner.model.spec, sampler)


def _drafting(
    config: WorkerConfig, runner: ModelRunner, forward: Forward, draft: DraftParts | None
) -> Drafting | None:
    """Make what drafts; None where nothing is drafted."""
    plan = config.speculation
    if plan is None:
        return None
    pace: Pace = FixedPace(plan.num_tokens, plan.by_batch)
    if plan.is_adaptive:
        pace = MeasuredPace(plan.num_tokens, config.max_num_seqs, plan.max_drafts)
    if draft is not None:
        return Drafting(draft.drafter, pace)
    target = Target(runner.model, forward, runner.rows, runner.kv_cache, runner.device)
    return Drafting(build_drafter(plan, target), pace)


def _pooling_head(config: WorkerConfig, runner: ModelRunner) -> RowHead:
    """Make the head of rows that pool."""
    model = runner.model
    assert isinstance(model, DecoderModel) and model.pooler is not None, "a model that pools"
    return PoolingHead(model, runner.rows, runner.device, runner.adapters)


def record_steps(platform: Platform, model: RunnableModel, batches: BatchBuilder) -> Forward:
    """Make the object that runs the model's steps, recorded if the platform records."""
    return platform.make_forward(model, batches)
