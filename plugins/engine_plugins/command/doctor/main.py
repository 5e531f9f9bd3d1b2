"""Entry of ``engine doctor``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence

import aiohttp
import msgspec
from rich.console import Console

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_plugins.command.doctor import evidence
from engine_plugins.command.doctor.diagnosis import diagnose
from engine_plugins.command.doctor.evidence import Evidence
from engine_plugins.command.doctor.recording import record
from engine_plugins.command.doctor.report import causes, document, render
from engine_plugins.command.doctor.rule import Rule
from engine_plugins.command.doctor.rules import RULES
from engine_plugins.command.live import LiveEngine, LiveError

TIMEOUT_S = 30.0


def run(flags: argparse.Namespace) -> int:
    """Run ``engine doctor`` with parsed flags; returns the exit status."""
    try:
        rules = (*RULES, *(rule for name in flags.rules for rule in rules_at(name)))
        if flags.causes:
            print(causes(rules), end="")
            return OK
        found = evidence.read(flags.evidence) if flags.evidence else asyncio.run(_record(flags))
        if flags.record:
            evidence.write(found, flags.record)
    except LiveError as error:
        return complain(error, FAILED)
    except (ValueError, OSError) as error:
        return complain(error, USAGE)
    except KeyboardInterrupt:
        return complain("interrupted; nothing was diagnosed", INTERRUPTED)
    diagnosis = diagnose(found, rules)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(document(diagnosis, found)), indent=1).decode())
    else:
        Console().print(render(diagnosis, found))
    return OK


async def _record(flags: argparse.Namespace) -> Evidence:
    console = Console(stderr=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        with console.status("", refresh_per_second=1) as line:
            return await record(LiveEngine(session, flags.url, flags.api_key), flags.window, line.update)


def rules_at(name: str) -> Sequence[Rule]:
    """Of ``package.module:NAME``. Raises ``ValueError`` if there are none."""
    module, _, attribute = name.partition(":")
    try:
        found = tuple(getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--rules {name}: expected MODULE:NAME of a sequence of rules ({error})") from error
    if wrong := [each for each in found if not isinstance(each, Rule)]:
        raise ValueError(f"--rules {name}: holds a {type(wrong[0]).__name__}, expected rules")
    return found


def complain(error: object, status: int) -> int:
    print(f"engine doctor: {error}", file=sys.stderr)
    return status
