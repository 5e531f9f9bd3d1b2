"""Two models behind one name: what each way to choose between them costs, and how often it answers as the large one.

    python -m tools.benchmarks.tiers [--prompts 600] [--seed 0] [--json FILE]

The large model is the bundled one (5.77M parameters), the small one its draft model (0.92M), trained on its answers; a
third has the small one's shape and random weights. Real engines, a real gateway, greedy answers of at most 64
tokens. Half of the prompts calibrate the cascade (``engine calibrate``), the other half is what the table is of:

* 45 % questions about names that the small model was trained on, in words that it was not;
* 25 % questions about names that it was not trained on;
* 20 % source text to be continued, which is not simple to ``router=tiered``;
* 10 % questions after a page of text, which are long to it.

Cost is parameters x tokens computed: prompt tokens that were not in a prefix cache, and output tokens, looks included,
relative to the large model alone. Every way has caches of its own. Agreement is with the large model's answers, as
``engine.service.agreement`` defines it. All of it depends on the prompts and on the models: measure with your own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer
from tools.train_drafter.prompts import BUNDLED, HELD_OUT_PHRASING, Prompts, is_held_out, sources_by_name

from engine.checkpoint.headers import read_header
from engine.contracts.shares import share_interval
from engine.counters.declared import STEP_TOKENS
from engine.service.agreement import agree

DRAFT = BUNDLED / "drafters" / "draft_model"
ENGINE = (sys.executable, "-m", "engine.cli.main")
MAX_TOKENS, AT_ONCE = 64, 4
START_S = 180.0
CASCADES = (0.5, 0.7, 0.9)
"""Shares that are asked for."""


@dataclass(frozen=True, slots=True)
class Way:
    """To choose a model."""

    label: str
    model: str
    """The name that is asked for."""
    words: tuple[str, ...] = ()
    """Of the gateway."""


@dataclass(slots=True)
class Row:
    """What came of one."""

    label: str
    texts: list[str]
    shares: Mapping[str, float]
    """Of the requests, by model that answered."""
    work: float
    """Parameters x tokens."""
    ms: float
    """Mean, of whole answers."""


@contextmanager
def started(*words: str) -> Iterator[str]:
    """A server or a gateway; its URL."""
    with tempfile.NamedTemporaryFile(prefix="engine-tiers-", suffix=".log") as log:
        process = subprocess.Popen([*ENGINE, *words, "server.port=0"], stdout=subprocess.DEVNULL, stderr=log)
        try:
            ends = time.monotonic() + START_S
            while "ready: " not in (said := Path(log.name).read_text(errors="replace")):
                if process.poll() is not None or time.monotonic() > ends:
                    raise SystemExit(f"{' '.join(words)}: did not start\n{said}")
                time.sleep(0.1)
            line = next(line for line in said.splitlines() if line.startswith("ready: "))
            yield "http://" + line.partition("http://")[2].partition("/")[0]
        finally:
            process.terminate()
            process.wait(60)


def prompts(count: int, seed: int) -> list[str]:
    """Mixed, in random order."""
    rng = random.Random(seed)
    known = Prompts(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), seed)
    answers = known.answers
    held_out, trained = ([name for name in answers if is_held_out(name) == value] for value in (True, False))
    sources = [text for name, text in sources_by_name() if is_held_out(name)]
    found = [HELD_OUT_PHRASING.format(name=name) for name in rng.sample(trained, int(0.45 * count))]
    held = rng.sample(held_out, min(len(held_out), int(0.25 * count)))
    found += [f"What does {name} do?" for name in held]
    for _ in range(int(0.2 * count)):
        text = rng.choice(sources)
        start = rng.randrange(max(1, len(text) - 400))
        found.append(f"Continue this:\n```\n{text[start : start + 400]}\n```")
    while len(found) < count:
        page = " ".join(rng.sample([*answers.values()], 30))[:2400]
        found.append(f"{page}\n\nWhat does {rng.choice(trained)} do?")
    rng.shuffle(found)
    return found


async def ask_all(url: str, way: Way, asked: Sequence[str]) -> tuple[list[str], Counter[str], float]:
    """Texts, models that answered, and milliseconds of an answer."""
    free, took_ms, models = asyncio.Semaphore(AT_ONCE), list[float](), Counter[str]()

    async def one(text: str) -> str:
        body = {
            "model": way.model, "messages": [{"role": "user", "content": text}], "temperature": 0,
            "max_tokens": MAX_TOKENS, "cache_salt": way.label,
        }  # fmt: skip
        async with free:
            begun_s = time.monotonic()
            async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
                found = await reply.json()
            took_ms.append((time.monotonic() - begun_s) * 1e3)
        assert reply.status == 200, found
        models[reply.headers.get("X-Model", way.model)] += 1
        return str(found["choices"][0]["message"]["content"])

    async with aiohttp.ClientSession() as session:
        texts = await asyncio.gather(*[one(text) for text in asked])
    return texts, models, statistics.fmean(took_ms)


async def computed(urls: Mapping[str, str]) -> dict[str, float]:
    """Tokens that each server has computed."""
    found = dict[str, float]()
    async with aiohttp.ClientSession() as session:
        for name, url in urls.items():
            async with session.get(f"{url}/engine/counters") as reply:
                metrics = (await reply.json())["metrics"]
            found[name] = sum(sum(one["values"].values()) for one in metrics if one["name"] == STEP_TOKENS.name)
    return found


def measured(way: Way, urls: Mapping[str, str], sizes: Mapping[str, int], asked: Sequence[str]) -> Row:
    with started("gateway", *urls.values(), "gateway.models={auto: [small, large]}", *way.words) as url:
        before = asyncio.run(computed(urls))
        texts, models, ms = asyncio.run(ask_all(url, way, asked))
        after = asyncio.run(computed(urls))
    work = sum(sizes[name] * (after[name] - before[name]) for name in urls)
    return Row(way.label, texts, {name: count / len(asked) for name, count in models.items()}, work, ms)


def parameters(folder: Path) -> int:
    """Those of the checkpoint; embeddings are tied, and count once."""
    return sum(math.prod(header.shape) for header in read_header(folder / "model.safetensors").values())


def random_model(folder: Path) -> Path:
    """Of the draft model's shape."""
    tool = Path(__file__).resolve().parents[1] / "make_random_model.py"
    subprocess.run([sys.executable, tool, folder, "--config", DRAFT / "config.json"], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DRAFT / name, folder / name)
    return folder


def main(flags: argparse.Namespace) -> None:
    texts = prompts(flags.prompts, flags.seed)
    half = len(texts) // 2
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        paths = {"large": BUNDLED, "small": DRAFT, "random": random_model(Path(folder) / "random")}
        sizes = {name: parameters(path) for name, path in paths.items()}
        urls = {
            name: stack.enter_context(started("serve", f"model.path={path}", f"model.name={name}", "drafter=none"))
            for name, path in paths.items()
        }
        asked, file = Path(folder) / "prompts.jsonl", Path(folder) / "table.json"
        asked.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts[:half]))
        with started("gateway", *urls.values()) as url:
            words = ("--small", "small", "--large", "large", "--max-tokens", str(MAX_TOKENS))
            subprocess.run([*ENGINE, "calibrate", url, *words, "--prompts", asked, "--out", file], check=True)
        best = json.loads(file.read_text())["agreement"][-1][1]

        def cascade(share: float) -> str:
            return f"gateway.cascade={{auto: {{table: '{file}', agreement: {share}}}}}"

        ways = [
            Way("all large", "large"),
            Way("length rule", "auto", ("router=tiered",)),
            *[Way(f"cascade, {share:.0%}", "auto", (cascade(share),)) for share in CASCADES if share <= best],
            *[Way(f"length rule, then cascade, {share:.0%}", "auto", ("router=tiered", cascade(share)))
              for share in CASCADES[1:2] if share <= best],
            Way("all small", "small"),
            Way("all random", "random"),
        ]  # fmt: skip
        rows = [measured(way, urls, sizes, texts[half:]) for way in ways]
    show(rows, sizes, flags.json)


def show(rows: Sequence[Row], sizes: Mapping[str, int], file: Path | None) -> None:
    base = rows[0]
    print(f"parameters: {', '.join(f'{name} {size:,}' for name, size in sizes.items())}; {len(base.texts)} prompts\n")
    print("| way | cost | small | large | agreement | mean ms |\n|---|---|---|---|---|---|")
    for row in rows:
        hits = sum(agree(text, other) for text, other in zip(row.texts, base.texts, strict=True))
        low, high = share_interval(hits, len(row.texts))
        shares = " | ".join(f"{row.shares.get(name, 0.0):.0%}" for name in ("small", "large"))
        agreed = f"{hits / len(row.texts):.1%} ({low:.1%} to {high:.1%})"
        print(f"| {row.label} | {row.work / base.work:.2f} | {shares} | {agreed} | {row.ms:.0f} |")
    if file is not None:
        document: Any = {"parameters": sizes, "rows": [asdict(row) for row in rows]}
        file.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="what was measured, answers included")
    main(parser.parse_args())
