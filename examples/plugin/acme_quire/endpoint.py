"""A route: GET /acme/tokens says how many tokens were generated, and by which model."""

from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import State
from starlette.requests import Request
from starlette.responses import JSONResponse


class TokenRoute:
    """Adds the route to a server that generates."""

    name = "acme"
    required_tasks = ("generate",)

    def attach_router(self, app: Starlette) -> None:
        """Add the route."""
        app.add_route("/acme/tokens", self.show)

    async def init_state(self, engine_client: Any, state: State, args: Any) -> None:
        """Keep what the handler shows."""
        state.acme_model = engine_client.vllm_config.model.architecture

    async def show(self, request: Request) -> JSONResponse:
        """Answer GET /acme/tokens."""
        from acme_quire.statistics import totals

        return JSONResponse({"model": request.app.state.acme_model, **totals})
