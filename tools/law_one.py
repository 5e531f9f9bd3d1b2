"""Law 1 at length: the same tokens whatever is swapped in that claims to be lossless.

Compares plugin sets with the ``baseline`` preset (which runs ``execution=eager``), one request at a time, on the
bundled model, and prints per set how many prompts and tokens were compared and how many outputs differ. In float32
none may. In bfloat16 an output may part from the baseline's only where the two candidate tokens are closer together,
in float32, than rounding alone moves them: between one prompt in the baseline and a batch of many on the kernels of
the other sets. That is measured first, and each parting is checked against it.

    python tools/law_one.py --prompts 300
    python tools/law_one.py --prompts 100 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from engine import LLM
from engine.service.parsing import parse_messages

SETS = {
    "prefix cache": ("kv_allocator=prefix_cache", "scheduler=continuous", "drafter=none", "overlap=false"),
    "chunking": ("scheduler=chunked_prefill", "scheduler.token_budget=64", "kv_allocator=paged", "drafter=none"),
    "overlap": ("overlap=true", "scheduler=continuous", "kv_allocator=paged", "drafter=none"),
    "batching": ("scheduler=static", "kv_allocator=contiguous", "drafter=none", "overlap=false"),
    "ngram drafter": ("drafter=ngram", "drafter.adaptive=false", "kv_allocator=paged", "overlap=false"),
    "preemption": ("scheduler=continuous", "kv_allocator=paged", "drafter=none", "memory.kv_tokens=1200"),
    "all of them": ("+preset=latency", "drafter.adaptive=false", "memory.kv_tokens=1600", "scheduler.token_budget=128"),
}
Tokens = tuple[int, ...]


def make_prompts(llm: LLM, count: int) -> list[Tokens]:
    """Trained questions, source text of 1 to 600 tokens, and text after a shared beginning."""
    rng = random.Random(0)
    names = list(json.loads((Path(llm.plan.model.path) / "recall.json").read_text())["first_sentences"])
    text = llm.tokenizer.encode_now("".join(inspect.getsource(m) for m in (json, random, inspect)))
    made: list[Tokens] = []
    for i in range(count):
        start, length = rng.randrange(len(text) - 800), rng.choice((1, 5, 16, 60, 200, 600))
        if i % 3 == 0:
            question = {"role": "user", "content": f"What does {rng.choice(names)} do?"}
            made.append(llm.tokenizer.encode_chat_now(parse_messages([question])))
        elif i % 3 == 1:
            made.append(text[start : start + length])
        else:
            made.append(text[:200] + text[start : start + min(length, 60)])
    return made


def build(dtype: str, *overrides: str) -> LLM:
    common = ("device=cpu", "model.max_len=1024", "exporter=[]", "scheduler.max_requests=16")
    return LLM("bundled", overrides=[f"model.dtype={dtype}", *common, *overrides])


def alone(llm: LLM, prompts: Sequence[Tokens], max_tokens: int) -> list[Tokens]:
    """One request at a time."""
    return [llm.generate([p], max_tokens=max_tokens, temperature=0.0, ignore_eos=True)[0].tokens for p in prompts]


def rounding_noise(baseline: LLM, batching: LLM, prompts: Sequence[Tokens]) -> float:
    """How far two tokens' logprobs move against each other between the baseline, one prompt at a time, and a batch of
    many on the kernels of the other sets: the largest such shift among the 20 most likely tokens of any prompt."""
    options = {"max_tokens": 1, "temperature": 0.0, "logprobs": 20}
    many = batching.generate(prompts, **options)
    worst = 0.0
    for prompt, together in zip(prompts, many, strict=True):
        (single,) = baseline.generate([prompt], **options)
        a, b = dict(single.logprobs[0].top), dict(together.logprobs[0].top)
        shifts = [a[token] - b[token] for token in a.keys() & b.keys()]
        worst = max(worst, max(shifts) - min(shifts))
    return worst


def margin(exact: LLM, context: Tokens, one: int, other: int) -> float:
    """How far apart two candidate tokens are in float32 (logprobs)."""
    (done,) = exact.generate([context], max_tokens=1, temperature=0.0, logprobs=20)
    top = dict(done.logprobs[0].top)
    return abs(top[one] - top[other]) if one in top and other in top else float("inf")


def first_difference(a: Tokens, b: Tokens) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    baseline = build(options.dtype, "+preset=baseline")
    prompts = make_prompts(baseline, options.prompts)
    expected = alone(baseline, prompts, options.tokens)
    exact = build("float32", "+preset=baseline") if options.dtype != "float32" else None
    noise = rounding_noise(baseline, build(options.dtype, *SETS["batching"]), prompts) if exact else 0.0
    print(f"{options.dtype}, {len(prompts)} prompts, {options.tokens} tokens each; rounding noise {noise:.4f}")
    unexplained = 0
    for name, overrides in SETS.items():
        started = time.monotonic()
        llm = build(options.dtype, *overrides)
        done = llm.generate(prompts, max_tokens=options.tokens, temperature=0.0, ignore_eos=True)
        partings = []
        for prompt, mine, theirs in zip(prompts, (c.tokens for c in done), expected, strict=True):
            at = first_difference(mine, theirs)
            if at is not None:
                apart = margin(exact, prompt + theirs[:at], mine[at], theirs[at]) if exact else float("inf")
                partings.append(apart)
        beyond = sum(apart > noise for apart in partings)
        unexplained += beyond
        timings = [c.timings for c in done if c.timings]
        print(
            f"{name:14} {len(prompts) * options.tokens} tokens, {len(partings)} outputs differ"
            + (f" (largest margin {max(partings):.4f}, {beyond} beyond the noise)" if partings else "")
            + f"; cached {sum(t.cached_tokens for t in timings)}, accepted {sum(t.accepted_tokens for t in timings)}, "
            f"preemptions {sum(t.preemptions for t in timings)}; {time.monotonic() - started:.0f} s"
        )
        llm.close()
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
