"""TTFT of a prompt whose first 1,000 tokens were seen before, next to the TTFT of its new tokens alone.

    python tools/benchmarks/prefix_ttft.py MODEL [--suffix 64] [--rounds 7]

Milliseconds from submission to the first token, in process, medians of interleaved rounds: ``cold`` is the whole
prompt, ``cached`` the same beginning with a new suffix, ``alone`` only the suffix.
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

    def ttft_ms(prompt: list[int]) -> float:
        started = time.perf_counter()
        llm.generate([prompt], max_tokens=1, temperature=0.0)
        return (time.perf_counter() - started) * 1e3

    times: dict[str, list[float]] = {"cold": [], "cached": [], "alone": []}
    for _ in range(options.rounds + 1):
        prefix = tokens(options.prefix)
        times["cold"].append(ttft_ms(prefix + tokens(options.suffix)))
        times["cached"].append(ttft_ms(prefix + tokens(options.suffix)))
        times["alone"].append(ttft_ms(tokens(options.suffix)))
    median = {name: statistics.median(values[1:]) for name, values in times.items()}  # the first round warms up
    print(
        f"prefix {options.prefix}, suffix {options.suffix} tokens: "
        + ", ".join(f"{n} {t:.1f} ms" for n, t in median.items())
    )
    print(
        f"cached / alone = {median['cached'] / median['alone']:.2f}, "
        f"cold / cached = {median['cold'] / median['cached']:.1f}"
    )


if __name__ == "__main__":
    main()
