"""Who counts as one client, where addresses tell clients apart."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, ip_address, ip_network


@lru_cache(1024)
def network_of(address: str) -> str:
    """What stands for one host: an IPv4 address, or of an IPv6 address the network of 64 bits, all of which one host
    may use."""
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, IPv4Address):
        return address
    return str(found.ipv4_mapped or ip_network((found, 64), strict=False))
