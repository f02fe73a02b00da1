"""Engines that a request may have its K/V pulled from. `kv_transfer_params` pass through clients,
who could otherwise have this engine connect to any address.

An address is taken if it was configured, or if the params are what an engine of the same secret has
answered, which its signature shows.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from quire.distributed.peers.keys import PeerKeys
from quire.distributed.peers.params import PARAMS, Remote
from quire.encodable import to_msgpack
from quire.errors import InvalidParameter

_BYTES = 32


class AllowedPeers:
    """The addresses in `given`, each "host", "host:port" or a network ("10.1.0.0/16"; "*": any),
    and those of signed params.
    """

    def __init__(self, where: str, given: object, keys: PeerKeys) -> None:
        """Raises InvalidParameter, about the field `where`, for what cannot be an address."""
        if not isinstance(given, list | tuple) or not all(map(_is_text, given)):
            allowed = 'a list of "host", "host:port" or networks such as "10.1.0.0/16"'
            raise InvalidParameter(where, given, allowed)
        self._names = {each.lower() for each in given if "/" not in each}
        try:
            self._networks = [ipaddress.ip_network(each) for each in given if "/" in each]
        except ValueError as error:
            raise InvalidParameter(where, given, f"networks of addresses ({error})") from None
        self._key = hashlib.blake2b(keys.secret, digest_size=_BYTES, person=b"kv params").digest()

    def signature(self, remote: Remote, num_tokens: int) -> str:
        """Shows that params are an engine's own answer."""
        text = to_msgpack([*remote, num_tokens])
        return hmac.digest(self._key, text, "sha256").hex()

    def check(self, remote: Remote, num_tokens: int, signature: object) -> None:
        """Raise InvalidParameter for the address of a stranger."""
        if self._has(remote.host.lower(), remote.port):
            return
        own = self.signature(remote, num_tokens).encode()
        given = signature.encode(errors="replace") if isinstance(signature, str) else b""
        if not hmac.compare_digest(given, own):
            allowed = "it is not among the peers of this engine, and no engine has signed it"
            hint = (
                "Send the kv_transfer_params of the other engine as they are, or name it in the "
                "peers of kv_connector_extra_config."
            )
            address = f"{remote.host}:{remote.port}"
            raise InvalidParameter(f"{PARAMS}['remote_host']", address, allowed, hint)

    def _has(self, host: str, port: int) -> bool:
        bracketed = f"[{host}]" if ":" in host else host
        if not self._names.isdisjoint(("*", host, f"{bracketed}:{port}")):
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:  # names are not resolved: they may lead elsewhere when it is connected
            return False
        return any(address in network for network in self._networks)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
