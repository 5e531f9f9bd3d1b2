"""Sends requests that are almost right, and bytes that are hardly HTTP, and looks at every answer.

Mutations of valid requests go over keep-alive connections; a tenth of all tries are raw bytes on connections of their
own. Bar: no 5xx, no answer after more than 5 s, no engine death, every refusal is the error object of four keys with a
message of at most 600 characters and without addresses, paths or tracebacks; the canary is answered as before.

    python -m tools.attack.fuzz --requests 30000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from tools.attack.client import Connection, Reply, request
from tools.attack.corpus import mutated
from tools.attack.harness import Row, Target, arguments, is_error_object, run, target_of
from tools.attack.raw_corpus import Raw, broken_raw, raw_corpus

OVERRIDES = ("model.max_len=256", "server.max_n=8")
"""The longest output is short, so that what takes long hangs."""
WORKERS = 16
HANG_S = 5.0
WAIT_S = 0.3
"""For an answer to bytes that may be the beginning of something."""
CANARY_EVERY = 500
LONGEST_MESSAGE = 600
LEAK = re.compile(r"0x[0-9a-fA-F]{6,}|(?:/[\w.\-]+){2,}|Traceback|File \"|\.py\b")


@dataclass(slots=True)
class Findings:
    """What went wrong, with the first example of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, sent: bytes, reply: object) -> None:
        self.counts[kind] += 1
        self.examples.setdefault(kind, f"{sent[:300]!r} -> {str(reply)[:600]}")

    def look(self, sent: bytes, reply: Reply, expected: frozenset[int] | None = None) -> None:
        self.statuses[reply.status] += 1
        if reply.status >= 500:
            self.note("5xx", sent, reply)
        elif expected is not None and reply.status not in expected:
            self.note("wrong status", sent, reply)
        elif reply.status == 200 and b'data: {"error"' in reply.body:
            self.note("5xx", sent, reply)
        elif reply.status >= 400 and not sent.startswith(b"HEAD"):
            self._look_at_refusal(sent, reply)

    def _look_at_refusal(self, sent: bytes, reply: Reply) -> None:
        if not is_error_object(reply):
            self.note("not the error object", sent, reply)
            return
        message = str(reply.json()["error"]["message"])
        leaked = [found for found in LEAK.findall(message) if found.encode() not in sent]
        if len(message) > LONGEST_MESSAGE or leaked:
            self.note("message too long or leaking", sent, message)


async def attack(target: Target, count: int, seed: int) -> list[Row]:
    """``count`` tries, the whole raw corpus among them."""
    findings, begun = Findings(), time.monotonic()
    numbers, raws = iter(range(count)), iter(raw_corpus())

    async def worker(number: int) -> None:
        rng, connection = random.Random(f"{seed}:{number}"), None
        for i in numbers:
            if i % 10 == 0:
                await _send_raw(target, next(raws, None) or broken_raw(rng), findings)
            else:
                connection = await _send(target, connection, *mutated(rng), findings)
            if i % CANARY_EVERY == CANARY_EVERY - 1 and not await target.same():
                findings.note("canary differs", b"", await target.canary())
        if connection is not None:
            connection.close()

    await asyncio.gather(*(worker(number) for number in range(WORKERS)))
    for raw in raws:
        await _send_raw(target, raw, findings)
    rate = count / (time.monotonic() - begun)
    if await target.engine() != target.engine_pid or not await target.is_ready():
        findings.note("engine deaths", b"", "another process id")
    if not await target.same():
        findings.note("canary differs", b"", await target.canary())
    if held := await target.held():
        findings.note("held afterwards", b"", held)
    return _rows(findings, count, rate)


async def _send(
    target: Target, connection: Connection | None, path: str, body: bytes, findings: Findings
) -> Connection | None:
    """Returns the connection while it may be used again."""
    data = request(path, body)
    try:
        async with asyncio.timeout(HANG_S):
            connection = connection or await Connection.open(target)
            reply = await connection.ask(data)
    except TimeoutError:
        findings.note("hangs", data, "nothing")
    except (ConnectionError, ValueError) as error:
        findings.note("no answer", data, repr(error))
    else:
        findings.look(data, reply)
        if reply.headers.get("connection") != "close":
            return connection
    if connection is not None:
        connection.close()
    return None


async def _send_raw(target: Target, raw: Raw, findings: Findings) -> None:
    """An answer or a closed connection, at once if the bytes are a whole request."""
    connection = await Connection.open(target)
    try:
        async with asyncio.timeout(HANG_S if raw.whole else WAIT_S):
            connection.writer.write(raw.data)
            reply = await connection.reply(bodiless=raw.data.startswith(b"HEAD"))
            if reply.status == 100:
                reply = await connection.reply()
        findings.look(raw.data, reply, raw.statuses)
    except TimeoutError:
        if raw.whole:
            findings.note("hangs", raw.data, raw.name)
    except ConnectionError:
        # Closed without a word, which is an answer to garbage.
        if 200 in (raw.statuses or ()):
            findings.note("no answer", raw.data, raw.name)
    except ValueError as error:
        findings.note("no answer", raw.data, repr(error))
    finally:
        connection.close()


def _rows(findings: Findings, count: int, rate: float) -> list[Row]:
    for kind, example in findings.examples.items():
        print(f"{kind}: {example}", file=sys.stderr)
    answers = ", ".join(f"{status}: {number}" for status, number in sorted(findings.statuses.items()))
    rows = [Row("fuzz", f"{count} requests", f"{rate:.0f} requests/s; {answers}", "reported", None)]
    for kind, bar in BARS.items():
        found = findings.counts[kind]
        rows.append(Row(f"fuzz: {kind}", f"{count} requests", str(found), bar, found == 0, timed=kind == "hangs"))
    return rows


BARS = {
    "5xx": "0",
    "hangs": f"0 of more than {HANG_S:.0f} s",
    "no answer": "0",
    "wrong status": "0",
    "not the error object": "0",
    "message too long or leaking": "0",
    "engine deaths": "0",
    "canary differs": "0",
    "held afterwards": "0",
}


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options, *OVERRIDES) as target:
        return await attack(target, options.requests, options.seed)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, requests=3000).parse_args(), main))
