"""Pictures in the conversations of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from starlette.requests import Request

from quire.engine.wire.prompt_media import PlacedPrompt
from quire.errors import InvalidParameter, PromptTooLong
from quire.prompts import GivenMedia
from quire.server.context import Server
from quire.server.engine_outputs import while_connected
from quire.server.http.security import owner_of
from quire.server.openai.prompts import text_ids
from quire.server.openai.requests import ChatRequest

if TYPE_CHECKING:  # few models take pictures
    from quire.engine.frontend.picture_prompts import PicturePrompts
    from quire.media.fetch.fetcher import GivenPicture

MOST_TOKENS = 2**21
"""The most tokens of a prompt that is only counted."""


class ChatPictures:
    """The pictures of one conversation; `messages` have markers in their place."""

    def __init__(
        self,
        server: Server,
        request: Request,
        body: ChatRequest,
        prompts: PicturePrompts,
        messages: list[Any],
        given: list[GivenPicture],
    ) -> None:
        self._server, self._request, self._body = server, request, body
        self.prompts, self.messages, self._given = prompts, messages, given

    @classmethod
    def of(
        cls, server: Server, request: Request, body: ChatRequest, prompts: PicturePrompts
    ) -> Self | None:
        """None for a conversation without pictures. Raises RequestError for pictures that are
        malformed or too many.
        """
        messages, given = prompts.taken_out(body.messages)
        if not given:
            return None
        if body.truncate_prompt_tokens is not None:
            allowed = "a prompt with pictures is not cut"
            raise InvalidParameter("truncate_prompt_tokens", body.truncate_prompt_tokens, allowed)
        if body.use_beam_search:
            allowed = "a prompt with pictures has one answer at a time"
            raise InvalidParameter("use_beam_search", True, allowed)
        server.engine.check_admission(body.num_drawn)  # before anything is fetched
        return cls(server, request, body, prompts, messages, given)

    async def placed(
        self, text: str, *, add_special_tokens: bool, limit: int | None
    ) -> PlacedPrompt:
        """The conversation, rendered as `text`, as ids with the pictures among them. `limit`: see
        `render_conversation`. Raises RequestError, and ClientDisconnect when nobody waits any more.
        """
        body = self._body
        media = GivenMedia(
            {"image": self._given}, {}, body.mm_processor_kwargs or {}, body.media_io_kwargs or {}
        )
        owner = owner_of(self._request)
        scope = f"{'' if owner is None else owner.hex()}:{body.cache_salt or ''}"
        loaded = await while_connected(self._request, self.prompts.loaded(media, scope))
        expanded = self.prompts.expanded(loaded)
        num_rows = sum(each.num_rows for each in expanded)
        most = MOST_TOKENS if limit is None else limit
        if num_rows >= most:
            raise PromptTooLong(num_rows, most, is_estimate=True)
        short = await text_ids(
            self._server,
            self.prompts.prompt_text(text, expanded),
            add_special_tokens=add_special_tokens,
            limit=limit,
        )
        return self.prompts.widened(short, loaded, expanded)
