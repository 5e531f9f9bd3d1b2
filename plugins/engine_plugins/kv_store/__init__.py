"""Where else keys and values live."""

from __future__ import annotations

from engine.contracts.command import CommandProvider
from engine.contracts.kv_store import SHARED, SHARED_HERE
from engine.contracts.provider import Provider
from engine.hookspecs import hookimpl
from engine_plugins.kv_store.disk import DiskConfig
from engine_plugins.kv_store.host import HostConfig
from engine_plugins.kv_store.peer.store import PeerConfig

FILLED = {"kv_allocator": ("prefix_cache",)}


@hookimpl
def engine_kv_store() -> list[Provider]:
    return [
        Provider(
            "host",
            "engine_plugins.kv_store.host:HostStore",
            config=HostConfig,
            requires=FILLED,
            provides=(SHARED_HERE,),
            doc="Blocks that leave the KV pool stay in memory of this machine (LRU).",
        ),
        Provider(
            "disk",
            "engine_plugins.kv_store.disk:DiskStore",
            config=DiskConfig,
            requires=FILLED,
            doc="Records are files: they survive the server, and are read back while a request waits.",
        ),
        Provider(
            "peer",
            "engine_plugins.kv_store.peer.store:PeerStore",
            config=PeerConfig,
            requires=FILLED,
            provides=(SHARED,),
            doc="Records that other engines have in memory are read over TCP while a request waits.",
        ),
    ]


@hookimpl
def engine_command() -> list[CommandProvider]:
    return [
        CommandProvider(
            "kv",
            "engine_plugins.kv_store.command.command:COMMAND",
            "show, check, carry and remove what KV stores keep; whether they pay",
        )
    ]
