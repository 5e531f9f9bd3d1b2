"""Entry of ``engine doctor``."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
from rich.console import Console

from engine.contracts.command import FAILED, INTERRUPTED, OK, USAGE
from engine_lab.bench.probe import ProbeError
from engine_lab.doctor import evidence, ledger
from engine_lab.doctor.classes import in_words
from engine_lab.doctor.diagnosis import Diagnosis, Finding, diagnose
from engine_lab.doctor.evidence import Evidence
from engine_lab.doctor.probe import probe
from engine_lab.doctor.recording import nothing, record
from engine_lab.doctor.report import causes, document, render
from engine_lab.doctor.rule import Rule
from engine_lab.doctor.rules import RULES
from engine_lab.doctor.shadow import options_of, workload_of
from engine_lab.doctor.verify import verify
from engine_lab.shared.errors import complain
from engine_lab.shared.live import LiveEngine, LiveError
from engine_lab.shared.output import check_writable
from engine_lab.shared.progress import status_line
from engine_lab.shared.servers import Refused
from engine_lab.shared.signals import ends_cleanly

TIMEOUT_S = 30.0
REQUESTS = 24
"""Of a run of ``--verify`` whose load is stated, not replayed."""


def run(flags: argparse.Namespace) -> int:
    """Run ``engine doctor`` with parsed flags; returns the exit status."""
    try:
        rules = (*RULES, *(rule for name in flags.rules for rule in rules_at(name)))
        if flags.causes:
            print(causes(rules), end="")
            return OK
        if flags.ledger is not None and not flags.verify:
            file = _ledger(flags.ledger)
            if flags.ledger and not file.exists():
                raise ValueError(f"--ledger {file}: no such file; --verify writes it")
            print("\n".join(ledger.score(ledger.read(file))))
            return OK
        if flags.record:
            check_writable(flags.record, flag="--record")
        if flags.verify:
            check_writable(str(_ledger(flags.ledger or "")), flag="--ledger")
        found = evidence.read(flags.evidence) if flags.evidence else asyncio.run(_record(flags))
        if flags.record:
            evidence.write(found, flags.record)
        diagnosis = diagnose(found, rules)
    except LiveError as error:
        return complain("doctor", error, FAILED)
    except (ValueError, OSError) as error:
        return complain("doctor", error, USAGE)
    except KeyboardInterrupt:
        return complain("doctor", "interrupted; nothing was diagnosed", INTERRUPTED)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(document(diagnosis, found)), indent=1).decode())
    else:
        Console().print(render(diagnosis, found))
    return _verify(flags, found, diagnosis) if flags.verify else OK


def _verify(flags: argparse.Namespace, found: Evidence, diagnosis: Diagnosis) -> int:
    """Of the first finding that predicts a time and has overrides, or advice that recorded requests can be sent by."""
    replayed = bool(found.requests) and not flags.workload

    def can_be_tried(finding: Finding) -> bool:
        return finding.rule.is_time and bool(finding.remedy.overrides or (replayed and finding.remedy.change))

    finding = next(filter(can_be_tried, diagnosis.findings), None)
    if finding is None:
        print("nothing to verify: no finding that saves time has an override, or advice to try", file=sys.stderr)
        return OK
    try:
        file = _ledger(flags.ledger or "")
        options = options_of(flags.workload or workload_of(found, REQUESTS), flags.pairs)
        with ends_cleanly(), status_line() as say:
            verified = asyncio.run(verify(finding, found, options, say, replayed=replayed))
        entry = ledger.entry_of(finding, found, verified.ratio, verified.paid)
        ledger.append(file, entry)
    except (Refused, ProbeError, LiveError, OSError) as error:
        return complain("doctor", error, FAILED)
    except ValueError as error:
        return complain("doctor", error, USAGE)
    except KeyboardInterrupt:
        return complain("doctor", "interrupted; nothing was verified", INTERRUPTED)
    to = sys.stderr if flags.json else sys.stdout
    print("\n".join(ledger.score([entry])), file=to)
    busy, runs = verified.busy
    if busy:
        print(f"the machine was busy in {busy} of {runs} runs: try again when it is quiet", file=to)
    print(f"P95 without, in ms: {in_words(verified.before)}\n       with:        {in_words(verified.after)}", file=to)
    return OK


def _ledger(path: str) -> Path:
    return Path(path) if path else ledger.default_file()


async def _record(flags: argparse.Namespace) -> Evidence:
    console = Console(stderr=True)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        engine, said = await LiveEngine(session, flags.url, flags.api_key).chosen(flags.engine)
        if said:
            print(f"engine doctor: {said}", file=sys.stderr)
        with console.status("", refresh_per_second=1) as line:
            way = nothing if flags.passive else lambda: probe(session, engine.url, flags.api_key)
            return await record(engine, flags.window, line.update, way)


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
