"""Clients that go away at random moments: while they send, wait, prefill or decode, streaming or not, by FIN or RST.

Meanwhile others ask for greedy outputs. Bar: nobody gets a 5xx, the others' outputs are the same as before, every row
and KV block is free afterwards, and as many sequences are admitted as at first.

    python -m tools.attack.aborts --count 5000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tools.attack.client import CHAT, COMPLETIONS, Connection, ask, request
from tools.attack.harness import Row, Target, arguments, run, target_of, token_ids

LEAVERS, WITNESSES = 32, 3
WITNESS = "127.0.0.2"
"""The address of those who stay; the others have that of this machine."""
MEAN_S = 0.05
"""How long those stay who do not wait for output."""
MOST_S = 10.0
"""How long any of them stays."""


@dataclass(slots=True)
class Seen:
    moments: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    witnessed: int = 0
    wrong: list[str] = field(default_factory=list)


async def attack(target: Target, count: int, seed: int) -> list[Row]:
    rng, seen, numbers = random.Random(seed), Seen(), iter(range(count))
    questions = [witness_request(rng) for _ in range(WITNESSES)]
    expected = [(await ask(target, COMPLETIONS, question)).text for question in questions]

    async def leaver(number: int) -> None:
        mine = random.Random(f"{seed}:{number}")
        for _ in numbers:
            await leave(target, mine, seen)

    async def witness(question: dict[str, Any], text: str) -> None:
        while True:
            answer = await ask(target, COMPLETIONS, question, source=WITNESS)
            seen.witnessed += 1
            if (answer.ending, answer.text) != ("whole", text):
                seen.wrong.append(f"{answer.ending} {answer.status} {answer.code} {answer.text!r}, expected {text!r}")

    others = [asyncio.create_task(witness(*pair)) for pair in zip(questions, expected)]
    await asyncio.gather(*(leaver(number) for number in range(LEAVERS)))
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return await rows(target, count, seen)


def witness_request(rng: random.Random) -> dict[str, Any]:
    prompt = token_ids(rng, rng.randint(20, 120))
    return {"prompt": prompt, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


async def leave(target: Target, rng: random.Random, seen: Seen) -> None:
    """One request, and its client gone before the end (unless that comes sooner)."""
    body: dict[str, Any] = {"n": rng.choice((1, 1, 1, 2, 4)), "max_tokens": rng.randint(1, 80), "ignore_eos": True}
    body |= {"stream": rng.random() < 0.6, "temperature": rng.choice((0, 1)), "seed": rng.randrange(1000)}
    if rng.random() < 0.3:
        data = request(CHAT, body | {"messages": [{"role": "user", "content": "json " * rng.randint(1, 200)}]})
    else:
        data = request(COMPLETIONS, body | {"prompt": token_ids(rng, rng.randint(1, 300))})
    moment = rng.choice(("sending", "at once", "soon", "soon", "first output", "later output"))
    seen.moments[moment] += 1
    connection = await Connection.open(target)
    connection.writer.write(data[: rng.randrange(len(data))] if moment == "sending" else data)
    try:
        async with asyncio.timeout(MOST_S):
            await _wait(connection, moment, rng, seen)
    except TimeoutError:
        seen.moments["later than that"] += 1
    except ConnectionError as error:
        seen.wrong.append(f"a client that had not left yet ({moment}): {error!r}")
    connection.reset() if rng.random() < 0.5 else connection.close()


async def _wait(connection: Connection, moment: str, rng: random.Random, seen: Seen) -> None:
    if moment == "soon":
        await asyncio.sleep(rng.expovariate(1 / MEAN_S))
    elif moment.endswith("output"):
        head = await connection.head()
        seen.statuses[head.status] += 1
        left = rng.randint(1, 50) if moment == "later output" else 1
        async for _ in connection.parts(head):
            left -= 1
            if not left:
                break


async def rows(target: Target, count: int, seen: Seen) -> list[Row]:
    tried = f"{count} clients: " + ", ".join(f"{name} {number}" for name, number in sorted(seen.moments.items()))
    for wrong in seen.wrong[:5]:
        print(wrong, file=sys.stderr)
    statuses = ", ".join(f"{status}: {number}" for status, number in sorted(seen.statuses.items())) or "none"
    held = await target.held()
    alive = await target.engine() == target.engine_pid and await target.same()
    refused = await refusals(target)
    others = f"{seen.witnessed} greedy outputs meanwhile"
    return [
        Row("aborts: answers", tried, statuses, "only 200", set(seen.statuses) <= {200}),
        Row("aborts: others", others, f"{len(seen.wrong)} wrong", "0", seen.witnessed > 0 and not seen.wrong),
        Row("aborts: blocks", tried, held or "all free", "all free", not held),
        Row("aborts: engine", tried, "the same" if alive else "died or changed", "the same", alive),
        Row("aborts: admission", "server.max_queue sequences at once", f"{refused} refused", "0", refused == 0),
    ]


async def refusals(target: Target) -> int:
    """How many of as many sequences as the server takes at once are refused."""
    server = (await target.plan())["plan"]["settings"]["server"]
    sizes = [server["max_n"]] * (server["max_queue"] // server["max_n"])
    sizes += [rest] if (rest := server["max_queue"] % server["max_n"]) else []
    asked = [ask(target, COMPLETIONS, {"prompt": [5], "n": n, "max_tokens": 16, "ignore_eos": True}) for n in sizes]
    answers = await asyncio.gather(*asked)
    return sum(size for size, answer in zip(sizes, answers) if answer.ending != "whole")


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        return await attack(target, options.count, options.seed)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, count=5000).parse_args(), main))
