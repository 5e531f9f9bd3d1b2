"""Entry of ``engine kv``: does what was asked, and says it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.contracts.command import FAILED, INTERRUPTED, OK
from engine_lab.shared.live import LiveEngine, LiveError
from engine_plugins.kv_store.command import archive, folder, live
from engine_plugins.kv_store.command.folder import FolderError, Namespace, ago, size
from engine_plugins.kv_store.command.words import URL, Asked

TIMEOUT_S = 10.0
WARM_S = 600.0
"""For one prompt."""
MOST_SAID = 20
"""Files, or prompts, that are named."""


def run(asked: Asked, flags: argparse.Namespace) -> int:
    """Returns the exit status."""
    try:
        return ACTIONS[asked.action](asked, flags)
    except (FolderError, LiveError) as error:
        return _failed(error)
    except OSError as error:
        return _failed(f"{error.filename or asked.file}: {error.strerror}")
    except UnicodeDecodeError as error:
        return _failed(f"{asked.file}: expected UTF-8: {error}")
    except KeyboardInterrupt:
        return INTERRUPTED


def _failed(error: object) -> int:
    print(f"engine kv: {error}", file=sys.stderr)
    return FAILED


def _ls(asked: Asked, flags: argparse.Namespace) -> int:
    root = folder.existing(flags.path)
    found = folder.namespaces(root)
    if flags.json:
        print(msgspec.json.encode([_plain(one) for one in found]).decode())
    elif found:
        Console().print(table(found))
    else:
        print(f"{root} has no records")
    return OK


def _plain(one: Namespace) -> dict[str, Any]:
    about = {name: value for name, value in msgspec.structs.asdict(one.about).items() if value}
    used = {"newest_s": one.newest_s, "oldest_s": one.oldest_s} if one.records else {}
    counts = {"records": one.records, "bytes": one.num_bytes, "unfinished": one.unfinished}
    return {"namespace": one.name, "about": about, **counts, **used}


def table(found: list[Namespace]) -> Table:
    """A line for each."""
    shown = Table(box=None, pad_edge=False)
    for column in ("namespace", "model"):
        shown.add_column(column, overflow="fold")
    for column in ("records", "bytes", "last used", "oldest use"):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in found:
        about = one.about
        said = ", ".join(filter(None, (about.model, about.dtype, about.device))) or "-"
        ages = (ago(one.newest_s), ago(one.oldest_s)) if one.records else ("-", "-")
        unfinished = f" +{one.unfinished}" if one.unfinished else ""
        shown.add_row(one.name[:12], Text(said), f"{one.records:,}{unfinished}", size(one.num_bytes), *ages)
    return shown


def _stats(asked: Asked, flags: argparse.Namespace) -> int:
    if not asked.url:
        return _of_folder(asked, flags)
    found = asyncio.run(_report(asked.url, flags))
    if flags.json:
        print(msgspec.json.encode(found).decode())
    else:
        _print(found, asked.url)
    return OK


def _of_folder(asked: Asked, flags: argparse.Namespace) -> int:
    code, root = _ls(asked, flags), folder.existing(flags.path)
    if not flags.json:
        used = folder.used_within(root, (3600.0, 86400.0))
        total = sum(one.num_bytes for one in folder.namespaces(root))
        hour, day = (share / max(1, total) for share in used)
        bound = f"{total / max(1, flags.max_bytes):.0%} of --max-bytes"
        print(f"{size(total)}, {bound}; used in the last hour {hour:.0%}, day {day:.0%}")
    return code


async def _report(url: str, flags: argparse.Namespace) -> live.Report:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        return await live.report(LiveEngine(session, url, flags.api_key), flags.engine)


def _print(found: live.Report, url: str) -> None:
    console = Console()
    most = max(1, found.prompt_tokens)
    loaded = {store.name: store.loaded_tokens for store in found.stores}
    tiers = {"KV pool": found.cached_tokens - sum(loaded.values()), **loaded}
    said = ", ".join(f"{name} {tokens / most:.1%}" for name, tokens in tiers.items())
    console.print(f"{url}, engine {found.engine}", highlight=False, markup=False)
    console.print(f"{found.prompt_tokens:,} prompt tokens, cached: {said}", highlight=False, markup=False)
    if found.stores:
        console.print(stores_table(found.stores))
    for line in (found.others, *found.skipped, found.verdict, f"Next bound: {found.bound}" if found.bound else ""):
        if line:
            console.print(line, highlight=False, markup=False)


def stores_table(stores: tuple[live.Store, ...]) -> Table:
    """A line for each."""
    shown = Table(box=None, pad_edge=False, collapse_padding=True)
    shown.add_column("store", no_wrap=True)
    for column in ("records", "bytes", "of\nbound", "evicted", "faults", "tokens\nloaded", "waited\ns", "saved\ns"):
        shown.add_column(column, justify="right", no_wrap=True)
    for store in stores:
        counts = f"{store.evicted:,}", f"{store.faults:,}", f"{store.loaded_tokens:,}"
        times = f"{store.load_s:,.1f}", f"{store.saved_s:,.1f}"
        shown.add_row(store.name, f"{store.records:,}", size(store.num_bytes), f"{store.used:.0%}", *counts, *times)
    return shown


def _verify(asked: Asked, flags: argparse.Namespace) -> int:
    root = folder.existing(flags.path)
    good = bad = left = 0
    for file, problem in folder.damaged(root, folder.chosen(root, asked.namespace)):
        if not problem:
            good += 1
            continue
        bad += 1
        if bad <= MOST_SAID:
            print(f"{file}: {problem}")
        if flags.remove:
            file.unlink(missing_ok=True)
        else:
            left += 1
    what = "" if not bad else ", removed" if flags.remove else " (--remove removes them)"
    print(f"{good:,} records are as they were written, {bad:,} are damaged{what}")
    return FAILED if left else OK


def _export(asked: Asked, flags: argparse.Namespace) -> int:
    root = folder.existing(flags.path)
    target = Path(asked.file)
    added, damaged = archive.export(root, folder.chosen(root, asked.namespace), target)
    left_out = f"; {damaged:,} are damaged and left out" if damaged else ""
    print(f"{target}: {added:,} records, {size(target.stat().st_size)}{left_out}")
    return OK


def _import(asked: Asked, flags: argparse.Namespace) -> int:
    taken = archive.take(folder.root_of(flags.path), Path(asked.file), flags.max_bytes)
    print(f"{taken.added:,} records were added, {taken.there:,} were there")
    for reason, count in taken.refused.most_common():
        print(f"{count:,} were refused: {reason}")
    if taken.no_room:
        print(f"{taken.no_room:,} do not fit: the folder may have {size(flags.max_bytes)} (--max-bytes)")
    if taken.problem:
        return _failed(f"{asked.file}: {taken.problem}; what was before it is taken")
    return FAILED if taken.refused else OK


def _clear(asked: Asked, flags: argparse.Namespace) -> int:
    root = folder.existing(flags.path)
    names = folder.chosen(root, asked.namespace)
    left = [folder.clear(root, name) for name in names]
    print(f"{sum(not one.failed for one in left):,} namespaces removed from {root}")
    for file in [file for one in left for file in one.of_others][:MOST_SAID]:
        print(f"no store has written {file}: it stays")
    failed = [each for one in left for each in one.failed.items()]
    for file, why in failed[:MOST_SAID]:
        print(f"{file} stays: {why}", file=sys.stderr)
    if not failed:
        return OK
    are_marked = all(one.is_marked for one in left if one.failed)
    then = "the next engine removes them, and finds none" if are_marked else "engines find them again"
    return _failed(f"{len(failed):,} records cannot be removed; {then}")


def _warm(asked: Asked, flags: argparse.Namespace) -> int:
    async def send() -> live.Warmed:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=WARM_S)) as session:
            return await live.warm(session, asked.url or URL, flags.api_key, Path(asked.file))

    found = asyncio.run(send())
    for error in found.errors[:MOST_SAID]:
        print(f"engine kv: {error}", file=sys.stderr)
    print(f"{found.prompts:,} prompts of {found.tokens:,} tokens, {len(found.errors):,} failed")
    return FAILED if found.errors else OK


ACTIONS = {
    "ls": _ls,
    "stats": _stats,
    "verify": _verify,
    "export": _export,
    "import": _import,
    "clear": _clear,
    "warm": _warm,
}
