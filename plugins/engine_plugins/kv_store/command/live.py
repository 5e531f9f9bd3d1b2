"""The stores of a running server: whether they pay, which bound is next, and prompts that fill them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from engine.counters import declared
from engine_lab.shared.live import LiveEngine, LiveError, metrics_of
from engine_plugins.kv_store.command.folder import FolderError, size

FULL = 0.9
"""Of its bound: a store that has so much is full."""
AT_ONCE = 4
"""Prompts that :func:`warm` sends side by side."""
MOST_SHOWN = 200
"""Bytes of an answer that nobody expects."""
REASONS = {
    "few_tokens": "were too few to be read",
    "slower": "would have taken longer to read than to compute",
    "busy": "had to give way to others being read (a larger kv_store.{memory}.max_bytes lets more be read at once)",
    "no_room": "found memory full of what is in use (a larger kv_store.{memory}.max_bytes)",
    "late": "came too late",
    "incomplete": "were gone or damaged in part",
}
"""Of :data:`engine.loop.staging.SKIPPED`, what a person is told."""


class Store(msgspec.Struct, frozen=True):
    """As ``/engine/stats`` has it."""

    name: str
    records: int
    num_bytes: int
    most_bytes: int
    evicted: int
    faults: int
    loads: int
    loaded_tokens: int
    loaded_bytes: int
    stored_bytes: int
    load_s: float
    saved_s: float
    skipped: dict[str, int]
    unpriced_tokens: int = 0

    @property
    def used(self) -> float:
        return self.num_bytes / max(1, self.most_bytes)


@dataclass(frozen=True, slots=True)
class Report:
    """What is said of an engine's stores."""

    engine: str
    prompt_tokens: int
    """Looked up in the prefix cache."""
    cached_tokens: int
    stores: tuple[Store, ...]
    kv_bytes: int
    """Of the KV pool."""
    verdict: str
    bound: str
    skipped: tuple[str, ...]
    others: str
    """That there are other engines, if there are."""


async def report(engine: LiveEngine, name: str | None) -> Report:
    """Raises :class:`~engine_lab.shared.live.LiveError`."""
    mine, others = await engine.chosen(name)
    stats, plan = await mine.json("/engine/stats"), await mine.json("/engine/plan")
    here = (await engine.fleet())[stats["engine"]]
    if not here["ready"] and not stats.get("stores"):
        raise LiveError(f"{engine.url}: engine {stats['engine']} is {here['state']}; ask again when it is ready")
    counted = {sample.name: int(sample.value) for sample in await metrics_of(mine) if not sample.labels}
    try:
        stores = msgspec.convert(stats["stores"], tuple[Store, ...])
    except (KeyError, msgspec.ValidationError) as error:
        raise LiveError(f"{engine.url}/engine/stats has no stores as expected of this version: {error}") from error
    info = plan.get("engine") or {}
    asked, found = (counted.get(each.name, 0) for each in (declared.PREFIX_CACHE_QUERIES, declared.PREFIX_CACHE_HITS))
    kv_bytes = int(info.get("kv_bytes", 0))
    said = verdict(stores), bound(stores, kv_bytes), skips(stores)
    return Report(stats["engine"], asked, found, stores, kv_bytes, *said, others)


def verdict(stores: Sequence[Store]) -> str:
    """Whether they pay."""
    if not stores:
        return "It has no stores: kv_store=[host] keeps what its KV pool forgets."
    tokens, saved_s = sum(store.loaded_tokens for store in stores), sum(store.saved_s for store in stores)
    if not any(store.stored_bytes or store.records for store in stores):
        return "Nothing is stored yet."
    if not tokens:
        return "Nothing was loaded yet: no prompt began like one that the pool has forgotten."
    said = f"{tokens:,} tokens were loaded instead of computed"
    if tokens == sum(store.unpriced_tokens for store in stores):
        return f"Not known yet: {said}, and this engine has computed no long prompt that shows what it takes."
    if saved_s >= 0.0:
        return f"It pays: {said}, which saved at least {saved_s:,.1f} s."
    return f"It does not pay: {said}, which cost {-saved_s:,.1f} s more than computing."


def bound(stores: Sequence[Store], kv_bytes: int) -> str:
    """What limits them next, and what to set."""
    if not stores:
        return ""
    memory = stores[0]
    for store in stores:
        if store.faults:
            return (
                f"{store.name} had {store.faults:,} faults: records that were gone, as where engines share a folder, "
                "or damaged ('engine kv verify'), or writes that failed (the server's log)"
            )
    if memory.most_bytes < kv_bytes:
        return (
            f"{memory.name} ({size(memory.most_bytes)}) is smaller than the KV pool ({size(kv_bytes)}), which adds "
            f"little: kv_store.{memory.name}.max_bytes={2 * kv_bytes}"
        )
    for store in stores:
        if store.used >= FULL and store.evicted:
            return (
                f"{store.name} is full ({store.used:.0%}), and {store.evicted:,} records made way: more are kept with "
                f"kv_store.{store.name}.max_bytes={2 * store.most_bytes}"
            )
    fullest = max(stores, key=lambda store: store.used)
    return f"none is near: {fullest.name} uses most of its bound, {fullest.used:.0%}"


def skips(stores: Sequence[Store]) -> tuple[str, ...]:
    """What was computed although a store had it, a line for each reason."""
    counts = sum((Counter(store.skipped) for store in stores), Counter[str]())
    memory = stores[0].name if stores else ""
    return tuple(
        f"{count:,} times tokens were computed that a store had: they {REASONS.get(name, name).format(memory=memory)}"
        for name, count in counts.most_common()
    )


# Filling -----------------------------------------------------------------------------------------------------------


def prompts(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of each line that is not empty: the path of a request, and what to ask there. Raises :class:`FolderError`."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if line.lstrip()[0] not in "{[":
            yield "/v1/completions", {"prompt": line}
            continue
        try:
            found = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FolderError(f"{file}:{number}: expected a prompt, or JSON: {error}") from error
        if isinstance(found, list):
            found = {"messages": found}
        if "messages" in found:
            yield "/v1/chat/completions", found
        elif "prompt" in found:
            yield "/v1/completions", found
        else:
            raise FolderError(f"{file}:{number}: expected messages or prompt; it has {', '.join(found) or 'nothing'}")


@dataclass(frozen=True, slots=True)
class Warmed:
    """What came of the prompts."""

    prompts: int
    tokens: int
    errors: tuple[str, ...]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


async def warm(session: aiohttp.ClientSession, url: str, api_key: str | None, file: Path) -> Warmed:
    """Send the prompts of a file, all of them twice: a store may keep what is used a second time. Raises
    :class:`FolderError` and :class:`~engine_lab.shared.live.LiveError`."""
    asked = list(prompts(file))
    if not asked:
        raise FolderError(f"{file} has no prompts; expected one a line")
    models = await LiveEngine(session, url, api_key).json("/v1/models")
    try:
        model = msgspec.convert(models, _Models).data[0].id
    except (msgspec.ValidationError, IndexError):
        raise LiveError(f"{url}/v1/models names no model") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    limit = asyncio.Semaphore(AT_ONCE)

    async def send(number: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
        whole = {"model": model, **body, "max_tokens": 1, "stream": False}
        async with limit:
            try:
                async with session.post(base + path, json=whole, headers=headers) as response:
                    answer = await response.read()
            except (aiohttp.ClientError, TimeoutError) as error:
                return 0, f"prompt {number}: {error or 'timed out'}"
        try:
            if response.status != 200:
                why = msgspec.json.decode(answer, type=_Refusal).error.message
                return 0, f"prompt {number}: {response.status}: {why}"
            return msgspec.json.decode(answer, type=_Answer).usage.prompt_tokens, ""
        except (msgspec.DecodeError, RecursionError):
            return 0, f"prompt {number}: {response.status}: {answer[:MOST_SHOWN]!r}"

    for _ in range(2):
        answers = await asyncio.gather(*(send(at, *each) for at, each in enumerate(asked, start=1)))
    errors = tuple(error for _, error in answers if error)
    return Warmed(len(asked) - len(errors), sum(tokens for tokens, _ in answers), errors)
