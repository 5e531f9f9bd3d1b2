"""What following a grammar costs a decode step: requests with one beside the same requests without.

    python tools/benchmarks/constrained.py [MODEL] [--batch 1 8] [--rounds 10] [--set "quantizer=int8 ..."]
    python tools/benchmarks/constrained.py [MODEL] --forced [--rounds 10] [--set "drafter=ngram ..."]

Rounds alternate in one engine. ``one``: a single request of the batch has a grammar. ``all``: each has. ``mask``: what
making the masks of a step and applying them takes alone. Medians; ratios are to the batch without a grammar.

``--forced``: what drafting forced tokens saves, with a drafter on the host; the same outputs with and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from engine import LLM
from engine.contracts.constraint import Grammar
from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.sampling.constrained import TokenMasks, Watched
from engine_plugins.constraint.llguidance import LLGuidanceMatcher

TOKENS = 48
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "size": {"enum": ["small", "medium", "large"]},
        "count": {"type": "integer"},
    },
    "required": ["name", "size", "count"],
    "additionalProperties": False,
}
ENDLESS = Grammar("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 1000}))
"""No output ends before the others."""


def step_ms(llm: LLM, batch: int, constrained: int, seed: int, temperature: float) -> float:
    """The median decode step of ``batch`` requests, of which so many have a grammar. Milliseconds."""
    for i in range(batch):
        grammar = ENDLESS if i < constrained else None
        sampling = SamplingParams(
            max_tokens=TOKENS, temperature=temperature, seed=seed + i, ignore_eos=True, grammar=grammar
        )
        prompt = tuple(5 + (i * 7 + j + seed) % 1000 for j in range(32))
        llm.core.submit(EngineRequest(f"{seed}-{i}-{constrained}", prompt, sampling, cache_salt=str(seed)))
    found: list[float] = []
    before = time.perf_counter()
    while llm.core.has_work:
        done = llm.core.step()
        for out in done.outputs:
            if out.error:
                raise RuntimeError(out.error)
        now = time.perf_counter()
        for event in done.events:
            if isinstance(event, StepEvent) and event.num_decode_tokens == event.num_requests == batch:
                found.append((now - before) * 1e3)
        before = now
    return statistics.median(found[2:])


def timed(kind: type[Any], name: str, into: list[float]) -> Callable[[], None]:
    """Adds the microseconds of every call of a method; what is returned ends that."""
    method = getattr(kind, name)

    def called(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        made = method(*arguments, **named)
        into.append((time.perf_counter() - started) * 1e6)
        return made

    setattr(kind, name, called)
    return lambda: setattr(kind, name, method)


PARAMETER = {
    "type": "object",
    "properties": {
        "parameter_name": {"type": "string", "maxLength": 16},
        "is_required": {"type": "boolean"},
        "position": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["parameter_name", "is_required", "position"],
    "additionalProperties": False,
}
RECORD = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string", "maxLength": 24},
        "description": {"type": "string", "maxLength": 80},
        "parameters": {"type": "array", "items": PARAMETER, "minItems": 3, "maxItems": 3},
        "return_type": {"enum": ["string", "integer", "mapping"]},
    },
    "required": ["function_name", "description", "parameters", "return_type"],
    "additionalProperties": False,
}


def compare_forced(llm: LLM, rounds: int, temperature: float) -> None:
    """One record at a time, with forced drafts and without, alternately."""
    grammar, forced = Grammar("json_schema", json.dumps(RECORD)), LLGuidanceMatcher.forced
    ms: dict[bool, list[float]] = {True: [], False: []}
    steps, tokens = {True: 0, False: 0}, 0
    for number in range(-1, rounds):
        found = {}
        for with_forced in (True, False) if number % 2 else (False, True):
            LLGuidanceMatcher.forced = forced if with_forced else lambda matcher: ()
            (found[with_forced],) = llm.generate(
                [f"Describe function {number} of the json module."],
                max_tokens=600, temperature=temperature, seed=max(number, 0), grammar=grammar,
            )  # fmt: skip
        assert found[True].tokens == found[False].tokens, "forced drafts change an output"
        if number < 0:
            continue
        tokens += len(found[True].tokens)
        for with_forced, completion in found.items():
            assert completion.timings is not None
            ms[with_forced].append(completion.timings.decode_ms)
            steps[with_forced] += completion.timings.decode_steps
    LLGuidanceMatcher.forced = forced
    ratios = sorted(one / other for one, other in zip(ms[True], ms[False], strict=True))
    print(
        f"{tokens} tokens: {steps[False]} steps without, {steps[True]} with forced drafts "
        f"({steps[True] / steps[False]:.3f}); time {statistics.median(ratios):.3f} [{ratios[0]:.3f}-{ratios[-1]:.3f}]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--set", default="", metavar="'KEY=VALUE ...'", help="overrides")
    parser.add_argument("--forced", action="store_true", help="what drafting forced tokens saves")
    options = parser.parse_args()
    overrides = ["scheduler.max_requests=64", "drafter=none", "model.max_len=1024", *options.set.split()]
    llm = LLM(options.model, overrides=overrides)
    print(f"vocabulary {llm.info.vocab_size}, {torch.get_num_threads()} threads")
    if options.forced:
        compare_forced(llm, options.rounds, options.temperature)
        options.batch = []
    for batch in options.batch:
        times: dict[int, list[float]] = defaultdict(list)
        made, applied = list[float](), list[float]()
        counts = sorted({0, 1, batch})
        for count in counts:
            step_ms(llm, batch, count, 10_000, options.temperature)
        undo = (timed(Watched, "masks", made), timed(TokenMasks, "apply_", applied))
        for number in range(options.rounds):
            order = counts if number % 2 else counts[::-1]
            for count in order:
                times[count].append(step_ms(llm, batch, count, 100 * number, options.temperature))
        for each in undo:
            each()
        plain = statistics.median(times[0])
        words = [f"batch {batch}: none {plain:.2f} ms"]
        for count in counts[1:]:
            ratios = sorted(one / none for one, none in zip(times[count], times[0], strict=True))
            name = "all" if count == batch else "one"
            words.append(f"{name} {statistics.median(ratios):.3f} [{ratios[0]:.3f}-{ratios[-1]:.3f}]")
        for name, values in (("masks", made), ("applied", applied)):
            values.sort()
            words.append(f"{name} P50 {statistics.median(values):.0f} P99 {values[int(0.99 * len(values))]:.0f} us")
        print(", ".join(words))
    llm.close()


if __name__ == "__main__":
    main()
