"""The listener, and gRPC beside it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

from engine.contracts.config.checks import at_least, between

_LISTEN = re.compile(r"[0-9]{1,5}|(?:[A-Za-z0-9.\-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}|unix:.+")
"""Where gRPC may listen."""
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.\-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9.\-]+)(?::[0-9]{1,5})?")
"""As browsers send it."""


@dataclass(frozen=True)
class GrpcSettings:
    """The gRPC transport, see ``docs/grpc.md``; needs the extra ``engine[grpc]``."""

    listen: str | None = None
    """``HOST:PORT``, ``PORT`` (on ``server.host``) or ``unix:PATH``; null: no gRPC."""
    cert: str | None = None
    """A PEM file with the server's certificate chain; with ``key``: TLS."""
    key: str | None = None
    """A PEM file with the private key of ``cert``."""
    client_ca: str | None = None
    """A PEM file with authorities: a client must have a certificate of one of them (mutual TLS)."""

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ValueError("server.grpc.cert and server.grpc.key belong together: give both, or none")
        if self.client_ca is not None and self.cert is None:
            raise ValueError("server.grpc.client_ca needs server.grpc.cert and server.grpc.key")
        if self.listen is not None and not _is_listen(self.listen):
            raise ValueError(
                f"server.grpc.listen={self.listen}: expected HOST:PORT, [IPV6]:PORT, PORT or unix:PATH, "
                "for example 127.0.0.1:50051"
            )


@dataclass(frozen=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    """When set, every route but ``/`` and health needs ``Authorization: Bearer <api_key>`` or ``x-api-key: <api_key>``;
    see also ``ui``."""
    keys: str | None = None
    """A file of YAML or JSON with a key for each client, see `Keys` in ``docs/serving.md``: each tenant has caches,
    stored responses and a turn in the queue of its own. ``api_key`` goes on to be taken."""
    cors_origins: list[str] = field(default_factory=list)
    """Web pages of these origins, such as ``https://chat.example.org``, may call the server from a browser; ``*``: all
    web pages."""
    ui: bool | None = None
    """The page at ``/ui/``. null: behind the key like everything else, so that browsers see it only where no key is
    set; true: its files, which hold no data, need no key, and it asks for the key; false: there is none."""
    max_queue: int = 256
    """Most sequences (prompts x n) waiting or running; a request beyond that is answered 429."""
    max_n: int = 128
    """Most sequences one API request may ask for (prompts x n)."""
    trust_user: bool = False
    """Clients, who take turns and share the queue, are told apart by the field ``user`` of their requests, as a gateway
    in front of the server sets it; false: by their addresses."""
    least_priority: int = 0
    """The most urgent ``priority`` that a request may have; lower values run first."""
    lame_duck_s: float = 0.0
    """After SIGTERM, how long requests are still taken while ``/ready`` is 503 already: until a load balancer has seen
    that, 10 to 15 s behind most. Ctrl-C does not wait for it."""
    drain_s: float = 30.0
    """After that, how long running requests may take to finish; also those of an engine that is restarted."""
    stall_s: float = 30.0
    """An engine that answers nothing for so long, or whose step takes so much longer than it should, is killed and
    started again. ``/ready`` is 503 after 5 s of this."""
    max_connections: int | None = None
    """Most open connections; null: as many as the limit on open files allows."""
    max_body_bytes: int = 8 * 1024 * 1024
    store_bytes: int = 64 * 1024 * 1024
    """Most bytes of responses that are kept in memory for ``previous_response_id``; 0: none is."""
    store_s: float = 24 * 3600.0
    """How long a response is kept at most."""
    store_path: str = "none"
    """An absolute path of a folder where these responses lie as well, so that they are found after a restart;
    ``none``: a restart forgets them. One server has it at a time."""
    keepalive_s: float = 5.0
    """Silence in a stream after which a comment line is sent; 0: never."""
    compression: bool = True
    """Answers of at least 1,024 bytes leave in a coding that the client accepts (gzip, zstd)."""
    compress_streams: bool = False
    """So do streams of events (gzip)."""
    tool_syntax: str | None = None
    """How the model writes calls of tools: the name of a syntax, or a file of JSON with one of your own, see
    `Tools` in ``docs/serving.md``; null: as the text of its chat template tells."""
    grpc: GrpcSettings = field(default_factory=GrpcSettings)

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("server.host is empty; give an address, 127.0.0.1 for this machine alone")
        between("server.port", self.port, 0, 65535)
        at_least("server.max_queue", self.max_queue, 1)
        at_least("server.max_n", self.max_n, 1)
        at_least("server.lame_duck_s", self.lame_duck_s, 0)
        at_least("server.drain_s", self.drain_s, 0)
        at_least("server.stall_s", self.stall_s, 5)
        at_least("server.max_body_bytes", self.max_body_bytes, 1)
        at_least("server.store_bytes", self.store_bytes, 0)
        at_least("server.store_s", self.store_s, 1)
        if self.store_path != "none" and not os.path.isabs(self.store_path):
            raise ValueError(f"server.store_path={self.store_path}: expected none or an absolute path")
        if self.max_connections is not None:
            at_least("server.max_connections", self.max_connections, 1)
        at_least("server.keepalive_s", self.keepalive_s, 0)
        if self.compress_streams and not self.compression:
            raise ValueError("server.compress_streams=true needs server.compression=true")
        for origin in self.cors_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"server.cors_origins: {origin!r}: expected '*', or scheme, host and perhaps port in lower case, "
                    "with nothing after, such as https://chat.example.org or http://localhost:3000"
                )
        if self.keys == "":
            raise ValueError("server.keys is empty; give a file, or server.keys=null for none")
        if self.api_key == "":
            raise ValueError("server.api_key is empty; give a key, or server.api_key=null for none")


def _is_listen(address: str) -> bool:
    port = address.rpartition(":")[2]
    return _LISTEN.fullmatch(address) is not None and (address.startswith("unix:") or int(port) <= 65535)
