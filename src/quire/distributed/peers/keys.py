"""Authentication and encryption between engines: CurveZMQ with keys from a shared secret.

An engine that serves blocks has a key pair made from the secret. Another one proves that it knows
the secret by knowing the public half, and is told so by the answer: nobody else has the secret one.
Without QUIRE_CLUSTER_SECRET, engines of one user on one machine share a secret that only the user
can read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from quire.environment import read_environment
from quire.errors import InvalidParameter

_LEAST_CHARACTERS = 16
_FILE = "peer_secret"
LOCAL = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class PeerKeys:
    """The key pair of engines that serve blocks."""

    public: bytes
    secret: bytes = field(repr=False)


def peer_keys(secret: str) -> PeerKeys:
    """The keys for a shared secret; 20 ms, so that guessing is slow."""
    raw = hashlib.scrypt(secret.encode(), salt=b"quire peers of kv", n=2**13, r=8, p=1, dklen=32)
    key = z85.encode(raw)
    return PeerKeys(zmq.curve_public(key), key)


def shared_secret(host: str) -> str:
    """The secret of engines that meet at `host`. Raises InvalidParameter where other machines can
    reach it and no secret is set.
    """
    environment = read_environment()
    given = environment.cluster_secret
    if given is not None:
        if len(given) < _LEAST_CHARACTERS:
            allowed = f"{_LEAST_CHARACTERS} characters or more"
            raise InvalidParameter("QUIRE_CLUSTER_SECRET", "***", allowed)
        return given
    if host not in LOCAL:
        raise InvalidParameter(
            "QUIRE_CLUSTER_SECRET",
            None,
            f"engines that exchange K/V at {host} need it",
            "Set the environment variable to the same random words on all machines.",
        )
    path = environment.cache_dir / _FILE
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_suffix(f".{secrets.token_hex(8)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    try:
        os.link(part, path)  # the first engine's stays
    except FileExistsError:
        pass
    finally:
        part.unlink()
    about = path.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        allowed = "a file that no one else can read: it lets others write K/V"
        raise InvalidParameter("QUIRE_CACHE_DIR", str(path), allowed, "Delete it.")
    return path.read_text()
