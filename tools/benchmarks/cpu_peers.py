"""TTFT, TPOT and 8-way throughput on the CPU, side by side with other engines, in one interleaved run.

Every contestant is a process that stays resident for the whole run, started in its own Python environment and
spoken to in JSON lines; in every round each takes its turn, the order rotating. The clock is each contestant's own,
around one blocking call:

* ``ttft_ms``: 512 prompt tokens, 1 output token;
* ``tpot_ms``: 64 prompt tokens, (65 output tokens - 1 output token) / 64;
* ``conc8``: output tokens per second of 8 prompts of 128..512 tokens at once, 64 output tokens each;
* ``prefix_ms``: 1 output token after a 1,024-token prompt seen before.

With ``--first`` who is measured has real-time priority, and what others disturb all the same is measured again.

    python tools/benchmarks/cpu_peers.py --model DIR --rounds 6 engine=PYTHON vllm=PYTHON openvino=PYTHON:OPENVINO_DIR
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quiet import undisturbed_value

from engine_lab.shared.output import check_writable

HERE = Path(__file__).parent
MEASURES = ("ttft_ms", "tpot_ms", "conc8", "prefix_ms")
HIGHER_IS_BETTER = {"conc8"}


class Contestant:
    """One engine in a process of its own."""

    def __init__(self, spec: str, model: str, threads: int, measures: Sequence[str], first: bool) -> None:
        self.first = first
        self.name, _, rest = spec.partition("=")
        python, _, own_model = rest.partition(":")
        script = HERE / "contestants" / f"{self.name.partition('-')[0]}.py"
        self.process = subprocess.Popen(
            [python, str(script), own_model or model, str(threads), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.results: dict[str, list[float]] = {measure: [] for measure in measures}

    def ask(self, prompts: list[list[int]], max_tokens: int) -> float:
        """Seconds for these prompts at once; every output is exactly ``max_tokens`` long."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        return float(self._answer()["seconds"])

    def ready(self) -> dict[str, Any]:
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"answer"'):
                answer: dict[str, Any] = json.loads(line)["answer"]
                return answer
        raise SystemExit(f"{self.name} ended: exit code {self.process.wait()}")

    def round(self, rng: random.Random, vocab: int) -> None:
        def prompt(length: int) -> list[int]:
            return [rng.randrange(10, vocab) for _ in range(length)]

        def ttft_ms() -> float:
            return self.ask([prompt(512)], 1) * 1e3

        def tpot_ms() -> float:
            first = self.ask([prompt(64)], 1)
            return (self.ask([prompt(64)], 65) - first) / 64 * 1e3

        def conc8() -> float:
            lengths = [128, 512, 256, 384, 192, 448, 320, 128]
            return 8 * 64 / self.ask([prompt(n) for n in lengths], 64)

        def prefix_ms() -> float:
            shared = prompt(1024)
            self.ask([shared], 1)
            return self.ask([shared], 1) * 1e3

        for take in (ttft_ms, tpot_ms, conc8, prefix_ms):
            if take.__name__ in self.results:
                self.results[take.__name__].append(self._take(take))

    def _take(self, measure: Callable[[], float]) -> float:
        return undisturbed_value(measure, [self.process.pid]) if self.first else measure()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestants", nargs="+", help="NAME=PYTHON or NAME=PYTHON:MODEL")
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--first", action="store_true", help="measure with real-time priority")
    options = parser.parse_args()
    if options.json:
        check_writable(str(options.json))
    vocab = json.loads((Path(options.model) / "config.json").read_text())["vocab_size"]
    shared = options.model, options.threads, options.measures, options.first
    contestants = [Contestant(spec, *shared) for spec in options.contestants]
    for contestant in contestants:
        print(f"{contestant.name}: {contestant.ready()}", file=sys.stderr)
    for number in range(-1, options.rounds):
        rng = random.Random(f"round {number}")
        turn = number % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            contestant.round(random.Random(rng.random()), vocab)
        print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        if number < 0:  # warm-up
            for contestant in contestants:
                contestant.results = {measure: [] for measure in options.measures}
    report(contestants)
    if options.json:
        options.json.write_text(json.dumps({c.name: c.results for c in contestants}, indent=1))
    return 0


def report(contestants: list[Contestant]) -> None:
    """Medians with their range, and the first contestant's ratio to the best of the others (below 1: ahead)."""
    ours, others = contestants[0], contestants[1:]
    print(f"{'':20}" + "".join(f"{measure:>28}" for measure in ours.results))
    for contestant in contestants:
        cells = []
        for measure in ours.results:
            values = contestant.results[measure]
            cells.append(f"{statistics.median(values):8.1f} [{min(values):.1f}-{max(values):.1f}]")
        print(f"{contestant.name:20}" + "".join(f"{cell:>28}" for cell in cells))
    if not others:
        return
    ratios = []
    for measure in ours.results:
        mine = statistics.median(ours.results[measure])
        theirs = [statistics.median(c.results[measure]) for c in others]
        ratios.append(max(theirs) / mine if measure in HIGHER_IS_BETTER else mine / min(theirs))
    print(f"{'ratio to best':20}" + "".join(f"{ratio:>28.2f}" for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
