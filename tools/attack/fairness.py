"""One client asks for a great deal, another asks for eight tokens again and again: how long does the other wait?

Client ``a`` sends one request for 128 sequences of 600 tokens; then 128 requests for one such sequence; then as many as
the server's queue holds. Bar: the worst TTFT of client ``b`` beside the first is at most 1 s, and b is never refused.

    python -m tools.attack.fairness
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Any

from tools.attack.client import COMPLETIONS, Answer, Connection, ask, request
from tools.attack.harness import Row, Target, arguments, percentile, run, target_of

SEQUENCES, TOKENS = 128, 600
WORST_S = 1.0
OTHER = "127.0.0.2"
"""The address of b; a has that of this machine."""


async def attack(target: Target, asks: int, sequences: int = SEQUENCES, tokens: int = TOKENS) -> list[Row]:
    """``asks``: how often b asks beside each of the three."""
    queue = (await target.plan())["plan"]["settings"]["server"]["max_queue"]
    rows = []
    for what, requests, n in (
        ("one request", 1, sequences),
        ("requests of one sequence", sequences, 1),
        ("the whole queue", queue, 1),
    ):
        answers = await beside(target, asks, requests, {"n": n, "max_tokens": tokens})
        tried = f"a: {requests} x n={n} x {tokens} tokens; b: {len(answers)} x 8 tokens"
        refused = sum(answer.ending != "whole" for answer in answers)
        first = [answer.at_s[0] for answer in answers if answer.at_s]
        shown = f"b's TTFT: worst {max(first, default=0):.2f} s, median {percentile(first, 50):.2f} s"
        if requests == 1:
            rows.append(
                Row(f"fairness: {what}", tried, shown, f"<= {WORST_S:.0f} s", max(first) <= WORST_S, measured=True)
            )
        else:
            rows.append(Row(f"fairness: {what}", tried, shown, "reported", None))
        rows.append(Row(f"fairness: b beside {what}", tried, f"{refused} not answered", "0", refused == 0))
    held = await target.held()
    rows.append(Row("fairness: blocks", "a goes away", held or "all free", "all free", not held))
    return rows


async def beside(target: Target, asks: int, requests: int, of_a: dict[str, Any]) -> list[Answer]:
    """What b gets while a's requests run; then a goes away."""
    body = {"prompt": "def main(", "ignore_eos": True, "temperature": 1, "stream": True} | of_a
    begun = [await Connection.open(target) for _ in range(requests)]
    for connection in begun:
        connection.writer.write(request(COMPLETIONS, body))
    await begun[0].head()  # a's first output is out
    draining = [asyncio.create_task(_drain(connection)) for connection in begun[1:]]
    answers = []
    for i in range(asks):
        prompt = f"What does number {i} do?"
        body = {"prompt": prompt, "max_tokens": 8, "stream": True}
        answers.append(await ask(target, COMPLETIONS, body, source=OTHER))
    for task in draining:
        task.cancel()
    for connection in begun:
        connection.reset()
    await target.held()
    return answers


async def _drain(connection: Connection) -> None:
    """Read, as a client would: what stays unread would hold the server's writes back."""
    with contextlib.suppress(ConnectionError):
        async for _ in connection.parts(await connection.head()):
            pass


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        return await attack(target, options.count)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, count=20).parse_args(), main))
