"""The only place where a plan becomes an engine: it takes the plan apart and hands out values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch

from quire.config.plan import EnginePlan
from quire.config.resolve.dtype import number_bytes
from quire.distributed.expert_exchange import ExpertExchange, Group
from quire.engine.client.inproc import InprocClient
from quire.engine.core.core import EngineCore
from quire.engine.core.structured_outputs import vocabulary_source
from quire.errors import InvalidParameter
from quire.executor.kv_sizing import PROBE_BLOCKS, size_kv_cache
from quire.executor.platform import Platform, open_platform
from quire.executor.profiler import Profiler
from quire.executor.uniproc import UniprocExecutor
from quire.executor.worker import Worker
from quire.grammar.compiler import GrammarCompiler
from quire.kernels.cpu.runtime import find_native
from quire.models import find_family, read_spec
from quire.models.decoder import DecoderModel
from quire.models.kv_pool import memories_of, plan_kv_pool
from quire.models.loading.weights import LoadFormat, load_model
from quire.models.spec import Decoder, Moe
from quire.ops import Ops
from quire.params import SamplingParams
from quire.quantization import RECIPES, UNQUANTIZED
from quire.runner.batch import BatchBuilder
from quire.runner.forward.forward import Forward
from quire.runner.forward.lockstep_forward import LockStepForward
from quire.runner.kv_cache import KVCache
from quire.runner.residence import Residence
from quire.runner.rows import Rows
from quire.runner.runner import ModelRunner
from quire.runner.sampling import Sampler, find_logits_processors, make_logits_processors
from quire.runner.sampling.logprobs import LogprobsMode
from quire.runner.token_head import TokenHead
from quire.runner.warm_up import warm_up
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.settings import SchedulerConfig


def build_client(plan: EnginePlan) -> InprocClient:
    """An engine core in this process, ready to serve."""
    return InprocClient(build_core(plan))


def build_core(
    plan: EnginePlan, target: Platform | None = None, group: Group | None = None
) -> EngineCore:
    """Load the model, allocate the KV cache, put the parts together; `target` None: on the device
    that the plan names. `group` are the cores that the experts are spread over, where the plan says
    so.
    """
    native, _ = find_native()
    restore_threads = _take_torch_threads(plan.num_threads if native is None else 1)
    if target is None:
        target = open_platform(plan)
    exchange = _exchange(plan, group) if plan.enable_expert_parallel else None
    worker = build_worker(plan, target, exchange, on_close=restore_threads)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            num_blocks=worker.model_runner.kv_cache.num_blocks,
            groups=tuple(group.spec for group in worker.model_runner.kv_cache.pool.groups),
            policy=plan.scheduling_policy,
            enable_prefix_caching=plan.enable_prefix_caching,
            enable_chunked_prefill=plan.enable_chunked_prefill,
            long_prefill_token_threshold=plan.long_prefill_token_threshold,
        )
    )
    return EngineCore(
        scheduler,
        UniprocExecutor(worker),
        depth=plan.max_steps_in_flight,
        log_stats=plan.log_stats,
        has_own_memory=not target.is_host,
        grammars=GrammarCompiler(
            vocabulary_source(plan), plan.structured_outputs, plan.num_threads
        ),
        lock_step=exchange,
    )


def _exchange(plan: EnginePlan, group: Group | None) -> ExpertExchange:
    if group is None:
        raise InvalidParameter(
            "enable_expert_parallel", True, "cores that share experts are processes of their own",
            "Use LLM, AsyncLLM or quire serve, which start them.",
        )  # fmt: skip
    blocks = read_spec(plan.hf_config).blocks
    layers = [block.mlp for block in blocks if isinstance(block.mlp, Moe)]
    return ExpertExchange(
        group,
        num_experts=layers[0].experts,
        num_layers=len(layers),
        width=read_spec(plan.hf_config).dim,
        dtype=getattr(torch, plan.dtype),
    )


def build_worker(
    plan: EnginePlan,
    target: Platform,
    exchange: ExpertExchange | None = None,
    on_close: Callable[[], None] | None = None,
) -> Worker:
    """The model with its memory on its device; its experts are spread by `exchange`, if there is
    one.
    """
    device = target.device
    free_at_start = target.free_bytes() if target.free_bytes is not None else 0
    spec = read_spec(plan.hf_config)
    load = _loader(plan, spec, target, exchange)
    model = load()
    kv_cache = _kv_cache(plan, [spec], target.ops)
    pool = kv_cache.pool
    rows = Rows(
        num_rows=plan.max_num_seqs,
        max_len=plan.max_model_len,
        block_sizes=[group.block_size for group in pool.groups],
        device=device,
    )
    sampler = _sampler(plan, spec, target, rows)
    batches = BatchBuilder(
        rows=rows,
        ops=target.ops,
        device=device,
        pool=pool,
        kv=kv_cache.layers,
        capacity=plan.max_num_batched_tokens,
        sizes=target.sizes,
    )
    forward = record_steps(target, model, batches)
    if exchange is not None:
        forward = LockStepForward(forward, exchange)
    runner = ModelRunner(
        model=model,
        rows=rows,
        batches=batches,
        kv_cache=kv_cache,
        device=device,
        forward=forward,
    )
    head = TokenHead(model=model, forward=forward, rows=rows, sampler=sampler, device=device)
    runner.register(SamplingParams, head)
    if not target.is_host:
        warm_up(
            runner,
            num_tokens=plan.max_num_batched_tokens,
            num_rows=plan.max_num_seqs,
            max_len=plan.max_model_len,
            max_logprobs=plan.max_logprobs,
        )
    if plan.memory_share is not None:
        assert target.free_bytes is not None, "a share of memory that nobody can measure"
        size_kv_cache(
            plan,
            pool,
            runner,
            forward,
            free_at_start=free_at_start,
            free_bytes=target.free_bytes,
        )
    residence = Residence(model=model, kv_cache=kv_cache, forward=forward, load=load, device=device)
    profiler = None if plan.profiler is None else Profiler(plan.profiler)
    return Worker(runner, residence, profiler=profiler, on_close=on_close)


def _loader(
    plan: EnginePlan, spec: Decoder, target: Platform, exchange: ExpertExchange | None
) -> Callable[[], DecoderModel]:
    """What reads the weights, at the start and after sleep."""
    return partial(
        load_model,
        Path(plan.model_folder),
        spec,
        target.ops,
        dtype=getattr(torch, plan.dtype),
        device=target.device.torch,
        load_format=cast(LoadFormat, plan.load_format),
        recipe=UNQUANTIZED if plan.quantization is None else RECIPES[plan.quantization],
        seed=plan.seed,
        max_model_len=plan.max_model_len,
        family=find_family(plan.hf_config),
        spread=exchange,
    )


def _kv_cache(plan: EnginePlan, specs: Sequence[Decoder], ops: Ops) -> KVCache:
    number = number_bytes(plan.dtype, plan.kv_dtype)
    return KVCache(
        ops=ops,
        pool=plan_kv_pool(memories_of(specs), plan.block_size, number),
        num_blocks=plan.num_blocks if plan.memory_share is None else PROBE_BLOCKS,
        dtype=getattr(torch, plan.kv_dtype),
    )


def _sampler(plan: EnginePlan, spec: Decoder, target: Platform, rows: Rows) -> Sampler:
    classes = find_logits_processors(plan.logits_processors)
    return Sampler(
        ops=target.ops,
        num_rows=plan.max_num_seqs,
        vocab_size=spec.vocab,
        device=target.device,
        history=rows,
        max_logprobs=plan.max_logprobs,
        logprobs_mode=cast(LogprobsMode, plan.logprobs_mode),
        logits_processors=make_logits_processors(classes, plan=plan, device=target.device.torch),
    )


def record_steps(target: Platform, model: DecoderModel, batches: BatchBuilder) -> Forward:
    """What runs the model's steps, recorded where the target records."""
    return target.make_forward(model, batches)


def _take_torch_threads(num_threads: int) -> Callable[[], None]:
    """Give torch so many threads; the result restores what it had.

    Beside our own pool torch gets one: a second pool that waits for the same cores ruins both.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    return lambda: torch.set_num_threads(before)
