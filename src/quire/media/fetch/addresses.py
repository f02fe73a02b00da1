"""The addresses that anybody may have the server read from."""

from __future__ import annotations

import ipaddress

_SPECIAL_V4 = tuple(
    map(
        ipaddress.IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
            *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24"),
            *("192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24"),
            *("224.0.0.0/4", "240.0.0.0/4"),
        ),
    )
)
"""IANA's registry of special addresses, multicast and what is reserved. `is_global` of the standard
library differs from release to release, and has multicast among the global ones.
"""
_GLOBAL_V6 = ipaddress.IPv6Network("2000::/3")
"""All that is assigned to networks that everybody reaches."""
_SPECIAL_V6 = tuple(
    map(
        ipaddress.IPv6Network, ("2001::/23", "2001:db8::/32", "3fff::/20")
    )  # Teredo is in the first
)
"""The first has Teredo and other tunnels."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_ISATAP = (0x00005EFE, 0x02005EFE)


def is_public(address: str) -> bool:
    """Whether an address, as the resolver writes it, is one of the internet, and so are those of
    version 4 that it carries for a gateway.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if "%" in address:  # a link's
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return _is_public_v4(parsed)
    return _is_public_v6(parsed)


def _is_public_v4(address: ipaddress.IPv4Address) -> bool:
    return not any(address in network for network in _SPECIAL_V4)


def _is_public_v6(address: ipaddress.IPv6Address) -> bool:
    low = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    # a gateway forwards these to the IPv4 address in their low bits
    if address.ipv4_mapped is not None or address in _NAT64:
        return _is_public_v4(low)
    if address in _SIX_TO_FOUR:
        return _is_public_v4(ipaddress.IPv4Address(int(address) >> 80 & 0xFFFFFFFF))
    if address not in _GLOBAL_V6 or any(address in network for network in _SPECIAL_V6):
        return False
    if int(address) >> 32 & 0xFFFFFFFF in _ISATAP:
        return _is_public_v4(low)
    return True
