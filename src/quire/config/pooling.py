"""Whether a model pools, and its pooler: from the options, the files of sentence-transformers, and
the architecture, in this order of precedence (rule 12.1 of the reference).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.config.args.engine_options import EngineOptions
from quire.config.pooler_config import PoolerConfig, pooler_config
from quire.errors import InvalidParameter, LoadError, NotBuiltYet
from quire.models.config_reader import ConfigReader, unsupported
from quire.models.families import pools
from quire.models.pooling.conversion import Form
from quire.models.pooling.keys import label_activation
from quire.models.pooling.sentence_transformers import SentenceFiles
from quire.models.pooling.spec import (
    Classifier,
    PoolerSpec,
    SequencePooling,
    TokenPooling,
    check_dimensions,
)

TokenIds = Callable[[str], int | None]
"""The id of a token's text in the model's vocabulary; None if there is no such token."""

_SEQUENCES: dict[str, SequencePooling] = {"CLS": "cls", "MEAN": "mean", "LAST": "last"}
_TOKENS: dict[str, TokenPooling] = {"ALL": "all", "STEP": "step"}
_TWO_WAYS, _AS_THEY_ARE = "from_2_way_softmax", "no_post_processing"


def choose_form(args: EngineOptions, files: SentenceFiles) -> Form | None:
    """Form of a generator's pooling; None: none. Raises NotBuiltYet for the runner "draft"."""
    runner, convert = args.runner, args.convert
    if runner == "draft":
        raise NotBuiltYet("runner", runner, "Use 'generate' or 'pooling'.")
    # before `convert`: such a model has no other form of pooling
    if files.terms is not None and runner != "generate":
        return "terms"
    if convert in ("embed", "classify"):
        return "embed" if convert == "embed" else "classify"
    if convert == "none" or runner == "generate":
        return None
    return "embed" if runner == "pooling" or files.has_pooling else None


def also_generates(args: EngineOptions) -> bool:
    """Whether a model is to generate and to pool in one engine."""
    return args.runner == "generate" and args.convert in ("embed", "classify")


def reads_pooling_files(args: EngineOptions) -> bool:
    """Whether the files of sentence-transformers count: not where a model only generates."""
    return args.runner != "generate" or also_generates(args)


def check_runner(args: EngineOptions, architecture: str, pooler: PoolerSpec | None) -> None:
    """Raise InvalidParameter where the model is not what `runner` or `convert` asks for."""
    if args.runner == "pooling" and pooler is None:
        allowed = f"{architecture} generates, and convert='none' keeps it so"
        raise InvalidParameter("runner", "pooling", allowed, "Leave `convert` out.")
    is_generator = also_generates(args) and not pools(architecture)
    if args.runner == "generate" and pooler is not None and not is_generator:
        allowed = f"{architecture} has no language-model head"
        raise InvalidParameter("runner", "generate", allowed, "Leave it out, or use 'pooling'.")
    if pooler is None:
        if args.pooler_config:
            allowed = "the model generates and has no pooler"
            hint = "Pass runner='pooling', or leave it out."
            raise InvalidParameter("pooler_config", args.pooler_config, allowed, hint)
        return
    if args.convert in ("embed", "classify") and args.convert not in pooler.tasks:
        allowed = f"{architecture} is a pooler already, of {', '.join(pooler.tasks)}"
        raise InvalidParameter("convert", args.convert, allowed, "Leave it out.")


@dataclass(frozen=True, slots=True)
class _Sources:
    """Sources of a pooler's settings."""

    asked: PoolerConfig
    files: SentenceFiles
    config: Mapping[str, Any]
    token_ids: TokenIds


def finished_pooler(
    args: EngineOptions,
    pooler: PoolerSpec,
    files: SentenceFiles,
    config: Mapping[str, Any],
    dim: int,
    token_ids: TokenIds,
) -> tuple[PoolerSpec, str]:
    """The pooler with everything decided, and why. `dim`: numbers of a hidden state."""
    s = _Sources(pooler_config(args.pooler_config), files, config, token_ids)
    pooler = _with_types(_with_terms(pooler, s), s)
    pooler = replace(pooler, also_generates=also_generates(args))
    if pooler.classifier is None:
        _check_widths(files, dim * len(pooler.poolings))
        pooler = replace(pooler, dense=files.dense or pooler.dense)
        if files.has_token_vectors:
            pooler = replace(pooler, tasks=("token_embed",))
        if pooler.more_poolings:
            pooler = replace(pooler, tasks=("embed",))
    elif pooler.more_poolings:
        raise LoadError("A classifier reads one pooling, and modules.json joins several.")
    else:
        pooler = replace(pooler, classifier=_finished_classifier(pooler.classifier, s))
    pooler = replace(pooler, tasks=_served_first(pooler, s.asked))
    if s.asked.dimensions is not None:
        check_dimensions(pooler, s.asked.dimensions, pooler.width(dim), "this model")
        pooler = replace(pooler, dimensions=s.asked.dimensions)
    return pooler, _reason(args, s)


def _with_terms(pooler: PoolerSpec, s: _Sources) -> PoolerSpec:
    """The pooler, whose sparse vectors are as the files say. Raises LoadError for a model that has
    none, InvalidParameter for another pooling.
    """
    found, asked = s.files.terms, s.asked.seq_pooling_type or s.asked.tok_pooling_type
    if pooler.terms is None:
        if found is not None:
            raise LoadError(
                "SpladePooling needs what predicts masked tokens in BERT, RoBERTa, XLM-RoBERTa, "
                "CamemBERT, DistilBERT or ModernBERT, which this model does not have."
            )
        return pooler
    if asked is not None:
        allowed = "sparse vectors have no other pooling than that of their files"
        raise InvalidParameter("pooling_type", asked, allowed, "Leave it out.")
    if found is None:
        return pooler
    terms = replace(pooler.terms, pooling=found.pooling, is_damped=found.is_damped)
    return replace(pooler, terms=terms)


def _check_widths(files: SentenceFiles, dim: int) -> None:
    """Raise LoadError for a Dense layer that does not read what the one before it gives."""
    for layer, inputs in zip(files.dense, files.dense_inputs, strict=True):
        if inputs != dim:
            raise LoadError(f"{layer.file}: in_features={inputs}, but its inputs have {dim}.")
        dim = layer.width


def _with_types(pooler: PoolerSpec, s: _Sources) -> PoolerSpec:
    asked, files = s.asked, s.files
    poolings, token_pooling = pooler.poolings, pooler.token_pooling
    if asked.seq_pooling_type is not None:
        poolings = (_SEQUENCES[asked.seq_pooling_type],)
    elif files.poolings:
        poolings = files.poolings
    if asked.tok_pooling_type is not None:
        token_pooling = _TOKENS[asked.tok_pooling_type]
    activates = pooler.activates
    if asked.use_activation is not None:
        activates = asked.use_activation
    elif files.normalizes is not None and pooler.classifier is None:
        activates = files.normalizes
    step_tag = pooler.step_tag if asked.step_tag_id is None else asked.step_tag_id
    if token_pooling != "step" and (asked.step_tag_id or asked.returned_token_ids):
        allowed = "step_tag_id and returned_token_ids belong to tok_pooling_type='STEP'"
        raise InvalidParameter("pooler_config", asked, allowed)
    returned = asked.returned_token_ids
    return replace(
        pooler,
        pooling=poolings[0],
        more_poolings=poolings[1:],
        token_pooling=token_pooling,
        activates=activates,
        step_tag=step_tag,
        returned_ids=pooler.returned_ids if returned is None else returned,
        similarity=files.similarity or pooler.similarity,
    )


def _served_first(pooler: PoolerSpec, asked: PoolerConfig) -> tuple[Any, ...]:
    if asked.task is None:
        return pooler.tasks
    if asked.task not in pooler.tasks:
        allowed = f"this model can do {', '.join(pooler.tasks)}"
        raise InvalidParameter("pooler_config['task']", asked.task, allowed)
    return (asked.task, *(task for task in pooler.tasks if task != asked.task))


def _finished_classifier(c: Classifier, s: _Sources) -> Classifier:
    mean, deviation = s.asked.logit_mean, s.asked.logit_sigma
    c = replace(
        c,
        mean=c.mean if mean is None else mean,
        deviation=c.deviation if deviation is None else deviation,
    )
    tokens, method = s.config.get("classifier_from_token"), s.config.get("method")
    if tokens is None:
        return c
    # the overrides that are documented for it leave the method out
    if s.config.get("is_original_qwen3_reranker") and method is None:
        method = _TWO_WAYS
    if method not in (_TWO_WAYS, _AS_THEY_ARE):
        raise unsupported("method", method, f"{_TWO_WAYS}, {_AS_THEY_ARE}")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise unsupported("classifier_from_token", tokens, "a list of tokens")
    if method == _TWO_WAYS and len(tokens) != 2:
        raise unsupported("classifier_from_token", tokens, "two tokens, of false and of true")
    count = 1 if method == _TWO_WAYS else len(tokens)
    return Classifier(
        count,
        label_activation(ConfigReader(s.config), count),
        mean=c.mean,
        deviation=c.deviation,
        token_ids=tuple(_token_id(token, s) for token in tokens),
        is_difference=method == _TWO_WAYS,
    )


def _token_id(token: str, s: _Sources) -> int:
    found = s.token_ids(token)
    if found is None:
        raise unsupported("classifier_from_token", token, "tokens of the model's vocabulary")
    return found


def _reason(args: EngineOptions, s: _Sources) -> str:
    if args.pooler_config:
        return "pooler_config, then the model's files"
    if s.files.has_pooling:
        return "modules.json of sentence-transformers"
    return "the architecture of config.json"
