"""What drafters bring: acceptance by position, tokens a round and the time of each part, side by side.

    python benchmarks/drafting.py [MODEL] [--prompts FILE] [--batch 1] [--rounds 3] [--set "drafter=eagle3 ..."] ...

Every setting (``drafter=none`` is added) is an engine in a process of its own that stays for the whole run; they take
turns, in another order each round. ``FILE`` has one prompt a line, asked through the model's chat template. All answers
are greedy, of ``--tokens`` tokens each.

``tau``: tokens a round, the model's own included. ``c``: a drafted token's cost, ``v``: that of a step with drafts, in
units of a step without any. Were there nothing else, a token would cost ``(k*c + v) / tau`` of one without drafts, for
``k`` drafts a round: ``of it`` is how much of that speed-up is there.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PLAIN = "drafter=none"


@dataclass(slots=True)
class Seen:
    """Of one setting, over all rounds."""

    ms_per_token: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    """Device time of steps in which every request decodes."""
    draft_ms: list[float] = field(default_factory=list)
    chains: int = 0
    drafted: int = 0
    accepted: int = 0

    def add(self, answer: dict[str, Any]) -> None:
        self.ms_per_token.append(answer["ms_per_token"])
        self.step_ms += answer["step_ms"]
        self.draft_ms += answer["draft_ms"]
        self.chains += answer["chains"]
        self.drafted += answer["drafted"]
        self.accepted += answer["accepted"]


class Contestant:
    def __init__(self, model: str, overrides: str, arguments: argparse.Namespace) -> None:
        self.name = overrides
        work = ["--batch", str(arguments.batch), "--tokens", str(arguments.tokens)]
        if arguments.prompts:
            work += ["--prompts", arguments.prompts]
        command = [sys.executable, __file__, model, *work, "--child", overrides]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.seen = Seen()

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the engine ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def child(model: str, overrides: str, prompts: Sequence[str], batch: int, tokens: int) -> None:
    """Answers on standard input's lines until it ends: one pass over all prompts each."""
    from engine import LLM
    from engine.contracts.request import EngineRequest, SamplingParams

    llm = LLM(model, overrides=["+preset=latency", "kv_allocator=paged", *overrides.split()])
    texts = [llm.tokenizer.encode_chat_now([{"role": "user", "content": prompt}]) for prompt in prompts]
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for number, _ in enumerate(sys.stdin):
        events: list[Any] = []
        count = 0
        spent = 0.0
        for at in range(0, len(texts), batch):
            group = texts[at : at + batch]
            for i, text in enumerate(group):
                llm.core.submit(EngineRequest(f"{number}-{at}-{i}", tuple(text), sampling))
            started = first = 0.0
            while llm.core.has_work:
                outputs = llm.core.step()
                now = time.perf_counter()
                got = sum(len(output.tokens) for output in outputs.outputs)
                if first:
                    count += got
                elif got:
                    first = started = now
                events += [e for e in outputs.events if type(e).__name__ == "StepEvent" and not e.num_prefill_tokens]
                spent += now - started if started else 0.0
                started = now if started else 0.0
        print(
            json.dumps(
                {
                    "ms_per_token": spent * 1e3 / max(count, 1) * batch,
                    "step_ms": [e.device_ms for e in events],
                    "draft_ms": [e.draft_ms for e in events],
                    "chains": sum(e.draft_chains for e in events),
                    "drafted": sum(e.drafted for e in events),
                    "accepted": sum(e.accepted for e in events),
                }
            ),
            flush=True,
        )


def report(contestants: Sequence[Contestant]) -> None:
    plain = contestants[0].seen
    base, step = statistics.median(plain.ms_per_token), statistics.median(plain.step_ms)
    print(f"{PLAIN}: {base:.3f} ms/token, {step:.3f} ms a step")
    for one in contestants[1:]:
        seen = one.seen
        ms = statistics.median(seen.ms_per_token)
        ratio = statistics.median(a / b for a, b in zip(plain.ms_per_token, seen.ms_per_token, strict=True))
        line = f"{one.name}: {ms:.3f} ms/token, {ratio:.2f} x as fast"
        if seen.chains:
            k, tau = seen.drafted / seen.chains, 1 + seen.accepted / seen.chains
            c = statistics.median(seen.draft_ms) / k / step
            v = statistics.median(seen.step_ms) / step
            ideal = tau / (k * c + v)
            line += f"; k {k:.2f}, tau {tau:.2f}, c {c:.3f}, v {v:.2f}, ideal {ideal:.2f} x, of it {ratio / ideal:.0%}"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="bundled")
    parser.add_argument("--prompts", default="")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", dest="settings", default=[])
    parser.add_argument("--child", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    default = ["What does json.dumps do?", "Explain `os.path.join`.", "What does itertools.chain do?"]
    prompts = Path(arguments.prompts).read_text().splitlines() if arguments.prompts else default
    if arguments.child is not None:
        child(arguments.model, arguments.child, prompts, arguments.batch, arguments.tokens)
        return
    contestants = [Contestant(arguments.model, s, arguments) for s in (PLAIN, *arguments.settings)]
    for one in contestants:
        one.ask("warm up")
    order = list(contestants)
    for number in range(arguments.rounds):
        random.Random(number).shuffle(order)
        for one in order:
            one.seen.add(one.ask("run"))
    report(contestants)


if __name__ == "__main__":
    main()
