"""Authentication and encryption between machines: CurveZMQ with keys from a shared secret.

The front end's key pair is made from the secret. A peer proves that it knows the secret by knowing
the public half, without which no connection is made; what travels is encrypted.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85

from quire.errors import InvalidParameter

LEAST_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """The front end's key pair. Cores are given the public half only."""

    public: bytes
    secret: bytes = field(repr=False)


def cluster_keys(secret: str | None) -> ClusterKeys:
    """The keys of a secret; 20 ms, against guessing. Raises InvalidParameter for short ones."""
    if secret is None or len(secret) < LEAST_CHARACTERS:
        raise InvalidParameter(
            "QUIRE_CLUSTER_SECRET", None if secret is None else "***",
            f"cores on other machines need it, with {LEAST_CHARACTERS} characters or more",
            "Set the environment variable to the same random words on all machines.",
        )  # fmt: skip
    # one salt for all: every machine has to come to the same keys
    raw = hashlib.scrypt(secret.encode(), salt=b"quire cluster", n=2**13, r=8, p=1, dklen=32)
    key = z85.encode(raw)
    return ClusterKeys(zmq.curve_public(key), key)


def close_to_strangers(socket: zmq.Socket[bytes], keys: ClusterKeys) -> None:
    """Make a socket that will be bound take only peers that know the secret."""
    socket.curve_server = True
    socket.curve_secretkey = keys.secret


def introduce(socket: zmq.Socket[bytes], server_key: bytes) -> None:
    """Make a socket that will be connected known to the front end with this public key."""
    socket.curve_serverkey = server_key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
