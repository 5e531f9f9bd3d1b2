"""Kills an engine whose records are in memory (``kv_store=[host]``), and has two engines share them.

Clients ask about texts, more than the KV pool holds, each with one of a few questions. (a) One engine, killed (SIGKILL)
with requests in flight. Bar: after it is back the share of prompt tokens that are cached is at least 0.95 of what it
was before, and no answer differs. Also said: how soon the first answer comes that was loaded, beside one that was
computed. (b) Two engines, of which the first computes all texts, and the other is asked then. Bar: it finds them; what
both map of this memory (PSS) is no more than the records of one and 10 %. With ``model.dtype=bfloat16`` answers may
differ where two tokens are almost as likely.

    python -m tools.attack.kv_memory --texts 24 --tokens 1000 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.attack.client import COMPLETIONS, once, request
from tools.attack.harness import Row, Target, arguments, engines_of, run, serve, token_ids

CLIENTS, QUESTIONS = 2, 3
LEAST = 0.95
SLACK = 1.1


@dataclass(slots=True)
class Texts:
    """What is asked, and what was answered first."""

    rng: random.Random
    texts: list[list[int]]
    questions: list[list[int]]
    answers: dict[tuple[int, int], str] = field(default_factory=dict)
    differ: int = 0
    cached: int = 0
    prompt: int = 0

    async def ask(self, target: Target, number: int, salt: str = "") -> tuple[float, int]:
        """How long the answer took, in ms, and how many tokens of the prompt were cached."""
        which = self.rng.randrange(QUESTIONS)
        prompt = self.texts[number] + self.questions[which]
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        begun = time.perf_counter()
        reply = await once(target, request(COMPLETIONS, body | ({"cache_salt": salt} if salt else {})))
        took = (time.perf_counter() - begun) * 1e3
        if reply.status != 200:
            raise ConnectionError(f"status {reply.status}")
        answer = reply.json()
        text = answer["choices"][0]["text"]
        self.differ += self.answers.setdefault((number, which), text) != text
        cached = int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))
        self.cached, self.prompt = self.cached + cached, self.prompt + len(prompt)
        return took, cached

    async def for_seconds(self, target: Target, seconds: float) -> float:
        """Ask at random from all clients; the share of prompt tokens that were cached."""
        self.cached = self.prompt = 0
        ends = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < ends:
                await self.ask(target, self.rng.randrange(len(self.texts)))

        await asyncio.gather(*[client() for _ in range(CLIENTS)])
        return self.cached / self.prompt


def texts_of(options: argparse.Namespace) -> Texts:
    rng = random.Random(options.seed)
    texts = [token_ids(rng, options.tokens) for _ in range(options.texts)]
    return Texts(rng, texts, [token_ids(rng, 16) for _ in range(QUESTIONS)])


def overrides(options: argparse.Namespace) -> list[str]:
    pool = f"memory.kv_tokens={max(2 * options.tokens, options.texts * options.tokens // 6) + 512}"
    return ["kv_store=[host]", "model.dtype=float32", pool, f"model.max_len={options.tokens + 64}", *options.overrides]


async def killed(options: argparse.Namespace) -> list[Row]:
    """(a)"""
    texts = texts_of(options)
    async with serve(*overrides(options)) as target:
        for number in range(options.texts):
            await texts.ask(target, number)
        before = await texts.for_seconds(target, options.seconds)
        flights = [asyncio.create_task(texts.ask(target, number)) for number in range(4)]
        await asyncio.sleep(0.05)
        os.kill(target.engine_pid, signal.SIGKILL)
        began = time.monotonic()
        await asyncio.gather(*flights, return_exceptions=True)
        while await target.is_ready():
            await asyncio.sleep(0.01)
        await target.until_ready()
        back_s = time.monotonic() - began
        computed = [(await texts.ask(target, number, salt=f"nobody's {number}"))[0] for number in (1, 2, 3)]
        hit, cached = await texts.ask(target, 4)
        after = await texts.for_seconds(target, options.seconds)
        (store,) = (await target.stats())["stores"]
    tried = f"{options.texts} texts of {options.tokens} tokens, back after {back_s:.1f} s"
    said = f"{before:.3f} before, {after:.3f} in {options.seconds:g} s after; {store['faults']} faults"
    first = f"{hit:.0f} ms with {cached} tokens loaded, {sorted(computed)[1]:.0f} ms computed"
    return [
        Row("killed: share of tokens cached", tried, said, f">= {LEAST} of before", after >= LEAST * before),
        Row("killed: first answer", tried, first, "loaded, not computed", cached >= options.tokens // 16 * 16),
        Row("killed: answers", f"{len(texts.answers)} prompts", f"{texts.differ} differ", "0", texts.differ == 0),
    ]


async def shared(options: argparse.Namespace) -> list[Row]:
    """(b)"""
    texts = texts_of(options)
    async with serve("fleet.replicas=2", *overrides(options)) as target:
        await change(target, "drain?engine=replica-1")
        computed = [await texts.ask(target, number) for number in range(options.texts)]
        await change(target, "undrain?engine=replica-1")
        await change(target, "drain?engine=replica-0")
        before = mapped(target)
        loaded = [await texts.ask(target, number) for number in range(options.texts)]
        after = mapped(target)
        stores = [(await target.stats(f"replica-{number}"))["stores"][0] for number in range(2)]
    whole = options.texts * (options.tokens // 16 * 16)
    found = sum(cached for _, cached in loaded)
    bytes_ = ", ".join(f"{store['num_bytes'] / 1e6:.1f} MB in {store['records']} records" for store in stores)
    pss = f"PSS {before / 1e6:.1f} MB before, {after / 1e6:.1f} MB after; the engines keep {bytes_}"
    records = sum(store["num_bytes"] for store in stores)
    times = [sorted(took for took, _ in some)[len(some) // 2] for some in (computed, loaded)]
    tried = f"{options.texts} texts of {options.tokens} tokens"
    return [
        Row("shared: found by the other", tried, f"{found} of {whole} tokens", f">= {LEAST}", found >= LEAST * whole),
        Row("shared: memory", tried, pss, f"<= {SLACK} of records", after <= SLACK * records, measured=True),
        Row("shared: answers", tried, f"{times[0]:.0f} ms computed, {times[1]:.0f} ms loaded (medians)", "-", None),
        Row("shared: texts", f"{len(texts.answers)} prompts", f"{texts.differ} differ", "0", texts.differ == 0),
    ]


async def change(target: Target, what: str) -> None:
    reply = await once(target, request(f"/engine/fleet/{what}", b""))
    assert reply.status in (200, 202), reply.body


def mapped(target: Target) -> int:
    """Bytes of this memory that the engines map, what several map shared out (PSS)."""
    total = 0
    for pid in engines_of(target.api_pid):
        ours = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                ours = "memfd:engine-kv" in line
            elif ours and line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


async def main(options: argparse.Namespace) -> list[Row]:
    return [*await killed(options), *await shared(options)]


if __name__ == "__main__":
    parser = arguments(__doc__, url=False, texts=24, tokens=1000, seconds=60.0)
    sys.exit(run(parser.parse_args(), main))
