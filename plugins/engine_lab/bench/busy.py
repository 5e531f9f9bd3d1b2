"""Whether the machine under a server was busy during a run: by the server's own word, or by this client's threads."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from engine.machine import MachineTimes, MachineUse, Meter, use
from engine_lab.bench.target import Target


@dataclass(frozen=True, slots=True)
class Busy:
    """What a run found."""

    whose: str
    """Whose threads waited."""
    machine: MachineUse


class _Stats(msgspec.Struct, frozen=True):
    machine: MachineTimes


@dataclass(frozen=True, slots=True)
class Watched:
    """From the beginning of a run."""

    session: aiohttp.ClientSession
    target: Target
    own: Meter | None
    """Of this process: for a server on this machine that says nothing itself."""
    before: MachineTimes | None

    @classmethod
    async def begin(cls, session: aiohttp.ClientSession, target: Target) -> Watched:
        if (said := await _said(session, target)) is not None:
            return cls(session, target, None, said)
        own = Meter() if is_local(target.base_url) else None
        return cls(session, target, own, own.read() if own is not None else None)

    async def end(self) -> Busy | None:
        """``None``: nothing is known."""
        after = self.own.read() if self.own else await _said(self.session, self.target)
        if self.before is None or after is None:
            return None
        return Busy("this client" if self.own else "the engine", use(self.before, after))


def is_local(url: str) -> bool:
    """Whether a server is on this machine, by the host of its URL."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _said(session: aiohttp.ClientSession, target: Target) -> MachineTimes | None:
    """What this engine's ``/engine/stats`` says; other servers have none."""
    try:
        async with session.get(f"{target.base_url}/engine/stats", headers=target.headers) as response:
            return msgspec.json.decode(await response.read(), type=_Stats).machine
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return None


def as_json(busy: Busy | None) -> dict[str, Any] | None:
    return None if busy is None else {"whose": busy.whose, **msgspec.to_builtins(busy.machine)}
