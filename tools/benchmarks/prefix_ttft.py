"""TTFT of a prompt whose first 1,000 tokens were seen before, next to the TTFT of its new tokens alone.

    python tools/benchmarks/prefix_ttft.py MODEL [--suffix 64] [--rounds 7]

Milliseconds from submission to the first token, in process, medians of interleaved rounds: ``cold`` is the whole
prompt, ``cached`` the same beginning with a new suffix, ``repeated`` the whole prompt again, ``alone`` only the suffix.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from engine import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prefix", type=int, default=1000)
    parser.add_argument("--suffix", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    llm = LLM(options.model, overrides=["+preset=latency", "device=cpu", "model.max_len=2048", "exporter=[]"])
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, llm.info.vocab_size) for _ in range(count)]

    times: dict[str, list[float]] = {"cold": [], "cached": [], "repeated": [], "alone": []}
    computed = dict.fromkeys(times, 0)

    def ask(name: str, prompt: list[int]) -> None:
        started = time.perf_counter()
        (done,) = llm.generate([prompt], max_tokens=1, temperature=0.0)
        times[name].append((time.perf_counter() - started) * 1e3)
        assert done.timings is not None
        computed[name] = len(prompt) - done.timings.cached_tokens

    for _ in range(options.rounds + 1):
        prefix = tokens(options.prefix)
        whole = prefix + tokens(options.suffix)
        ask("cold", whole)
        ask("cached", prefix + tokens(options.suffix))
        ask("repeated", whole)
        ask("alone", tokens(options.suffix))
    median = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    print(
        f"prefix {options.prefix}, suffix {options.suffix} tokens: "
        + ", ".join(f"{n} {t:.1f} ms ({computed[n]} computed)" for n, t in median.items())
    )
    print(
        f"cached / alone = {median['cached'] / median['alone']:.2f}, "
        f"cold / cached = {median['cold'] / median['cached']:.1f}"
    )


if __name__ == "__main__":
    main()
