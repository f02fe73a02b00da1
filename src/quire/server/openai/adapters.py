"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, where the operator allows it."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire.errors import AdapterNotFound
from quire.lora.request import LoRARequest
from quire.server.adapters import NameIsServed, adapter_id
from quire.server.context import Server
from quire.server.http.failures import Refusal

_LONGEST = 4096
_INVALID = "InvalidUserInput"
_NOT_ALLOWED = (
    "Adapters cannot be loaded over HTTP here: start the server with --enable-lora and "
    "QUIRE_ALLOW_RUNTIME_LORA_UPDATING=1."
)


class LoadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An adapter's name and its folder on the server; `load_inplace` replaces one of that name.
    `is_3d_lora_weight` changes nothing: names of tensors say how experts are stored.
    """

    lora_name: str = ""
    lora_path: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The name of an adapter; its id is not needed."""

    lora_name: str = ""
    lora_int_id: int | None = None


async def load_adapter(server: Server, request: Request) -> Response:
    """Load an adapter and serve it by its name."""
    _check_allowed(server)
    body = await server.read(request, LoadAdapterRequest)
    name, adapters = body.lora_name, server.adapters
    if not name or not body.lora_path:
        raise _refusal("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
    if max(len(name), len(body.lora_path)) > _LONGEST:
        raise _refusal(f"A name and a path have at most {_LONGEST} characters.", "lora_name")
    if name in server.names:
        text = f"The lora adapter '{name}' conflicts with a served base model."
        raise _refusal(text, "lora_name")
    asked = LoRARequest(name, adapter_id(name), body.lora_path, load_inplace=body.load_inplace)
    try:
        await adapters.add(asked)
    except NameIsServed as error:
        raise _refusal(str(error), "lora_name") from None
    except AdapterNotFound as error:
        raise Refusal(404, str(error), param="lora_path") from None
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


async def unload_adapter(server: Server, request: Request) -> Response:
    """Serve a name no longer. Its weights leave the memory when others need it."""
    _check_allowed(server)
    body = await server.read(request, UnloadAdapterRequest)
    if not body.lora_name:
        raise _refusal("'lora_name' needs to be provided to unload a LoRA adapter.", "lora_name")
    if not await server.adapters.remove(body.lora_name):
        text = f"The lora adapter '{body.lora_name[:200]}' cannot be found."
        raise Refusal(404, text, param="lora_name")
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_allowed(server: Server) -> None:
    if not server.adapters.may_change or server.adapters.load is None:
        raise Refusal(404, _NOT_ALLOWED)


def _refusal(text: str, parameter: str) -> Refusal:
    refusal = Refusal(400, text, param=parameter)
    refusal.info.type = _INVALID
    return refusal
