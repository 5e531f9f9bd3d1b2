"""Two models behind one name: what each way to choose between them costs, and how often it answers as the large one.

    python -m tools.benchmarks.tiers [--prompts 600] [--seed 0]

The large model is the bundled one (5.77M parameters), the small one its draft model (0.92M), trained on its answers; a
third has the small one's shape and random weights. Each answers every prompt once, greedily, with at most 64 tokens;
what a way chooses is what ``router=tiered`` and the tables of ``engine calibrate`` say of it. Half of the prompts
calibrate the cascade, the other half is what the table is of:

* 45 % questions about names that the small model was trained on, in words that it was not;
* 25 % questions about names that it was not trained on, as far as there are so many;
* 20 % source text to be continued, which is not simple to the length rule;
* 10 % questions after a page of text, which are long to it.

Cost is parameters x tokens, relative to the large model alone: prompt and output tokens of the model that answers, and
of a look the small model's prompt, once, and the tokens that are looked at. No prompt is in a cache before. Agreement
is with the large model's answers, as ``engine.service.agreement`` defines it. The second table says how well a
confidence tells answers that agree from those that do not: 0.5 is chance, 1 is perfect. All of it depends on the models
and the prompts: measure with your own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from tools.train_drafter.prompts import BUNDLED, HELD_OUT_PHRASING, Prompts, is_held_out, sources_by_name

from engine.checkpoint.headers import read_header
from engine.contracts.router import ModelRequest, ModelView
from engine.contracts.shares import share_interval
from engine.service.agreement import agree
from engine.service.confidence import Calibration, confidence
from engine.service.offline import LLM
from engine.service.parsing import parse_messages
from engine.testing.context import build_context
from engine_lab.calibrate.isotonic import isotonic
from engine_plugins.router.tiered import TieredConfig, TieredRouter

DRAFT = BUNDLED / "drafters" / "draft_model"
MAX_TOKENS = 64
LOOKED_AT, QUANTILE = 24, 0.25
"""As ``engine calibrate`` has it."""
CASCADES = (0.3, 0.5, 0.7)
"""Shares of agreement that are asked for."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One prompt, by one model."""

    text: str
    logprobs: tuple[float, ...]
    """Of its tokens."""
    prompt_tokens: int


Answers = Mapping[str, Sequence[Answered]]
"""By model."""


def prompts(count: int, seed: int) -> list[str]:
    """Mixed, in random order."""
    rng = random.Random(seed)
    answers = Prompts(Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), seed).answers
    held_out, trained = ([name for name in answers if is_held_out(name) == value] for value in (True, False))
    sources = [text for name, text in sources_by_name() if is_held_out(name)]
    found = [HELD_OUT_PHRASING.format(name=name) for name in rng.sample(trained, int(0.45 * count))]
    found += [f"What does {name} do?" for name in rng.sample(held_out, min(len(held_out), int(0.25 * count)))]
    for _ in range(int(0.2 * count)):
        text = rng.choice(sources)
        start = rng.randrange(max(1, len(text) - 400))
        found.append(f"Continue this:\n```\n{text[start : start + 400]}\n```")
    for _ in range(int(0.1 * count)):
        page = " ".join(rng.sample([*answers.values()], 30))[:2400]
        found.append(f"{page}\n\nWhat does {rng.choice(trained)} do?")
    rng.shuffle(found)
    return found


def answers_of(path: Path, asked: Sequence[str]) -> list[Answered]:
    llm = LLM(str(path), ["overlap=false", "drafter=none"], ())
    try:
        encoded = [llm.tokenizer.encode_chat_now(parse_messages(({"role": "user", "content": one},))) for one in asked]
        done = llm.generate(encoded, max_tokens=MAX_TOKENS, temperature=0.0, logprobs=0)
    finally:
        llm.close()
    return [
        Answered(one.text, tuple([token.logprob for token in one.logprobs]), len(tokens))
        for one, tokens in zip(done, encoded, strict=True)
    ]


def random_model(folder: Path) -> Path:
    """Of the draft model's shape."""
    tool = Path(__file__).resolve().parents[1] / "make_random_model.py"
    subprocess.run([sys.executable, tool, folder, "--config", DRAFT / "config.json"], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DRAFT / name, folder / name)
    return folder


def parameters(folder: Path) -> int:
    """Those of the checkpoint; embeddings are tied, and count once."""
    return sum(math.prod(header.shape) for header in read_header(folder / "model.safetensors").values())


def is_small(text: str) -> bool:
    """What the length rule says."""
    router = TieredRouter(TieredConfig(), build_context())
    prompt = {"messages": json.dumps([{"role": "user", "content": text}]).encode()}
    views = (ModelView("small", True), ModelView("large", True))
    return router.choose(ModelRequest("r", "chat", "auto", prompt, {}), views).models[0] == "small"


def calibrated(answers: Answers, model: str, at: range) -> Calibration:
    pairs = [(sure(answers[model][i]), agree(answers[model][i].text, answers["large"][i].text)) for i in at]
    shares = tuple([(step.low, step.share) for step in isotonic(pairs)])
    return Calibration(model, "large", len(pairs), LOOKED_AT, QUANTILE, shares)


def sure(one: Answered, tokens: int = LOOKED_AT, quantile: float = QUANTILE) -> float:
    """An answer without tokens shows nothing."""
    return confidence(one.logprobs[:tokens], quantile) if one.logprobs else -math.inf


@dataclass(slots=True)
class Table:
    """Of some of the prompts."""

    asked: Sequence[str]
    answers: Answers
    sizes: Mapping[str, int]
    at: range

    def work(self, model: str, i: int) -> int:
        one = self.answers[model][i]
        return self.sizes[model] * (one.prompt_tokens + len(one.logprobs))

    def look(self, i: int, model: str, answers: bool) -> int:
        """``answers``: the model answers then, and has the prompt in its cache."""
        one = self.answers[model][i]
        prompt = 0 if answers else one.prompt_tokens
        return self.sizes[model] * (prompt + min(LOOKED_AT, len(one.logprobs)))

    def row(self, label: str, small: str, small_is_tried: Callable[[str], bool], threshold: float | None) -> None:
        """``threshold``: of a cascade; ``None``: there is none."""
        work = hits = shares = 0
        for i in self.at:
            tried = small_is_tried(self.asked[i])
            chosen = tried and (threshold is None or sure(self.answers[small][i]) >= threshold)
            model = small if chosen else "large"
            work += self.work(model, i)
            work += self.look(i, small, chosen) if tried and threshold is not None else 0
            hits += agree(self.answers[model][i].text, self.answers["large"][i].text)
            shares += chosen
        low, high = share_interval(hits, len(self.at))
        of_small = ""
        if shares:
            right = hits - (len(self.at) - shares)
            bounds = share_interval(right, shares)
            of_small = f"{right / shares:.1%} ({bounds[0]:.1%} to {bounds[1]:.1%})"
        cost = work / sum(self.work("large", i) for i in self.at)
        agreed = f"{hits / len(self.at):.1%} ({low:.1%} to {high:.1%})"
        print(f"| {label} | {cost:.2f} | {shares / len(self.at):.0%} | {agreed} | {of_small} |")


def main(flags: argparse.Namespace) -> None:
    asked = prompts(flags.prompts, flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"large": BUNDLED, "small": DRAFT, "random": random_model(Path(folder) / "random")}
        sizes = {name: parameters(path) for name, path in paths.items()}
        answers = {name: answers_of(path, asked) for name, path in paths.items()}
    first, second = range(len(asked) // 2), range(len(asked) // 2, len(asked))
    table, cascade = Table(asked, answers, sizes, second), calibrated(answers, "small", first)
    print(f"parameters: {', '.join(f'{name} {size:,}' for name, size in sizes.items())}; {len(second)} prompts\n")
    print("| way | cost | answered by the small one | agreement | of the small one's |\n|---|---|---|---|---|")
    table.row("all large", "small", lambda text: False, None)
    table.row("length rule", "small", is_small, None)
    for label, tried in (("cascade", lambda text: True), ("length rule, then cascade", is_small)):
        for share in CASCADES:
            if (threshold := cascade.threshold(share)) is None:
                print(f"| {label}, {share:.0%} | | | the table reaches {cascade.agreement[-1][1]:.0%} | |")
            else:
                table.row(f"{label}, {share:.0%}", "small", tried, threshold)
    table.row("all small", "small", lambda text: True, None)
    table.row("all random", "random", lambda text: True, None)
    best = calibrated(answers, "random", first).agreement[-1][1]
    print(f"\nThe table of the random model reaches {best:.0%}: a cascade with it is refused.\n")
    both = zip(answers["small"], answers["large"], strict=True)
    show_separation(answers["small"], [agree(a.text, b.text) for a, b in both])


def show_separation(small: Sequence[Answered], agrees: Sequence[bool]) -> None:
    """By what is made of the log probabilities, and of how many tokens."""
    ways: dict[str, Callable[[Sequence[float]], float]] = {
        f"{quantile:.0%} quantile": lambda found, q=quantile: confidence(found, q) for quantile in (0.0, 0.1, 0.25, 0.5)
    } | {"mean": statistics.fmean, "sum": sum}  # type: ignore[dict-item]
    counts = (8, 16, 24, 32)
    print(f"| confidence | {' | '.join(f'{tokens} tokens' for tokens in counts)} |\n|---|{'---|' * len(counts)}")
    for label, way in ways.items():
        values = [[way(one.logprobs[:tokens] or (-99.0,)) for one in small] for tokens in counts]
        print(f"| {label} | {' | '.join(f'{separation(one, agrees):.3f}' for one in values)} |")


def separation(values: Sequence[float], hits: Sequence[bool]) -> float:
    """How often a hit has the larger value than one that is none: the area under the ROC curve."""
    ranked = sorted(zip(values, hits, strict=True))
    ranks = dict.fromkeys(values, 0.0)
    i = 0
    while i < len(ranked):
        j = i
        while j < len(ranked) and ranked[j][0] == ranked[i][0]:
            j += 1
        ranks[ranked[i][0]] = (i + j + 1) / 2  # of equal values, the mean
        i = j
    n, total = sum(hits), sum(ranks[value] for value, hit in ranked if hit)
    return (total - n * (n + 1) / 2) / (n * (len(hits) - n))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    main(parser.parse_args())
