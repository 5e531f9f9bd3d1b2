"""Whose request is this? Keys from a file: a digest for each, and what its holder may do."""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta

from engine.assembly.errors import AssemblyError
from engine.service.addresses import network_of
from engine.service.errors import bad_request

LOOKED_AT_S = 1.0
"""A file that has changed is read again so soon."""
SALT_LENGTH = 32
"""Hexadecimal digits."""

log = structlog.get_logger("engine.keys")

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._\-]{1,64}$")]


class Caller(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who sends requests with one key."""

    name: Name
    """Of the key: it is in the log."""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    """The digest of the key, in hexadecimal digits."""
    tenant: Name | None = None
    """Whose caches and stored responses it uses, and with whom it shares a turn in the queue; ``null``: its own."""
    admin: bool = False
    """It may read and change what is under ``/engine`` and ``/metrics``, too."""
    max_sequences: Annotated[int, Meta(ge=1)] | None = None
    """Most sequences that its tenant may have waiting or running at once."""
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Of its requests, which may only ask to be less urgent; ``null``: as without keys."""
    slo: tuple[Name, ...] = ()
    """The classes of ``slo.classes`` that its requests may ask for; the first is that of those that ask for none.
    Empty: all are of the usual class."""

    @property
    def of(self) -> str:
        """The tenant."""
        return self.tenant or self.name

    def salted(self, cache_salt: str) -> str:
        """What keeps the tenant's caches apart from those of others, whatever salt a request has. It says nothing of
        either."""
        return hashlib.sha256(f"{self.of}\0{cache_salt}".encode()).hexdigest()[:SALT_LENGTH]


def salt_for(caller: Caller | None, cache_salt: str | None) -> str:
    """Under which a request's keys and values are cached."""
    return cache_salt or "" if caller is None else caller.salted(cache_salt or "")


def priority_for(caller: Caller | None, asked: int | None, least: int | None = None) -> int | None:
    """Of a request: what it asks for, or that of its key. ``least``: where its key has none. Raises :class:`ApiError`
    ``invalid`` for one that is more urgent."""
    by = "server.least_priority"
    if caller is not None and caller.priority is not None:
        least, by = caller.priority, "of its key"
        asked = least if asked is None else asked
    if asked is not None and least is not None and asked < least:
        raise bad_request(f"priority must be at least {least} ({by}).", "priority")
    return asked


class Keys:
    """Those of a file of JSON or YAML: a list of :class:`Caller`. Use on one thread."""

    def __init__(self, path: str, classes: Collection[str] | None = None) -> None:
        """``classes``: those there are; ``None``: others know. Raises :class:`AssemblyError`."""
        self._path = path
        self._classes = classes
        try:
            self._seen = _state_of(path)
            self._callers = self._read()
        except (OSError, ValueError) as error:
            raise AssemblyError([f"server.keys={path}: {_words(error)}"]) from None
        self._looked_s = time.monotonic()
        self._wrong = ""
        """With the file, as the log has it."""

    def find(self, key: str) -> Caller | None:
        """Whose key this is. A file that has changed for the worse is reported, and what it said before counts."""
        if (now_s := time.monotonic()) - self._looked_s > LOOKED_AT_S:
            self._looked_s = now_s
            self._look()
        return self._callers.get(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest())

    def _look(self) -> None:
        try:
            if (state := _state_of(self._path)) == self._seen:
                self._wrong = ""
                return
            self._seen = state
            self._callers, self._wrong = self._read(), ""
            log.info("keys were read again", keys=len(self._callers))
        except (OSError, ValueError) as error:
            if (wrong := _words(error)) != self._wrong:
                log.error("keys cannot be read; those read before count", error=wrong)
            self._wrong = wrong

    def _read(self) -> dict[str, Caller]:
        """By digest. Raises ``OSError``, ``ValueError``."""
        callers = _read(self._path)
        for caller in callers:
            unknown = [] if self._classes is None else [name for name in caller.slo if name not in self._classes]
            if unknown:
                expected = ", ".join(self._classes or ()) or "none"
                raise ValueError(f"key {caller.name}: slo: {unknown[0]!r} is none of slo.classes ({expected})")
        return {one.sha256: one for one in callers}


class WrongKey(Exception):
    """A key is needed, and nothing that was sent is one."""


def caller_of(api_key: str | None, keys: Keys | None, sent: Sequence[str]) -> Caller | None:
    """Whose key is among those ``sent``; ``None``: it is ``api_key``, or no key is needed. Raises
    :class:`WrongKey`."""
    if (api_key is None and keys is None) or (api_key is not None and is_among(api_key, sent)):
        return None
    caller = next(filter(None, map(keys.find, sent)), None) if keys is not None else None
    if caller is None:
        raise WrongKey
    return caller


def sent_keys(authorizations: Sequence[str], api_keys: Sequence[str]) -> list[str]:
    """Of ``Authorization: Bearer <key>`` and ``x-api-key: <key>``, at most one of each."""
    if len(authorizations) > 1 or len(api_keys) > 1:
        return []
    schemes = [sent.partition(" ") for sent in authorizations]
    return [*(credentials for scheme, _, credentials in schemes if scheme == "Bearer"), *api_keys]


def is_among(key: str, sent: Sequence[str]) -> bool:
    """Compared in constant time."""
    return any(hmac.compare_digest(_digest(one), _digest(key)) for one in sent)


def client_name(caller: Caller | None, address: str, user: str | None = None) -> str:
    """Who sent a request: the tenant of its key or else its address, and the ``user`` it names where that is trusted.
    The queue is fair among clients."""
    if caller is not None:
        return f"tenant:{caller.of}/{user}" if user else f"tenant:{caller.of}"
    return f"user:{user}" if user else f"address:{network_of(address)}"


def _digest(text: str) -> bytes:
    # Headers may hold any byte, as surrogates; a digest has one length whatever was sent.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


def _state_of(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> list[Caller]:
    """Raises ``OSError``, ``ValueError``."""
    with open(path, encoding="utf-8") as file:
        found = _parsed(file.read())
    if not isinstance(found, list) or not found:
        raise ValueError("has no list of keys; expected entries with name and sha256")
    callers = [_caller(number, one) for number, one in enumerate(found, 1)]
    for what, values in (("name", [one.name for one in callers]), ("sha256", [one.sha256 for one in callers])):
        if twice := _twice(values):
            raise ValueError(f"two keys have the {what} {twice}; each needs its own")
    return callers


def _parsed(text: str) -> Any:
    """JSON is YAML, and read much faster: requests wait meanwhile. Raises ``ValueError``."""
    with suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.decode(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"is no YAML: {str(error).splitlines()[0]}") from None


def _caller(number: int, found: object) -> Caller:
    try:
        return msgspec.convert(found, Caller)
    except msgspec.ValidationError as error:
        raise ValueError(f"key {number}: {error}") from None


def _twice(values: Sequence[str]) -> str | None:
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _words(error: Exception) -> str:
    return (error.strerror or "cannot be read") if isinstance(error, OSError) else str(error)
