"""Pictures in the conversations and texts of requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self

from starlette.requests import Request

from quire.engine.wire.prompt_media import PlacedPrompt
from quire.errors import InvalidParameter, PromptTooLong
from quire.prompts import GivenMedia, ParsedPrompt
from quire.server.context import Server
from quire.server.http.in_flight import while_connected
from quire.server.http.security import owner_of
from quire.server.openai.requests import ChatRequest

if TYPE_CHECKING:  # few models take pictures
    from quire.engine.frontend.pictures.prompts_with_pictures import PromptsWithPictures
    from quire.media.fetch.fetcher import GivenPicture
    from quire.media.loader import LoadedPicture
    from quire.media.prompt_rules.rule import ExpandedPicture

MOST_TOKENS = 2**21
"""The most tokens of a prompt that is only counted."""


class MediaFields(Protocol):
    """The options of a body for loading its pictures."""

    cache_salt: str | None
    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, Any] | None


class PromptPictures:
    """The pictures of one prompt of a request, in whose text placeholders stand for them."""

    def __init__(
        self,
        request: Request,
        body: MediaFields,
        prompts: PromptsWithPictures,
        given: list[GivenPicture],
        known: Sequence[LoadedPicture] = (),
    ) -> None:
        """known: the first ones, which another prompt of the request has, too."""
        self._request, self._body = request, body
        self.prompts, self._given = prompts, given
        self.loaded = list(known)
        """Pictures that have been loaded: all, once the prompt is made."""

    async def placed(
        self, text: str, encode: Callable[[str], Awaitable[list[int]]], *, limit: int | None
    ) -> PlacedPrompt:
        """The text as ids, which `encode` makes, with the pictures among them. `limit`: from how
        many tokens on it may be refused; None: never. Raises RequestError, and ClientDisconnect
        when nobody waits any more.
        """
        loaded = await self._loaded()
        expanded = self.prompts.expanded(loaded)
        _check_rows(expanded, limit)
        text = self.prompts.prompt_text(text, expanded)
        short = await encode(text) if text else []
        return self.prompts.widened(short, loaded, expanded)

    async def placed_in_ids(self, ids: list[int], *, limit: int | None) -> PlacedPrompt:
        """As `placed`, of ids with placeholders among them."""
        loaded = await self._loaded()
        _check_rows(self.prompts.expanded(loaded), limit)
        return self.prompts.placed(ParsedPrompt(None, ids), loaded, {})

    async def _loaded(self) -> list[LoadedPicture]:
        body = self._body
        self.prompts.check_count(len(self._given))
        new = self._given[len(self.loaded) :]
        if not new:
            return self.loaded
        media = GivenMedia(
            {"image": new}, {}, body.mm_processor_kwargs or {}, body.media_io_kwargs or {}
        )
        owner = owner_of(self._request)
        # an id that one client gave to a picture must not stand for another client's
        scope = f"{'' if owner is None else owner.hex()}:{body.cache_salt or ''}"
        self.loaded += await while_connected(self._request, self.prompts.loaded(media, scope))
        return self.loaded


class ChatPictures(PromptPictures):
    """The pictures of one conversation; `messages` have markers in their place."""

    def __init__(
        self,
        request: Request,
        body: MediaFields,
        prompts: PromptsWithPictures,
        messages: list[Any],
        given: list[GivenPicture],
    ) -> None:
        super().__init__(request, body, prompts, given)
        self.messages = messages

    @classmethod
    def found(
        cls, request: Request, body: MediaFields, prompts: PromptsWithPictures, messages: list[Any]
    ) -> Self | None:
        """Pictures of messages, or None. Raises RequestError for malformed or too many ones."""
        texts, given = prompts.taken_out(messages)
        return cls(request, body, prompts, texts, given) if given else None

    @classmethod
    def of(
        cls, server: Server, request: Request, body: ChatRequest, prompts: PromptsWithPictures
    ) -> Self | None:
        """As `found`, of a request to draw an answer. Raises RequestError for one that cannot have
        pictures, and where the queue is full.
        """
        pictures = cls.found(request, body, prompts, body.messages)
        if pictures is None:
            return None
        if body.truncate_prompt_tokens is not None:
            allowed = "a prompt with pictures is not cut"
            raise InvalidParameter("truncate_prompt_tokens", body.truncate_prompt_tokens, allowed)
        if body.use_beam_search:
            allowed = "a prompt with pictures has one answer at a time"
            raise InvalidParameter("use_beam_search", True, allowed)
        server.engine.check_admission(body.num_drawn)  # before anything is fetched
        return pictures


def _check_rows(expanded: Sequence[ExpandedPicture], limit: int | None) -> None:
    """Raise PromptTooLong for pictures that alone have `limit` rows or more."""
    num_rows = sum(each.num_rows for each in expanded)
    most = MOST_TOKENS if limit is None else limit
    if num_rows >= most:
        raise PromptTooLong(num_rows, most, is_estimate=True)
