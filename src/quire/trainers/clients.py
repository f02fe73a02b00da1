"""The ways that a trainer reaches an engine: over HTTP, in its own process, or through actors of
Ray.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from quire.encodable import to_json
from quire.errors import WeightUpdateError


class WeightSyncClient(Protocol):
    """The calls of an update."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None: ...
    def finish_weight_update(self, version: str | None = None) -> None: ...


class HTTPWeightSyncClient:
    """An engine behind `quire serve --enable-admin`."""

    def __init__(self, base_url: str, timeout: float = 300.0, api_key: str | None = None) -> None:
        """`timeout` is how long a call may take, in seconds."""
        self._url = base_url.rstrip("/")
        self._timeout = timeout
        self._api_key = api_key

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers meet this trainer; they wait for it."""
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._post("start_weight_update", {})

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Have them receive some tensors."""
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, version: str | None = None) -> None:
        """End the update."""
        self._post("finish_weight_update", {} if version is None else {"weight_version": version})

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the workers forget what this trainer has shared."""
        self._post("shutdown_weight_transfer_engine", {})

    def get_world_size(self) -> int:
        """The number of workers."""
        return int(self._call("get_world_size", None)["world_size"])

    def _post(self, route: str, body: dict[str, Any]) -> None:
        self._call(route, to_json(body))

    def _call(self, route: str, body: bytes | None) -> Any:
        """Raises WeightUpdateError with what the server says."""
        headers = {"Content-Type": "application/json"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(f"{self._url}/{route}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as reply:
                return json.loads(reply.read())
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise WeightUpdateError(f"{route}: the server says {error.code}: {text}") from error
        except OSError as error:
            raise WeightUpdateError(f"{route}: the server was not reached: {error}") from error


class LocalWeightSyncClient:
    """An `LLM`, or an object with its methods, in the trainer's process."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers meet this trainer."""
        self._engine.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._engine.start_weight_update()

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Have them receive some tensors."""
        self._engine.update_weights({"update_info": update_info})

    def finish_weight_update(self, version: str | None = None) -> None:
        """End the update."""
        self._engine.finish_weight_update(version)

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the workers forget what this trainer has shared."""
        self._engine.shutdown_weight_transfer_engine()


class RayWeightSyncClient:
    """Actors of Ray that have an `LLM`'s methods."""

    def __init__(self, handles: Any | Sequence[Any]) -> None:
        """One handle, or a list. Raises ImportError without the package ray."""
        ray = import_module("ray")  # the trainer's

        self._get = ray.get
        self._handles = list(handles) if isinstance(handles, Sequence) else [handles]

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the workers meet this trainer."""
        self._each("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update."""
        self._each("start_weight_update")

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Have them receive some tensors."""
        self._each("update_weights", {"update_info": update_info})

    def finish_weight_update(self, version: str | None = None) -> None:
        """End the update."""
        self._each("finish_weight_update", version)

    def shutdown_weight_transfer_engine(self) -> None:
        """Have the workers forget what this trainer has shared."""
        self._each("shutdown_weight_transfer_engine")

    def _each(self, method: str, *args: Any) -> None:
        self._get([getattr(handle, method).remote(*args) for handle in self._handles])
