"""What grpc says of the other end of a connection."""

from __future__ import annotations

from urllib.parse import unquote


def address_of(peer: str) -> str:
    """The address in ``ipv4:10.0.0.1:5000`` or ``ipv6:%5B::1%5D:5000``; of a unix socket, that it is one."""
    scheme, _, rest = unquote(peer).partition(":")
    if scheme == "ipv4":
        return rest.rpartition(":")[0]
    if scheme == "ipv6":
        return rest.rpartition(":")[0].strip("[]")
    return scheme
