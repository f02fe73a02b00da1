"""Rules 12.3 to 12.6: length, chunks, and how many tokens and requests a step may have."""

from __future__ import annotations

from quire.config.resolve.decisions import Decisions
from quire.errors import InvalidParameter
from quire.tiers.kv_transfer_config import NAME, moves_whole_blocks

DEFAULT_LENGTH = 2048
"""Tokens of a model whose config.json names no length."""
_DEFAULT_TOKENS = 4096
_DEFAULT_TOKENS_SERVING = 2048
"""Tokens of a step on a CPU that serves: one of more takes seconds, and every stream waits for it.
"""
_DEFAULT_TOKENS_GPU = 8192
_DEFAULT_SEQS = 256
_STALL_S = 0.25
_QUEUED_BATCHES = 16
_QUEUED_TOKENS = 2**22


def decide_schedule(d: Decisions) -> int | None:
    """Fix the schedule and give back the longest context; None: whatever fits in memory."""
    length = _length(d)
    # memory decides later, which needs the budget of steps: until then the model's limit bounds it
    bound = length if length is not None else length_limit(d)
    _decide_switches(d)
    _decide_budget(d, bound, d.value("enable_chunked_prefill"))
    _decide_stall(d)
    _decide_queue(d)
    d.requested("scheduling_policy")
    d.requested("long_prefill_token_threshold")
    return length


def length_limit(d: Decisions) -> int:
    """The longest context that the model allows."""
    limit = d.model.length.limit
    return DEFAULT_LENGTH if limit is None else limit


def _length(d: Decisions) -> int | None:
    """The requested length; None if it follows from memory."""
    given, known = d.args.max_model_len, d.model.length
    if given == -1:
        return None
    if given == 0:
        raise InvalidParameter("max_model_len", 0, "at least 1, -1 or None")
    if given is None:
        length = DEFAULT_LENGTH if known.default is None else known.default
        if known.default is None:
            d.note(f"{known.source}; max_model_len={length} is a guess: pass the real one.")
        d.decide("max_model_len", length, known.source)
        return length
    if known.limit is not None and given > known.limit:
        allowed = f"the model's limit is {known.limit} ({known.source})"
        hint = "To go beyond it, change the key itself with hf_overrides."
        raise InvalidParameter("max_model_len", given, allowed, hint)
    _warn_of_longer(d, given)
    d.decide("max_model_len", given, "max_model_len was given")
    return given


def _warn_of_longer(d: Decisions, given: int) -> None:
    default = d.model.length.default
    if default is not None and given > default:
        d.note(
            f"max_model_len={given} is longer than {default} ({d.model.length.source}): all "
            "positions use the long form's frequencies, which changes answers to short prompts too."
        )


def _decide_switches(d: Decisions) -> None:
    for name in ("enable_prefix_caching", "enable_chunked_prefill"):
        given = vars(d.args)[name]
        why = "the default" if given is None else f"{name} was given"
        if _sees_whole_prompts(d):
            if given:
                allowed = "tokens of this model see those after them: prompts are computed whole"
                raise InvalidParameter(name, True, allowed, "Leave it out.")
            given, why = False, "tokens see those after them, so prompts are computed whole"
        if name == "enable_prefix_caching" and given is None and _needs_every_token(d):
            given, why = False, "pooling needs the hidden state of each token"
        if name == "enable_prefix_caching" and d.value("hidden_states") is not None:
            if given:
                allowed = "the hidden states of cached tokens would not be computed"
                raise InvalidParameter(name, True, allowed, "Leave it out.")
            given, why = False, "hidden states are written for each token of a prompt"
        if name == "enable_prefix_caching" and _loses_routed_experts(d):
            given, why = False, "windows give blocks back, and their tokens' experts with them"
        d.decide(name, True if given is None else given, why)
    overlap, stages = d.args.async_scheduling, d.value("pipeline_parallel_size")
    connector = d.value("kv_connector")
    if connector is not None and not d.value("enable_prefix_caching"):
        allowed = "it goes with prefix caching, whose names K/V is found by"
        raise InvalidParameter(NAME, connector.kv_connector, allowed, "Leave one of them out.")
    # with fewer steps in flight some stages would always wait
    if stages > 1:
        why = "a step for each stage" + (", whatever async_scheduling says" if overlap else "")
        d.decide("max_steps_in_flight", stages, why)
    elif connector is not None and not moves_whole_blocks(connector):
        if overlap:
            allowed = f"the hooks of {connector.kv_connector} belong to one step at a time"
            raise InvalidParameter("async_scheduling", True, allowed, "Leave it out.")
        d.decide("max_steps_in_flight", 1, f"hooks of {connector.kv_connector} are of one step")
    elif overlap is None and d.machine.device == "cuda":
        d.decide("max_steps_in_flight", 2, "the next step is planned while the GPU runs one")
    elif overlap is None:
        d.decide(
            "max_steps_in_flight", 1, "on a CPU the scheduler and the step would share the cores"
        )
    else:
        d.decide("max_steps_in_flight", 2 if overlap else 1, f"async_scheduling={overlap}")


def _sees_whole_prompts(d: Decisions) -> bool:
    """Whether layers see the tokens of their own step alone."""
    return any(memory is None for memory in d.model.memories)


def _needs_every_token(d: Decisions) -> bool:
    """Whether no result can begin after tokens whose K/V are cached."""
    if d.value("generates"):
        return False  # requests that need each token say so
    pooler = d.value("pooler")
    return bool(pooler.poolings != ("last",) or pooler.token_pooling == "step")


def _loses_routed_experts(d: Decisions) -> bool:
    """Whether experts are to be reported that no block of full attention keeps."""
    memories = d.model.memories
    is_kept = any(memory is not None and memory.kind == "full" for memory in memories)
    return bool(d.value("enable_return_routed_experts")) and not is_kept


def _decide_budget(d: Decisions, length: int, chunked: bool) -> None:
    """Fix max_num_seqs and max_num_batched_tokens; defaults bend to what was given."""
    given_tokens, given_seqs = d.args.max_num_batched_tokens, d.args.max_num_seqs
    seqs = _DEFAULT_SEQS if given_seqs is None else given_seqs
    tokens, why = _tokens(given_tokens, seqs, length, chunked, *_default_tokens(d))
    # a prompt of full length could never be computed
    if not chunked and tokens < length:
        allowed = f"at least max_model_len={length}, since enable_chunked_prefill is off"
        raise InvalidParameter("max_num_batched_tokens", tokens, allowed)
    if given_seqs is not None and tokens < given_seqs:
        allowed = f"at least max_num_seqs={given_seqs}: each needs one token a step"
        raise InvalidParameter("max_num_batched_tokens", tokens, allowed)
    d.decide("max_num_batched_tokens", tokens, why)
    if given_seqs is not None:
        d.decide("max_num_seqs", given_seqs, "max_num_seqs was given")
    elif tokens < seqs:
        d.decide("max_num_seqs", tokens, "not more requests than tokens in a step")
    else:
        d.decide("max_num_seqs", seqs, "the default for programs")


def _decide_stall(d: Decisions) -> None:
    """Fix max_stall_s, the time that a step may take while streams wait for it."""
    given = d.args.max_stall_ms
    if given is not None:
        seconds = given / 1000 if given else None
        d.decide("max_stall_s", seconds, "max_stall_ms was given")
    elif d.value("distributed_executor_backend") == "external_launcher":
        why = "engines that plan the same steps, each for itself, do not look at the clock"
        d.decide("max_stall_s", None, why)
    elif d.args.max_num_batched_tokens is not None:
        why = "max_num_batched_tokens was given, and bounds what streams wait for"
        d.decide("max_stall_s", None, why)
    elif d.args.serves_several_callers:
        why = (
            "the default for servers: prompts get what measured speeds allow, or five times what "
            "reading the weights takes where that is longer than 1.2 times this"
        )
        d.decide("max_stall_s", _STALL_S, why)
    else:
        d.decide("max_stall_s", None, "programs that wait for all answers gain nothing by it")


def _decide_queue(d: Decisions) -> None:
    """Bounds the queue of a serving engine; offline callers are never refused."""
    if d.args.max_num_queued_reqs is None:
        unfinished = _QUEUED_BATCHES * d.value("max_num_seqs")
        d.decide("max_num_queued_reqs", unfinished, f"{_QUEUED_BATCHES} * max_num_seqs")
    else:
        d.requested("max_num_queued_reqs")
    if d.args.max_num_queued_tokens is None:
        why = "the ids of the prompts that wait take some 150 MB at most"
        d.decide("max_num_queued_tokens", _QUEUED_TOKENS, why)
    else:
        d.requested("max_num_queued_tokens")


def _tokens(
    given: int | None, seqs: int, length: int, chunked: bool, default: int, why_default: str
) -> tuple[int, str]:
    if given is not None:
        return given, "max_num_batched_tokens was given"
    if not chunked and length > default:
        return length, "a whole prompt at once, since enable_chunked_prefill is off"
    if seqs > default:
        return seqs, "one token for each of max_num_seqs"
    if seqs * length < default:
        return seqs * length, "max_num_seqs * max_model_len: there are never more"
    return default, why_default


def _default_tokens(d: Decisions) -> tuple[int, str]:
    is_gpu = d.machine.device == "cuda"
    if d.args.serves_several_callers and not is_gpu:
        why = "the default for servers: what runs waits for the prompts of a step"
        return _DEFAULT_TOKENS_SERVING, why
    default = _DEFAULT_TOKENS_GPU if is_gpu else _DEFAULT_TOKENS
    return default, "the default for programs: long prompts in few steps"
