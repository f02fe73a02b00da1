"""One route: what it serves, and its reply, also to a request that fails."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from quire.server.abilities import Ability
from quire.server.context import Server
from quire.server.http.failures import error_response
from quire.server.http.fields import BODY_SLOT, name_as_sent

_CLIENT_GONE = 499
"""For the access log: the client has disconnected."""

Handler: TypeAlias = Callable[[Server, Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One route: methods, path, handler, the types of its bodies (None: without one) and of its
    query. `failure`: an error as a reply. `needs`: what the model must be able to do. `is_alias`:
    another path of a route that is documented by its own.
    """

    methods: str
    path: str
    handler: Handler
    takes: type | None = None
    gives: type | None = None
    query: type | None = None
    failure: Callable[[BaseException], Response] = error_response
    needs: Ability | None = None
    is_alias: bool = False

    def is_for(self, server: Server) -> bool:
        """Whether the served model can do it."""
        return self.needs is None or server.abilities.have(self.needs)

    async def answer(self, server: Server, request: Request) -> Response:
        """The reply to a request, also to one that fails."""
        state = request.scope["state"]
        try:
            if self.needs is not None:
                server.abilities.require(self.needs)
            return await self.handler(server, request)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_GONE)
        except Exception as error:
            name_as_sent(error, state.get(BODY_SLOT))
            return self.failure(error)
        finally:
            server.body_budget.release(state)
