"""What drafts drawn with the noise of verification bring: acceptance at some temperatures, against greedy drafts.

    python tools/benchmarks/draft_noise.py [MODEL] [--drafters eagle3 draft_model] [--temperature 0.7 1] [--prompts 64]

Both ways answer the same prompts with the same seeds and as many drafts, so the outputs are the same, token for token
(this is checked). ``accepted`` is the share of drafts that are; ``tokens/step`` what a decode step brings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import LLM
from engine.contracts.request import Timings
from engine.startup.rank import drafts_of
from engine.step.runner import ModelRunner


def greedy_drafts(llm: LLM) -> None:
    """Let drafters see rows whose requests are all greedy: what they draw is then the most likely token."""
    runner: ModelRunner = llm.core._device._runner  # type: ignore[attr-defined]
    drafts, sampling = drafts_of(runner), runner.tables.sampling
    assert drafts is not None
    drafter = drafts.drafter
    propose = drafter.propose

    def proposing(rows: Any) -> Any:
        kept = sampling._floats[0].clone()
        sampling._floats[0] = 0.0
        try:
            return propose(replace(rows, sampled=False))
        finally:
            sampling._floats[0] = kept

    drafter.propose = proposing  # type: ignore[method-assign]


def prompts(llm: LLM, count: int) -> list[str]:
    """Questions that the bundled model was trained on and passages that it was not, in turn."""
    folder = Path(llm.plan.model.path)
    asked = json.loads((folder / "recall.json").read_text())["first_sentences"]
    held_out = [text for text in (folder / "heldout.txt").read_text().split("\n\n") if len(text) > 200]
    questions = [f"What does {name} do?" for name in asked]
    return [(questions[i // 2], held_out[i // 2][:150])[i % 2] for i in range(count)]


def answer(llm: LLM, texts: Sequence[str], temperature: float, tokens: int) -> tuple[list[Any], list[Timings]]:
    outputs, timings = [], []
    for i, text in enumerate(texts):
        sampling = {"temperature": temperature, "seed": i, "max_tokens": tokens, "ignore_eos": True}
        (done,) = llm.generate([text], **sampling)
        assert done.timings is not None
        outputs.append(done.tokens)
        timings.append(done.timings)
    return outputs, timings


def row(timings: Sequence[Timings], tokens: int) -> str:
    drafted, accepted = sum(t.drafted_tokens for t in timings), sum(t.accepted_tokens for t in timings)
    steps = sum(t.decode_steps for t in timings)
    return f"{accepted / drafted:8.3f} {len(timings) * (tokens - 1) / steps:11.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--drafters", nargs="+", default=["eagle3", "draft_model", "parallel_block", "early_exit"])
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.7, 1.0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-width", type=int, default=4)
    options = parser.parse_args()
    print(f"{'drafter':15} {'temperature':>11} {'drafts':>8} {'accepted':>8} {'tokens/step':>11}")
    for drafter in options.drafters:
        fixed = (f"drafter={drafter}", "drafter.adaptive=false", f"drafter.max_width={options.max_width}")
        engines = {name: LLM(options.model, overrides=[*fixed, "overlap=false"]) for name in ("greedy", "coupled")}
        greedy_drafts(engines["greedy"])
        for temperature in options.temperature:
            outputs = []
            for name, llm in engines.items():
                texts = prompts(llm, options.prompts)
                found, timings = answer(llm, texts, temperature, options.tokens)
                outputs.append(found)
                print(f"{drafter:15} {temperature:11} {name:>8} {row(timings, options.tokens)}", flush=True)
            assert outputs[0] == outputs[1], "drafts changed an output"
        for llm in engines.values():
            llm.close()


if __name__ == "__main__":
    main()
