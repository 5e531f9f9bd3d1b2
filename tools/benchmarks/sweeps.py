"""Does ``engine sweep`` find within its budget what measuring everything finds, and no best set among equal ones?

    python -m tools.benchmarks.sweeps --out DIR [--only 0,3] [--budget 15m] [--all-budget 3h]
    python -m tools.benchmarks.sweeps --out DIR --aa 20 [--budget 6m]

Each load of :data:`LOADS` is swept over the 24 sets of :data:`GRID` within the budget, then measured with all of
them in the last round (``--keep 24``). The best three are right if they are those of the long measurement (``same``),
or if none of them is shown to be worse there than its third (``tied``). ``--aa`` sweeps three equal sets so many times.
What was interrupted goes on with the same command.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.cli.main import main as engine
from engine.contracts.command import FAILED, OK
from engine_lab.sweep.analysis import compared, last_round, verdict
from engine_lab.sweep.race import whole_passes
from engine_lab.sweep.record import Experiment, load

GRID = ("drafter=none,ngram,eagle3", "quantizer=checkpoint,int8", "execution=eager,auto", "overlap=true,false")
BASE = ("device=cpu", "--no-quality")
LOADS = (
    "--concurrency 1 --prompt-tokens 64 --output-tokens 64 --requests 80",
    "--concurrency 1 --prompt-tokens 512 --output-tokens 16 --requests 60 --by ttft_p95",
    "--concurrency 4 --prompt-tokens 128 --output-tokens 32 --requests 80",
    "--concurrency 4 --prompt-tokens 512 --output-tokens 32 --requests 60 --shared-prefix 0.8 --slo ttft=200ms,itl=9ms",
    "--concurrency 8 --prompt-tokens 128 --output-tokens 32 --requests 80 --by tokens_per_s",
    "--concurrency 8 --prompt-tokens 64 --output-tokens 64 --requests 64 --slo ttft=300ms,itl=30ms",
    "--rate 4 --prompt-tokens 128 --output-tokens 32 --slo ttft=100ms,itl=15ms",
    "--rate 8 --prompt-tokens 256 --output-tokens 16 --requests 32 --slo ttft=200ms,itl=30ms",
    "--rate 4 --prompt-tokens lognormal:256,0.8 --output-tokens 48 --slo ttft=300ms,itl=20ms",
    "--concurrency 2 --prompt-tokens 256 --output-tokens 96 --requests 40 --by itl_p95",
)
"""Each run takes about as long as the start of its engine: with fewer requests it is noise, of 5 to 15 %."""
EQUAL = "drafter=none,none,none --keep-equal --output-tokens 16 --requests 60"
BEST = 3


def sweep(folder: Path, words: list[str]) -> Experiment:
    status = engine(["sweep", *words, "--folder", str(folder)])
    if status not in (OK, FAILED):
        raise SystemExit(status)
    return load(folder / "results.json")


def best_three(found: Experiment) -> list[str]:
    names = [one.name for one in found.candidates]
    return [names[one] for one in found.summary["verdict"]["ranked"][:BEST]]


def is_tied(everything: Experiment, name: str) -> bool:
    """Whether a set is not shown to be worse than the third of a measurement of all."""
    ids = {one.name: one.id for one in everything.candidates}
    third, by = ids[best_three(everything)[-1]], everything.summary["by"]
    last = last_round(everything)
    assert last is not None
    return not compared(everything, third, ids[name], by, whole_passes(everything, last))["excludes_tie"]


def compare(out: Path, only: list[int], budget: str, all_budget: str) -> None:
    same = tied = 0
    for i in only:
        words = [*BASE, *GRID, *LOADS[i].split()]
        swept = sweep(out / f"{i}-sweep", [*words, "--budget", budget])
        everything = sweep(out / f"{i}-all", [*words, "--budget", all_budget, "--keep", "24"])
        three, truth = best_three(swept), best_three(everything)
        is_same = set(three) == set(truth)
        within = all(name in truth or is_tied(everything, name) for name in three)
        same, tied = same + is_same, tied + within
        print(f"{i} {LOADS[i]}\n  swept: {three}\n  all:   {truth}\n  same {is_same}, tied {within}")
    print(f"the same best {BEST} in {same} of {len(only)}, the same or tied in {tied}")


def equal_sets(out: Path, count: int, budget: str) -> None:
    named = undecided = 0
    for i in range(count):
        words = [*BASE, *EQUAL.split(), "--seed", str(100 * i)]
        found = sweep(out / f"aa-{i}", [*words, "--budget", budget])
        said = verdict(found, found.summary["by"])
        named += said["winner"] is not None
        undecided += not said["compared"]
    print(f"equal sets: a best one was named in {named} of {count - undecided} sweeps; {undecided} were not decided")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(map(str, range(len(LOADS)))))
    parser.add_argument("--budget", default="15m")
    parser.add_argument("--all-budget", default="3h")
    parser.add_argument("--aa", type=int, default=0)
    flags = parser.parse_args()
    if flags.aa:
        equal_sets(flags.out, flags.aa, flags.budget)
    else:
        compare(flags.out, [int(which) for which in flags.only.split(",")], flags.budget, flags.all_budget)


if __name__ == "__main__":
    main()
