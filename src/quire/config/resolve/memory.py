"""Decides how much memory the KV cache gets, and checks that one request of full length fits."""

from __future__ import annotations

from quire.config.kv_pool_size import gib
from quire.config.resolve.adapters import adapter_bytes
from quire.config.resolve.decisions import Decisions
from quire.config.resolve.dtype import number_bytes, weight_bytes
from quire.config.resolve.mapping import decide_packed_weights, decide_weights_folder, free_bytes
from quire.config.resolve.schedule import length_limit
from quire.errors import InvalidParameter, LoadError
from quire.models.kv_pool import (
    SNAPSHOT_SHARE,
    KVPool,
    plan_kv_pool,
    state_bytes,
    suited_block_size,
)
from quire.models.layer_memory import NumberBytes

_BLOCK_SIZE = 32
_BLOCK_REASON = (
    "K/V of a head in a block (8 KiB at 128 values of 16 bits) stay in the L1 cache, and a prefix "
    "hit loses 31 tokens at most"
)
_GPU_BLOCK_REASON = "a head's keys of a block are whole cache lines, a prefix hit loses 31 tokens"
SNAPSHOT_INTERVAL = 1024
"""Tokens of a prompt between snapshots of its recurrent state: what a prefix hit loses at most,
next to the part that is new."""
_LARGEST_CPU_SHARE = 0.9
"""Largest share for K/V of the memory that weights and workspace leave on a CPU, unless
gpu_memory_utilization says otherwise.
"""
_GPU_SHARE = 0.9
"""Share of the GPU's free memory for an engine; the rest is for libraries and other programs."""


def decide_memory(d: Decisions, length: int | None) -> None:
    """Fix block_size, num_blocks, kv_cache_bytes and, where `length` is None, max_model_len.

    Raises LoadError when weights or one request of `length` tokens do not fit.
    """
    number = number_bytes(d.value("dtype"), d.value("kv_dtype"))
    size = _decide_block_size(d, number)
    drafts = d.value("speculation")
    pool = plan_kv_pool(d.model.pool_memories, size, number, drafts.num_tokens if drafts else 0)
    bound = length_limit(d) if length is None else length
    _decide_measuring(d, keeps_tokens=pool.block_bytes > 0)
    # before the blocks, whose room depends on where the weights are
    decide_weights_folder(d, _workspace_bytes(d, bound))
    decide_packed_weights(d)
    num_blocks, reason = _num_blocks(d, pool, bound)
    # before anything is decided by it: an override may name any number
    _check_given(d, num_blocks * pool.block_bytes, reason)
    _check_tier(d, pool)
    fits = pool.longest(num_blocks, bound, is_chunked=d.value("enable_chunked_prefill"))
    if fits < (1 if length is None else length):
        raise LoadError(_refusal(d, pool, num_blocks, bound, fits, reason))
    if length is None:
        d.decide(
            "max_model_len", fits, f"the longest that fits in {num_blocks} blocks, at most {bound}"
        )
    d.decide("num_blocks", num_blocks, reason)
    _decide_utilization(d, num_blocks * pool.block_bytes, bound)
    _decide_snapshots(d, pool)
    d.decide(
        "kv_cache_bytes",
        num_blocks * pool.block_bytes,
        f"num_blocks of {gib(pool.block_bytes)}: {pool.describe()}",
    )
    _note_shortage(d, pool, num_blocks)


def _decide_block_size(d: Decisions, number: NumberBytes) -> int:
    wanted, why = d.args.block_size, "block_size was given"
    if not wanted:
        wanted = _BLOCK_SIZE
        why = _GPU_BLOCK_REASON if d.machine.device == "cuda" else _BLOCK_REASON
    size = suited_block_size(d.model.pool_memories, wanted, number)
    if size < wanted:
        why = f"chunks of attention are whole blocks, which they are not of {wanted} tokens ({why})"
    d.decide("block_size", size, why)
    return size


def _decide_snapshots(d: Decisions, pool: KVPool) -> None:
    state = state_bytes(pool.memories, pool.number)
    if not state:
        d.decide("snapshot_interval", None, "no layer has a recurrent state")
    elif not d.value("enable_prefix_caching"):
        d.decide("snapshot_interval", None, "enable_prefix_caching=False")
    else:
        copies = f"{pool.num_drafts + 2} times" if pool.num_drafts else "twice"
        d.decide(
            "snapshot_interval",
            SNAPSHOT_INTERVAL,
            f"a request's recurrent state takes {gib(state)}, and {copies} that while it runs; "
            f"snapshots of prompts have at most {SNAPSHOT_SHARE:.0%} of the blocks",
        )


def _check_given(d: Decisions, kv_cache_bytes: int, reason: str) -> None:
    """Raise LoadError for more K/V memory than there can be, before it is asked for."""
    total = d.machine.total_memory_bytes
    if kv_cache_bytes > total:
        raise LoadError(
            f"The KV cache would take {gib(kv_cache_bytes)} ({reason}), and "
            f"{d.machine.memory_limit_source} has {gib(total)} in all. Give it less."
        )


def _check_tier(d: Decisions, pool: KVPool) -> None:
    """Raise InvalidParameter for host memory that no block fits in."""
    tier = d.value("kv_tier")
    if tier is not None and tier.host_bytes < pool.block_bytes:
        name = "kv_offloading_size" if d.args.kv_offloading_size else "kv_transfer_config"
        allowed = f"a block of K/V takes {gib(pool.block_bytes)}"
        raise InvalidParameter(name, vars(d.args)[name], allowed, "Give more memory.")


def _decide_measuring(d: Decisions, *, keeps_tokens: bool) -> None:
    """Fix measures_memory. Raises InvalidParameter for blocks in a model that keeps none."""
    args = d.args
    is_fixed = args.num_gpu_blocks_override is not None or args.kv_cache_memory_bytes is not None
    if is_fixed and not keeps_tokens:
        name = "num_gpu_blocks_override"
        name = name if args.kv_cache_memory_bytes is None else "kv_cache_memory_bytes"
        allowed = "the model keeps no keys and values"
        raise InvalidParameter(name, vars(args)[name], allowed, "Leave it out.")
    if d.machine.device != "cuda" or is_fixed or not keeps_tokens:
        d.decide("measures_memory", False, "num_blocks is final")
    else:
        d.decide("measures_memory", True, "the worker measures what a step leaves of the GPU")


def _decide_utilization(d: Decisions, kv_cache_bytes: int, length: int) -> None:
    """Fix memory_utilization, given or from sizes: a share of all memory, not of what is free."""
    share = _given_share(d)
    if share is None:
        bytes_taken, taken = _taken(d, length)
        total = d.machine.total_memory_bytes
        share = round(min(1.0, max(0.01, (bytes_taken + kv_cache_bytes) / total)), 2)
        why = f"{taken} and the KV cache, of {gib(total)} in all"
    elif d.args.gpu_memory_utilization is None:
        why = "of the GPU's free memory; the default"
    else:
        why = "gpu_memory_utilization was given: of the memory that is free now"
    d.decide("memory_utilization", share, why)


def _given_share(d: Decisions) -> float | None:
    """The share of free memory that bounds the engine; None where sizes follow from elsewhere."""
    if d.args.gpu_memory_utilization is None and d.value("measures_memory"):
        return _GPU_SHARE
    return d.args.gpu_memory_utilization


def _num_blocks(d: Decisions, pool: KVPool, length: int) -> tuple[int, str]:
    """Number of blocks of the pool, including the null block."""
    args = d.args
    if args.num_gpu_blocks_override is not None:
        return args.num_gpu_blocks_override, "num_gpu_blocks_override was given"
    if args.kv_cache_memory_bytes is not None:
        return args.kv_cache_memory_bytes // pool.block_bytes, (
            f"kv_cache_memory_bytes={gib(args.kv_cache_memory_bytes)} was given"
        )
    room, source = _room(d, pool, length)
    if not pool.block_bytes:
        return 1, "the model keeps nothing of a request"
    if d.value("measures_memory"):
        source = f"an estimate until it is measured: {source}"
    seqs, step = d.value("max_num_seqs"), d.value("max_num_batched_tokens")
    # more could only keep prefixes for longer
    enough = pool.enough(seqs, length, step)
    if enough * pool.block_bytes <= room:
        extra = ", and for snapshots" if state_bytes(pool.memories, pool.number) else ""
        return enough, f"enough for max_num_seqs={seqs} requests of {length} tokens{extra}"
    return room // pool.block_bytes, source


def _room(d: Decisions, pool: KVPool, length: int) -> tuple[int, str]:
    """Bytes for the KV cache, by what is free now, and the sum in words."""
    free, share = free_bytes(d), _given_share(d)
    bytes_taken, taken = _taken(d, length)
    if share is None:
        room, source = _room_on_a_shared_machine(
            free - bytes_taken, pool.block_bytes * (1 + _least_blocks(d, pool, length))
        )
        source += f" what {taken} leave of the {gib(free)} free now"
    else:
        room = int(free * share) - bytes_taken
        source = f"gpu_memory_utilization={share:g} of the {gib(free)} free now, less {taken}"
    if room <= 0:
        raise LoadError(
            f"No memory is left for the KV cache: {taken}, and {gib(free)} are free now "
            f"({d.machine.memory_limit_source} has {gib(d.machine.total_memory_bytes)}"
            + ("" if share is None else f", gpu_memory_utilization={share:g}")
            + f"). Weights are in memory: {d.reason('weights_folder')}. Free memory, lower "
            "max_num_seqs, or set kv_cache_memory_bytes."
        )
    return room, source


def _taken(d: Decisions, length: int) -> tuple[int, str]:
    """The bytes of weights, adapters and workspace, and the sum in words."""
    weights, workspace, adapters = weight_bytes(d), _workspace_bytes(d, length), adapter_bytes(d)
    text = f"weights {gib(weights)}"
    offload = d.value("offload")
    if offload is not None:
        weights -= offload.saved_bytes
        text = f"weights {gib(weights)} and {gib(offload.host_bytes)} on the host"
    if d.value("weights_folder") is not None:
        # mapped pages are given back under pressure, unlike the pool
        weights, text = 0, "weights in a file"
    text += f", adapters {gib(adapters)}" if adapters else ""
    text += f", workspace {gib(workspace)}"
    tier = d.value("kv_tier")
    # on a GPU these bytes are the host's, and the memory that is planned is the GPU's
    if tier is not None and d.machine.device == "cpu":
        return weights + adapters + workspace + tier.host_bytes, (
            f"{text}, K/V outside of the pool {gib(tier.host_bytes)}"
        )
    return weights + adapters + workspace, text


def _room_on_a_shared_machine(left: int, one_request: int) -> tuple[int, str]:
    """Half of the memory that is left, or as much as one request of full length needs."""
    half, most = left // 2, int(left * _LARGEST_CPU_SHARE)
    # better more than half than an engine that cannot serve its own length
    if half < one_request <= most:
        return one_request, "one request of full length, which is more than half of"
    return half, "a CPU's memory is shared: half of"


def _workspace_bytes(d: Decisions, length: int) -> int:
    """An upper estimate of what a step needs besides weights and K/V.

    Activations of the step's tokens (a few of the hidden width, two of the widest), the fp32 logits
    of all rows with the sampler's copies, and the token history.
    """
    model, seqs = d.model, d.value("max_num_seqs")
    activations = d.value("max_num_batched_tokens") * (4 * model.hidden_size + 2 * model.widest)
    drafts = d.value("speculation")
    logits = 4 * (seqs + (drafts.max_drafts if drafts else 0)) * model.vocab_size
    return int(4 * (activations + logits + seqs * length))


def _least_blocks(d: Decisions, pool: KVPool, length: int) -> int:
    return pool.least_blocks(length, is_chunked=d.value("enable_chunked_prefill"))


def _refusal(
    d: Decisions, pool: KVPool, num_blocks: int, length: int, fits: int, reason: str
) -> str:
    needed = _least_blocks(d, pool, length)
    sizes = " or ".join(map(str, pool.block_sizes))
    advice = f"Pass max_model_len={fits} (or -1)" if fits else "Use a smaller block_size"
    return (
        f"One request of max_model_len={length} needs {needed} KV blocks of {sizes} "
        f"tokens ({gib(needed * pool.block_bytes)}), but there are {max(num_blocks - 1, 0)} "
        f"({reason}). {advice}, or give the KV cache more memory with kv_cache_memory_bytes."
    )


def _note_shortage(d: Decisions, pool: KVPool, num_blocks: int) -> None:
    if not pool.block_bytes:
        return
    seqs, length = d.value("max_num_seqs"), d.value("max_model_len")
    together = (num_blocks - 1) / _least_blocks(d, pool, length)
    if together < seqs:
        d.note(
            f"The KV cache holds {together:.1f} requests of {length} tokens at once; up to {seqs} "
            "shorter ones run together."
        )
