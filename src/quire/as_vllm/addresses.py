"""Network addresses, as `vllm.utils.network_utils` has them."""

from __future__ import annotations

import ipaddress


def is_valid_ipv6_address(address: str) -> bool:
    """Whether a text is an address of IPv6."""
    try:
        ipaddress.IPv6Address(address)
    except ValueError:
        return False
    return True


def join_host_port(host: str, port: int) -> str:
    """host:port, with the brackets that IPv6 needs."""
    return f"[{host}]:{port}" if is_valid_ipv6_address(host) else f"{host}:{port}"


def get_tcp_uri(ip: str, port: int) -> str:
    """tcp://host:port, as torch.distributed and ZeroMQ write it."""
    return f"tcp://{join_host_port(ip, port)}"
