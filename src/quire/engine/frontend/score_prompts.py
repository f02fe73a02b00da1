"""Two texts as the prompts that a score is made of. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from quire.engine.frontend.pooling_input import PoolingFacts, take_truncation
from quire.errors import InvalidParameter, InvalidType
from quire.params import PoolingParams
from quire.params.pooling import MOST_READ, SECOND_TEXT
from quire.prompts import TokensPrompt
from quire.text.encode_options import encode_options
from quire.text.tokenizer import Tokenizer

_RESERVED = ("chat_template", "tools", "tokenize")


class Content(NamedTuple):
    """A text with pictures: the parts of a message."""

    parts: list[Any]


ScoredText: TypeAlias = str | Content
"""One side of a pair."""


def text_or_content(name: str, given: Mapping[str, Any]) -> ScoredText:
    """The text of `{"text": ...}` or `{"content": [...]}`. Raises InvalidParameter."""
    if given.keys() == {"text"} and isinstance(given["text"], str):
        return given["text"]
    parts = given.get("content")
    if given.keys() != {"content"} or not isinstance(parts, list) or not parts:
        allowed = 'it must be a string, {"text": ...} or {"content": [...]}'
        raise InvalidParameter(name, given, allowed)
    if any(not _is_text(part) for part in parts):
        return Content(parts)
    for part in parts:
        if not isinstance(part["text"], str):
            allowed = 'a part is {"type": "text", "text": "..."}'
            raise InvalidParameter(f"{name}.content", part, allowed)
    return "".join(part["text"] for part in parts)


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type", "text") == "text" and "text" in part


def check_uncut(most_read: int) -> None:
    """Raise InvalidParameter where a text with pictures is to be cut; 0: it is not."""
    if most_read:
        allowed = "a text with pictures is not cut"
        raise InvalidParameter(MOST_READ[1], most_read, allowed, "Leave it out.")


def paired(first: object, second: object) -> tuple[list[Any], list[Any]]:
    """Pair texts: the first has one for all, or one each. Raises InvalidParameter for others."""
    left, right = _texts("data_1", first), _texts("data_2", second)
    if not left:
        raise InvalidParameter("data_1", first, "at least one text element must be given")
    if not right:
        raise InvalidParameter("data_2", second, "at least one text_pair element must be given")
    if len(left) not in (1, len(right)):
        allowed = "input lengths must be either 1:1, 1:N or N:N"
        raise InvalidParameter("data_1", f"<{len(left)} for {len(right)} items>", allowed)
    return left, right


def _texts(name: str, given: object) -> list[Any]:
    if isinstance(given, str):
        return [given]
    if isinstance(given, Mapping):
        return [text_or_content(name, given)]
    if not isinstance(given, Sequence):
        raise InvalidType(name, given, "it must be a text or a list of texts")
    if given and all(isinstance(one, int) for one in given):
        return [list(given)]
    for one in given:
        if not isinstance(one, str | list | tuple | Mapping):
            raise InvalidType(name, one, "each item must be a text")
    return [text_or_content(name, one) if isinstance(one, Mapping) else one for one in given]


def has_document_first(facts: PoolingFacts, template: str | None) -> bool:
    """Whether a pair's prompt has the document, and what pictures that has, before the query."""
    return template is None and facts.pooler.pair is not None


@dataclass(frozen=True, slots=True)
class TextsRead:
    """Tokens of a pair's two texts that are read (0: all), and the parameters without them."""

    limits: tuple[int, ...]
    params: PoolingParams
    lowers: bool

    @classmethod
    def of(cls, params: PoolingParams, facts: PoolingFacts, max_model_len: int) -> TextsRead:
        """Raises InvalidParameter for more tokens than the model takes."""
        extra = params.extra_kwargs or {}
        limits = tuple(extra.get(name) or 0 for name in MOST_READ)
        for name, limit in zip(MOST_READ, limits, strict=True):
            if limit >= max_model_len:
                allowed = f"it must be below max_model_len={max_model_len}"
                raise InvalidParameter(name, limit, allowed)
        own = params.clone()
        own.extra_kwargs = {k: v for k, v in extra.items() if k not in MOST_READ} or None
        return cls(limits, own, facts.lowers_input)

    def cut(self, tokenizer: Tokenizer, text: str, which: int) -> str:
        """The part of text `which`, 0 or 1, that its first `limits[which]` tokens stand for."""
        text = text.lower() if self.lowers else text
        limit = self.limits[which]
        return tokenizer.beginning(text, limit) if limit else text


@dataclass(frozen=True, slots=True)
class CrossPrompts:
    """Makes one prompt of each pair of texts, for a model that gives it one label.

    `template` (its messages have the roles query and document, `variables` are its other names)
    comes before the model's own prompt and the pair encoding of the tokenizer, which models of
    pairs were trained with; other models read one text after the other.
    """

    tokenizer: Tokenizer
    facts: PoolingFacts
    max_model_len: int
    template: str | None = None
    variables: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for key in _RESERVED:
            if key in (self.variables or {}):
                raise InvalidParameter("chat_template_kwargs", key, "templates have no such name")

    def of(
        self,
        query: str,
        document: str,
        params: PoolingParams,
        tokenization_kwargs: Mapping[str, Any] | None,
    ) -> tuple[TokensPrompt, PoolingParams]:
        kwargs, cut = take_truncation(
            encode_options(tokenization_kwargs), self.max_model_len, self.tokenizer.truncation_side
        )
        read = TextsRead.of(params, self.facts, self.max_model_len)
        query, document = read.cut(self.tokenizer, query, 0), read.cut(self.tokenizer, document, 1)
        params = read.params
        pair = self.facts.pooler.pair
        text = None
        if self.template is not None:
            text = self._rendered(query, document)
        elif pair is not None:
            text = f"{pair.document}{document}{pair.query}{query}"
        if text is not None:
            prompt = self._plain(text, kwargs)
            if pair is not None:
                ids = prompt["prompt_token_ids"]
                if cut is not None and (most := cut.limit - len(pair.last_ids)) < len(ids):
                    ids = ids[:most] if cut.side == "right" else ids[len(ids) - most :]
                prompt["prompt_token_ids"] = [*ids, *pair.last_ids]
            return prompt, params
        if not self.facts.pooler.encodes_pairs:
            return self._plain(query + document, kwargs), params
        limit, side = (None, None) if cut is None else (cut.limit, cut.side)
        ids, types = self.tokenizer.encode_pair(
            query, document, max_length=limit, truncation_side=side
        )
        if 1 in types and self.facts.pooler.tells_texts_apart:
            params = params.clone()
            params.extra_kwargs = {**(params.extra_kwargs or {}), SECOND_TEXT: types.index(1)}
        return TokensPrompt(prompt_token_ids=ids), params

    def _plain(self, text: str, kwargs: Mapping[str, Any]) -> TokensPrompt:
        return TokensPrompt(prompt_token_ids=self.tokenizer.encode(text, **kwargs), prompt=text)

    def _rendered(self, query: str, document: str) -> str:
        assert self.template is not None, "a template is given"
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        template = self.tokenizer.compiled_chat_template(self.template)
        return template.render(messages, self.variables or {})
