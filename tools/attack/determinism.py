"""The same requests in quiet and beside others: greedy and seeded ones, with log probabilities.

The others come and go all the time, with prompts of 1 to 400 tokens and outputs of 1 to 100, so every run sees other
batches, chunks of prefill and cached prefixes. Bar: every text is the one of the quiet server. The largest difference
between log probabilities is reported.

    python -m tools.attack.determinism --runs 1000
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tools.attack.client import COMPLETIONS, ask, once, request
from tools.attack.harness import Row, Target, arguments, run, target_of, token_ids

BODIES = 20
TOKENS = 48
NOISE = 6

Output = tuple[str, list[float]]
"""A text and the log probabilities of its tokens."""


def requests(rng: random.Random) -> list[dict[str, Any]]:
    """Every second one is greedy, the others have a seed."""
    return [
        {
            "prompt": token_ids(rng, rng.randint(4, 200)),
            "temperature": i % 2,
            "seed": i,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "logprobs": 0,
        }
        for i in range(BODIES)
    ]


async def output(target: Target, body: dict[str, Any]) -> Output:
    reply = await once(target, request(COMPLETIONS, body))
    if reply.status != 200:
        raise SystemExit(f"error: {reply.status} {reply.body[:300]!r}")
    (choice,) = reply.json()["choices"]
    return choice["text"], choice["logprobs"]["token_logprobs"]


async def noise(target: Target, rng: random.Random, answered: Counter[str]) -> None:
    while True:
        body = {"prompt": token_ids(rng, rng.randint(1, 400)), "max_tokens": rng.randint(1, 100), "temperature": 1}
        answered[(await ask(target, COMPLETIONS, body)).ending] += 1


def differences(expected: Sequence[Output], found: Sequence[Output]) -> tuple[int, float]:
    """How many texts differ, and the largest difference between log probabilities of the same tokens."""
    pairs = list(zip(expected, found, strict=True))
    same = [(quiet[1], other[1]) for quiet, other in pairs if quiet[0] == other[0]]
    largest = max((abs(a - b) for quiet, other in same for a, b in zip(quiet, other, strict=True)), default=0.0)
    return len(pairs) - len(same), largest


async def attack(target: Target, runs: int, seed: int) -> list[Row]:
    rng = random.Random(seed)
    bodies = requests(rng)
    quiet = [await output(target, body) for body in bodies]
    answered: Counter[str] = Counter()
    others = [asyncio.create_task(noise(target, random.Random(f"{seed}:{i}"), answered)) for i in range(NOISE)]
    wrong, largest = 0, 0.0
    for begun in range(0, runs, BODIES):
        # One after the other or all at once: batches of every size.
        width = rng.choice((1, 4, BODIES))
        for first in range(0, min(BODIES, runs - begun), width):
            part = slice(first, min(first + width, runs - begun))
            found = await asyncio.gather(*(output(target, body) for body in bodies[part]))
            differ, most = differences(quiet[part], found)
            wrong, largest = wrong + differ, max(largest, most)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    tried = f"{runs} runs, {BODIES} requests of {TOKENS} tokens in turn, beside {answered['whole']} others"
    return [
        Row("determinism: texts", tried, f"{wrong} differ", "0", wrong == 0 and answered["whole"] > 0),
        Row("determinism: log probabilities", tried, f"differ by at most {largest:.2g}", "reported", None),
    ]


async def main(options: argparse.Namespace) -> list[Row]:
    async with target_of(options) as target:
        return await attack(target, options.runs, options.seed)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, runs=1000).parse_args(), main))
