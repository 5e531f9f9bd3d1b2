"""Requests that take each other's KV blocks: a pool far smaller than what runs at once needs.

The same requests, greedy and sampled, go to a server with an ample pool first; the other's holds two of the longest
texts. Bar: at least ``--count`` preemptions, every output equal to that of the ample pool, no error, every block free
afterwards. Tokens that were computed twice are reported: with ``kv_store=[host]`` those of a block that was not full
yet are left.

    python -m tools.attack.preemption --count 500 [--longest 1024] [kv_store=[host]]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from typing import Any

from tools.attack.client import COMPLETIONS, Answer, ask
from tools.attack.harness import Row, Target, arguments, run, serve, token_ids

from engine.counters.declared import PREEMPTIONS, STEP_TOKENS

LONGEST = 256
REQUESTS = 48
MOST_WAVES = 200


def requests(seed: int, longest: int = LONGEST) -> list[dict[str, Any]]:
    """Texts of up to ``longest`` tokens; every second is sampled: a seed gives one output, whoever runs beside it."""
    rng = random.Random(seed)
    made = []
    for i in range(REQUESTS):
        prompt, output = rng.randint(longest // 50, longest // 4), rng.randint(longest // 4, longest * 3 // 5)
        body = {"prompt": token_ids(rng, prompt), "max_tokens": output, "seed": i}
        made.append(body | {"temperature": i % 2, "ignore_eos": True, "n": rng.choice((1, 1, 2))})
    return made


async def wave(target: Target, bodies: list[dict[str, Any]], salt: str) -> list[Answer]:
    """All at once; ``salt`` keeps what earlier waves left in the prefix cache out of it."""
    return await asyncio.gather(*(ask(target, COMPLETIONS, body | {"cache_salt": salt}) for body in bodies))


async def attack(
    target: Target, expected: list[str], bodies: list[dict[str, Any]], count: int, once: float
) -> list[Row]:
    """``once``: tokens that a wave computes if nothing is preempted."""
    preempted, wrong, failed, waves = 0, 0, 0, 0
    before = await target.counter(STEP_TOKENS.name)
    while preempted < count and waves < MOST_WAVES:
        answers = await wave(target, bodies, str(waves))
        failed += sum(answer.ending != "whole" for answer in answers)
        wrong += sum(a.ending == "whole" and a.text != text for a, text in zip(answers, expected))
        waves += 1
        preempted = int(await target.counter(PREEMPTIONS.name))
    held = await target.held()
    twice = await target.counter(STEP_TOKENS.name) - before - waves * once
    again = f"{twice:.0f} tokens, {twice / max(preempted, 1):.1f} a preemption"
    tried = f"{waves * len(bodies)} requests, {preempted} preemptions"
    return [
        Row("preemption: how often", tried, str(preempted), f">= {count}", preempted >= count),
        Row("preemption: outputs", tried, f"{wrong} differ from an ample pool's", "0", wrong == 0),
        Row("preemption: errors", tried, str(failed), "0", failed == 0),
        Row("preemption: computed twice", tried, again, "reported", None),
        Row("preemption: blocks", tried, held or "all free", "all free", not held),
    ]


async def main(options: argparse.Namespace) -> list[Row]:
    bodies = requests(options.seed, options.longest)
    overrides = (f"model.max_len={options.longest}", *options.overrides)
    async with serve(*overrides) as ample:
        before = await ample.counter(STEP_TOKENS.name)
        expected = [answer.text for answer in await wave(ample, bodies, "")]
        once = await ample.counter(STEP_TOKENS.name) - before
        if await ample.counter(PREEMPTIONS.name):
            raise SystemExit("error: the pool of the server to compare with is too small")
    async with serve(f"memory.kv_tokens={2 * options.longest}", *overrides) as target:
        return await attack(target, expected, bodies, options.count, once)


if __name__ == "__main__":
    sys.exit(run(arguments(__doc__, url=False, count=500, longest=LONGEST).parse_args(), main))
