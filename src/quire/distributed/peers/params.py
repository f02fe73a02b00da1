"""`kv_transfer_params` of requests whose K/V is, or will be, at another engine: their fields,
checked. Free of torch: a front end checks them, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.errors import InvalidParameter, RequestError

PARAMS = "kv_transfer_params"
SIGNATURE = "remote_signature"
"""The field by which an engine knows params of another one that knows the same secret."""
_NAME_CHARACTERS = 256
_ANY_NUMBER = 2**62


class Remote(NamedTuple):
    """Blocks that another engine keeps: where it is, who it is ("": anyone), and its lease."""

    host: str
    port: int
    engine_id: str
    lease: str


def remote_of_two_legs(params: Mapping[str, Any]) -> tuple[Remote, int] | None:
    """Place of a prompt's K/V, and the number of its tokens, by the params of the protocol of two
    legs; None: it is computed here. Raises InvalidParameter.
    """
    if not flag(params, "do_remote_prefill"):
        return None
    if any(params.get(name) is None for name in ("remote_host", "remote_port")):
        return None
    lease = text(params, "remote_request_id")
    count = params.get("remote_num_tokens")
    if type(count) is not int or not 0 <= count < _ANY_NUMBER:
        raise _refused("remote_num_tokens", count, "a number of tokens")
    place = text(params, "remote_host"), port(params, "remote_port")
    return Remote(*place, text(params, "remote_engine_id"), lease), count


def remote_of_tier(params: Mapping[str, Any]) -> tuple[Remote, int] | None:
    """Place of a request's K/V, by the params of a tier of type p2p."""
    for name in ("remote_prefiller", "remote_kv_source"):
        given = params.get(name)
        if given is not None:
            found = mapping(name, given)
            place = text(found, "remote_host"), port(found, "remote_port")
            return Remote(*place, "", text(found, "kv_request_id")), _ANY_NUMBER
    return None


def has_sizes(params: Mapping[str, Any], tp: int, pp: int) -> bool:
    """Whether the other engine has as many ranks, each of which has the same share of the model;
    where params do not say so it is found out when one is asked. Raises InvalidParameter.
    """
    found = []
    for name, own in (("tp_size", tp), ("pp_size", pp)):
        given = params.get(name)
        if given is not None and type(given) is not int:
            raise _refused(name, given, "a number of ranks")
        found.append(given is None or given == own)
    return all(found)


def lease_of_tier(params: Mapping[str, Any]) -> str | None:
    """The name that a router has given to a request whose K/V is to be kept; None: it is not."""
    given = params.get("remote_decoder")
    if given is None:
        return None
    return text(mapping("remote_decoder", given), "kv_request_id")


def check_params(params: Mapping[str, Any]) -> None:
    """Raise InvalidParameter for fields that cannot be what their names say."""
    flag(params, "do_remote_decode")
    remote_of_two_legs(params)
    remote_of_tier(params)
    has_sizes(params, 1, 1)
    lease_of_tier(params)


def _refused(name: str, value: object, allowed: str) -> RequestError:
    return InvalidParameter(f"{PARAMS}[{name!r}]", value, allowed)


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """An object. Raises InvalidParameter."""
    if not isinstance(value, Mapping):
        raise _refused(name, value, "an object")
    return value


def flag(params: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; left out: false. Raises InvalidParameter."""
    value = params.get(name)
    if value is not None and not isinstance(value, bool):
        raise _refused(name, value, "true or false")
    return bool(value)


def text(params: Mapping[str, Any], name: str) -> str:
    """A field that is a text. Raises InvalidParameter."""
    value = params.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _NAME_CHARACTERS or "\x00" in value:
        raise _refused(name, value, f"a text of at most {_NAME_CHARACTERS} characters")
    return value


def port(params: Mapping[str, Any], name: str) -> int:
    """A field that is a port, as a number or in decimal. Raises InvalidParameter."""
    value = params.get(name)
    if isinstance(value, str) and value.isdecimal():
        value = int(value[:8])
    if type(value) is not int or not 0 < value < 65536:
        raise _refused(name, value, "a port")
    return value
