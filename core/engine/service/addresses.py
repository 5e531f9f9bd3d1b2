"""What addresses and host names say: who counts as one client, and what is this machine."""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv4Address, ip_address, ip_network

_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9.\-]+))(?::[0-9]{1,5})?")


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


def is_loopback(host: str) -> bool:
    """Whether it is ``localhost``, or an address of this machine that no other one can reach."""
    try:
        found = ip_address(host.partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = None if isinstance(found, IPv4Address) else found.ipv4_mapped
    return (mapped or found).is_loopback


def is_local_name(host: str) -> bool:
    """Whether a ``Host`` header names ``localhost``, a name below it or an address, perhaps with a port."""
    match = _HOST.fullmatch(host.lower())
    if match is None:
        return host == ""
    name = match["v6"] or match["name"]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
