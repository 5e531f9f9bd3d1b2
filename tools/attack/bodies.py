"""Bodies of 8 MiB that take as long as possible to look at, one by one, and 120 at once.

Meanwhile another process asks for ``/health`` every 5 ms: the longest answer is the longest time for which one body
blocked the event loop. Bar: at most 50 ms (the same probe without any body is shown beside it), no 5xx, the canary is
answered as before; 120 bodies at once take at most 200 MB of the API process.

    python -m tools.attack.bodies
    python -m tools.attack.bodies --only ids spaces --atonce 0
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tools.attack.client import CHAT, COMPLETIONS, Connection, Reply, request
from tools.attack.harness import Row, Target, arguments, is_error_object, peak_mb, reset_peak, rss_mb, run, target_of
from tools.attack.probe import Probe, quiet

SIZE = 8 * 1024 * 1024
PIECE = 256 * 1024
AT_ONCE = 120
BLOCKED_MS, GROWTH_MB = 50.0, 200.0
MOST_S = 60.0
TURN = '{"role":"user","content":""}'
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"


def filled(before: str, item: str, after: str, size: int = SIZE, separator: str = ",") -> bytes:
    """``before``, as many ``item`` as fit, ``after``."""
    start, one, end = before.encode(), (separator + item).encode(), after.encode()
    return start + item.encode() + one * ((size - len(start) - len(end) - len(item.encode())) // len(one)) + end


def numbered(before: str, item: Callable[[int], str], after: str, size: int = SIZE) -> bytes:
    """The same with a number in each item."""
    items: list[str] = []
    left = size - len(before) - len(after)
    for i in itertools.count():
        left -= len(item(i)) + 1
        if left < 0:
            return f"{before}{','.join(items)}{after}".encode()
        items.append(item(i))
    raise AssertionError


def text(item: str) -> bytes:
    return filled('{"prompt":"', item, '"}', separator="")


def said(item: str) -> bytes:
    return filled('{"messages":[{"role":"user","content":"', item, '"}]}', separator="")


Case = tuple[str, Callable[[], bytes]]
"""A path and how its body is made."""

TEXTS = {"a": "a", "spaces": " ", "escapes": "\\u0061", "newlines": "\\n", "emoji": FAMILY}
CASES: dict[str, Case] = {
    "ids": (COMPLETIONS, lambda: filled('{"prompt":[', "7", "]}")),
    "one-token prompts": (COMPLETIONS, lambda: filled('{"prompt":[', "[7]", "]}")),
    "empty prompts": (COMPLETIONS, lambda: filled('{"prompt":[', '""', "]}")),
    "empty messages": (CHAT, lambda: filled('{"messages":[', TURN, "]}")),
    "parts": (CHAT, lambda: filled('{"messages":[{"role":"user","content":[', '{"type":""}', "]}]}")),
    "text parts": (
        CHAT,
        lambda: filled('{"messages":[{"role":"user","content":[', '{"type":"text","text":""}', "]}]}"),
    ),
    "annotations": (CHAT, lambda: filled('{"messages":[{"role":"user","content":"","annotations":[', "[]", "]}]}")),
    "logit_bias": (COMPLETIONS, lambda: numbered('{"prompt":"a","logit_bias":{', lambda i: f'"{i}":1', "}}")),
    "stop strings": (COMPLETIONS, lambda: filled('{"prompt":"a","stop":[', '"a"', "]}")),
    "stop ids": (COMPLETIONS, lambda: filled('{"prompt":"a","stop_token_ids":[', "7", "]}")),
    "unknown fields": (COMPLETIONS, lambda: numbered('{"prompt":"a",', lambda i: f'"x{i}":1', "}")),
    "null fields": (COMPLETIONS, lambda: numbered('{"prompt":"a",', lambda i: f'"x{i}":null', "}")),
    "ignored field": (COMPLETIONS, lambda: filled('{"prompt":"a","metadata":[', "[]", "]}")),
    "neutral field": (COMPLETIONS, lambda: filled('{"prompt":"a","tools":[', "[]", "]}")),
    "nesting": (COMPLETIONS, lambda: b'{"prompt":' + b"[" * (SIZE - 20)),
    "nested fields": (CHAT, lambda: filled('{"metadata":', '{"a":', "1" + "}" * (SIZE // 6), separator="")),
    "spaces outside": (COMPLETIONS, lambda: filled("{", " ", '"prompt":"a"}', separator="")),
    **{f"text of {name}": (COMPLETIONS, partial(text, item)) for name, item in TEXTS.items()},
    **{f"message of {name}": (CHAT, partial(said, item)) for name, item in TEXTS.items()},
    **{f"/tokenize {name}": ("/tokenize", partial(text, item)) for name, item in TEXTS.items()},
    "/tokenize messages": ("/tokenize", lambda: filled('{"messages":[', TURN, "]}")),
    "/detokenize ids": ("/detokenize", lambda: filled('{"tokens":[', "7", "]}")),
    "/detokenize large ids": ("/detokenize", lambda: filled('{"tokens":[', "2147483647", "]}")),
}


async def attack(target: Target, names: Sequence[str], at_once: int, quiet_s: float = 3.0) -> list[Row]:
    """``quiet_s``: for how long the probe runs without any body."""
    rows = await all_at_once(target, names, at_once) if at_once else []
    idle = (await asyncio.to_thread(quiet, target, quiet_s)).worst
    singles = [await one(target, name, idle) for name in names]
    bad = [name for name, (_, fine) in zip(names, singles) if not fine]
    rows += [row for row, _ in singles]
    rows.append(
        Row("bodies: answers", f"{len(names)} bodies", ", ".join(bad) or "none bad", "no 5xx, no hang", not bad)
    )
    same = await target.same() and await target.engine() == target.engine_pid
    rows.append(Row("bodies: canary", f"{len(names)} bodies", "the same" if same else "differs", "the same", same))
    return rows


async def one(target: Target, name: str, idle: float) -> tuple[Row, bool]:
    """The row, and whether the answer is fine. ``idle``: the probe's longest answer without any body, in ms."""
    path, make = CASES[name]
    body = make()
    with Probe(target) as probe:
        begun = time.monotonic()
        outcome = await send(target, path, body)
        took = time.monotonic() - begun
        await asyncio.sleep(0.1)
    shown = f"{outcome} after {took * 1e3:.0f} ms; blocked {probe.worst:.0f} ms (without: {idle:.0f} ms)"
    tried, held = f"{len(body) / 2**20:.1f} MiB to {path}", probe.worst <= BLOCKED_MS
    return Row(f"bodies: {name}", tried, shown, f"<= {BLOCKED_MS:.0f} ms", held, measured=True), outcome.isdigit()


async def send(target: Target, path: str, body: bytes) -> str:
    """The status, or what is wrong with the answer."""
    try:
        connection = await Connection.open(target)
        async with asyncio.timeout(MOST_S):
            connection.writer.write(request(path, body=b"", length=len(body)))
            for at in range(0, len(body), PIECE):  # without a copy of it for each connection
                connection.writer.write(body[at : at + PIECE])
                await connection.writer.drain()
            reply = await connection.reply()
        connection.close()
    except TimeoutError:
        return "hangs"
    except ConnectionError:
        return "no answer"
    return str(reply.status) if _is_fine(reply) else f"bad {reply.status}"


def _is_fine(reply: Reply) -> bool:
    return reply.status == 200 or (reply.status < 500 and is_error_object(reply))


async def all_at_once(target: Target, names: Sequence[str], count: int) -> list[Row]:
    bodies = {name: (CASES[name][0], CASES[name][1]()) for name in names[:count]}
    before = rss_mb(target.api_pid)
    reset_peak(target.api_pid)
    with Probe(target) as probe:
        turns = itertools.islice(itertools.cycle(bodies.values()), count)
        outcomes = Counter(await asyncio.gather(*(send(target, *body) for body in turns)))
    growth = peak_mb(target.api_pid) - before
    answers = ", ".join(f"{outcome}: {number}" for outcome, number in sorted(outcomes.items()))
    tried, fine = f"{count} bodies of 8 MiB at once", all(outcome.isdigit() for outcome in outcomes)
    result, bar = f"{growth:.0f} MB", f"<= {GROWTH_MB:.0f} MB"
    return [
        Row("bodies: answers at once", tried, answers, "no 5xx, no hang", fine),
        Row("bodies: memory at once", tried, result, bar, growth <= GROWTH_MB, measured=True),
        Row("bodies: blocked at once", tried, f"{probe.worst:.0f} ms", "reported", None),
    ]


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        return await attack(target, options.only or list(CASES), options.atonce)


if __name__ == "__main__":
    parser = arguments(__doc__, atonce=AT_ONCE)
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    sys.exit(run(parser.parse_args(), main))
