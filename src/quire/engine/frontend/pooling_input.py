"""Makes the messages of pooling requests: completes their parameters, and cuts their prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine.wire.messages import EngineCoreRequest
from quire.errors import InvalidParameter, PromptTooLong
from quire.models.pooling.spec import PoolerSpec, check_dimensions
from quire.params import PoolingParams, checks
from quire.params.pooling import MOST_READ, SECOND_TEXT, TOKEN_TASKS
from quire.prompts import ParsedPrompt
from quire.text.tokenizer import Tokenizer, encode_prompt

TRUNCATE = "truncate_prompt_tokens"
"""The name in `tokenization_kwargs` and in parameters: at most as many tokens are left."""


@dataclass(frozen=True, slots=True)
class PoolingFacts:
    """A pooler as requests are checked against it. `width`: numbers of a whole vector. `name`: the
    model's. `lowers_input`: texts are made small letters.
    """

    pooler: PoolerSpec
    width: int
    name: str
    lowers_input: bool = False

    def size(self, dimensions: int | None) -> int:
        """Numbers of a vector that is cut to `dimensions`, where it can be."""
        return min(dimensions or self.pooler.dimensions or self.width, self.width)


def completed(params: PoolingParams, facts: PoolingFacts) -> PoolingParams:
    """A copy of the parameters with everything that the model decides. Raises InvalidParameter."""
    own, pooler = params.clone(), facts.pooler
    own.validate()
    own.task = _task(own.task, pooler)
    if own.dimensions is not None:
        check_dimensions(pooler, own.dimensions, facts.width, facts.name)
    if own.compared_with is not None:
        width = facts.size(own.dimensions)
        if own.compared_with.shape[-1] != width:
            allowed = f"vectors of this request have {width} numbers"
            raise InvalidParameter("compared_with", own.compared_with.shape, allowed)
    for name in MOST_READ:
        if limit := (own.extra_kwargs or {}).get(name):
            raise InvalidParameter(
                name, limit, "it bounds the texts of a pair, which score() takes"
            )
    if own.second_text_at is not None:
        _check_types(SECOND_TEXT, own.second_text_at, pooler)
    _complete_steps(own, pooler)
    if own.skip_reading_prefix_cache is None:
        own.skip_reading_prefix_cache = False
    if own.task in TOKEN_TASKS or pooler.poolings != ("last",):
        own.skip_reading_prefix_cache = True  # a cached block has no hidden states
    return own


def set_types(own: PoolingParams, types: list[int], facts: PoolingFacts) -> None:
    """Have the tokens of a prompt these types, which are 0 up to some place and 1 from there on.
    Raises InvalidParameter for a model whose tokens have none, and for two statements.
    """
    if 1 not in types:
        return
    _check_types("token_type_ids", types, facts.pooler)
    if own.second_text_at is not None:
        allowed = f"extra_kwargs[{SECOND_TEXT!r}] says it, too"
        raise InvalidParameter("token_type_ids", types, allowed, "Give one of them.")
    own.extra_kwargs = {**(own.extra_kwargs or {}), SECOND_TEXT: types.index(1)}


def _check_types(name: str, value: object, pooler: PoolerSpec) -> None:
    """Raise InvalidParameter unless tokens of a second text have a type of their own."""
    if not pooler.tells_texts_apart:
        allowed = "tokens of a second text have no type of their own in this model"
        raise InvalidParameter(name, value, allowed, "Leave it out.")


def _task(asked: str | None, pooler: PoolerSpec) -> str:
    if asked is None:
        return next((t for t in TOKEN_TASKS if t in pooler.tasks), pooler.tasks[0])
    if asked not in pooler.tasks:
        raise InvalidParameter("task", asked, f"this model can do {', '.join(pooler.tasks)}")
    return asked


def _complete_steps(own: PoolingParams, pooler: PoolerSpec) -> None:
    """Fill in what belongs to the tokens that STEP pooling keeps."""
    is_step = pooler.token_pooling == "step" and own.task in TOKEN_TASKS
    for name in ("step_tag_id", "returned_token_ids"):
        value = getattr(own, name)
        if value is not None and not is_step:
            allowed = f"the task {own.task} of this model does not take it: it belongs to STEP"
            raise InvalidParameter(name, value, allowed)
    if is_step:
        own.requires_token_ids = True
        if own.step_tag_id is None:
            own.step_tag_id = pooler.step_tag
        if own.returned_token_ids is None and pooler.returned_ids:
            own.returned_token_ids = list(pooler.returned_ids)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keeps at most `limit` tokens of a prompt: the last ones if "left" is cut, else the first."""

    limit: int
    side: str

    def of(self, ids: list[int]) -> list[int]:
        if len(ids) <= self.limit:
            return ids
        return ids[len(ids) - self.limit :] if self.side == "left" else ids[: self.limit]


def take_truncation(
    kwargs: Mapping[str, Any] | None, max_model_len: int, default_side: str
) -> tuple[dict[str, Any], Truncation | None]:
    """The arguments of the tokenizer, which cuts texts so that special tokens stay, and how ids
    are cut. `truncate_prompt_tokens` -1 is the model's limit. Raises InvalidParameter.
    """
    left = dict(kwargs or {})
    asked, side = left.pop(TRUNCATE, None), left.pop("truncation_side", None)
    if side not in (None, "left", "right"):
        raise InvalidParameter("truncation_side", side, "it must be 'left' or 'right'")
    if asked is None:
        return left, None
    allowed = f"it must be -1, or a number of tokens from 1 to max_model_len={max_model_len}"
    if isinstance(asked, int) and asked > max_model_len:
        raise InvalidParameter(
            TRUNCATE, asked, allowed, "Please request a smaller truncation size."
        )
    limit = checks.integer(TRUNCATE, asked, -1, max_model_len, allowed)
    if limit == 0:
        raise InvalidParameter(TRUNCATE, asked, allowed)
    cut = Truncation(max_model_len if limit == -1 else limit, side or default_side)
    return {**left, "max_length": cut.limit, "truncation_side": cut.side}, cut


def with_truncation(kwargs: Mapping[str, Any] | None, asked: int) -> Mapping[str, Any]:
    """Arguments of the tokenizer, with the truncation of the parameters where they have none."""
    return {TRUNCATE: asked, **(kwargs or {})}


def padded(ids: list[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """The ids with padding tokens up to a length (`padding="max_length"`), which count as any
    others: models that were trained so have no mask (SigLIP). Raises InvalidParameter.
    """
    if tokenizer.pad_token_id is None:
        allowed = "the tokenizer has no padding token"
        raise InvalidParameter("padding", "max_length", allowed, "Leave it out.")
    return ids + [tokenizer.pad_token_id] * (length - len(ids))


class PoolingInputs:
    """Makes the messages of requests with PoolingParams; prompts may fill the whole model."""

    def __init__(
        self, tokenizer: Tokenizer | None, facts: PoolingFacts, *, vocab_size: int, max_len: int
    ) -> None:
        self._tokenizer = tokenizer
        self._facts = facts
        self._vocab_size = vocab_size
        self._max_len = max_len

    def process(
        self,
        parsed: ParsedPrompt,
        params: PoolingParams,
        tokenization_kwargs: Mapping[str, Any] | None,
        **known: Any,
    ) -> EngineCoreRequest:
        own = completed(params, self._facts)
        side = "right" if self._tokenizer is None else self._tokenizer.truncation_side
        if own.truncate_prompt_tokens is not None:
            tokenization_kwargs = with_truncation(tokenization_kwargs, own.truncate_prompt_tokens)
        kwargs, cut = take_truncation(tokenization_kwargs, self._max_len, side)
        is_padded = kwargs.pop("padding", None) == "max_length"
        if parsed.token_ids is None:
            text = parsed.text or ""
            text = text.lower() if self._facts.lowers_input else text
            ids = encode_prompt(self._tokenizer, text, kwargs)
            if is_padded and self._tokenizer is not None:
                ids = padded(ids, kwargs.get("max_length") or self._max_len, self._tokenizer)
        else:
            ids = parsed.token_ids if cut is None else cut.of(parsed.token_ids)
        checks.prompt_ids(ids, parsed.text, self._vocab_size)
        if len(ids) > self._max_len:
            raise PromptTooLong(len(ids), self._max_len, has_output=False)
        if (types := parsed.token_types) is not None:
            set_types(own, types if cut is None else cut.of(types), self._facts)
        return EngineCoreRequest(prompt_token_ids=ids, params=own, seed=0, **known)
