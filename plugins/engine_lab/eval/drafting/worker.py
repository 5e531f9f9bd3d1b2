"""An engine that answers groups of prompts and says where the time went.

``python -m engine_lab.eval.drafting.worker``: a :class:`Setup` comes in on standard input, then one :class:`Group`
after the other, each a line of JSON; a line of JSON goes out for each of them. It ends when its input does. At the
signal :data:`DUMP_SIGNAL` it writes on standard error what all its threads are doing.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from engine.assembly.errors import AssemblyError
from engine.contracts.events import StepEvent
from engine.contracts.request import EngineRequest, SamplingParams
from engine.loop.messages import StepOutputs
from engine.service.offline import LLM
from engine_lab.shared.errors import EvalError, EvalFailed, explained

DUMP_SIGNAL = signal.SIGUSR1
"""For one that seems to hang."""


class Setup(msgspec.Struct, frozen=True):
    """Which engine."""

    path: str
    """Of the model."""
    overrides: tuple[str, ...]
    config_dirs: tuple[str, ...]
    answer_tokens: int


class Group(msgspec.Struct, frozen=True):
    """Prompts to answer greedily, all at once."""

    prompts: tuple[tuple[int, ...], ...]
    salt: str
    """Nothing that was answered under another salt is remembered: neither keys and values nor outputs to draft from."""


class Run(msgspec.Struct):
    """What became of a group, or of several. Only steps in which every request decodes are counted; milliseconds are
    those of each step times the requests that got tokens in it, so that they add up to what requests waited."""

    outputs: list[tuple[int, ...]] = []
    """Whole answers, in the order of the prompts."""
    decode_steps: int = 0
    """Requests that got tokens, summed over steps."""
    tokens: int = 0
    wall_ms: float = 0.0
    verify_ms: float = 0.0
    """Forward, sample and verify, by the device's clock."""
    draft_ms: float = 0.0
    chains: int = 0
    """Those in which drafts were verified."""
    drafted: int = 0
    tried: list[int] = []
    """By position: drafts whose predecessors were all accepted."""
    accepted_at: list[int] = []
    """Those of them that were accepted."""

    def add(self, other: Run) -> None:
        """Take in another group."""
        self.outputs = [*self.outputs, *other.outputs]
        self.decode_steps += other.decode_steps
        self.tokens += other.tokens
        self.wall_ms += other.wall_ms
        self.verify_ms += other.verify_ms
        self.draft_ms += other.draft_ms
        self.chains += other.chains
        self.drafted += other.drafted
        self.tried, self.accepted_at = added(self.tried, other.tried), added(self.accepted_at, other.accepted_at)

    def add_step(self, output: StepOutputs, wall_ms: float) -> None:
        """Take in what one call of ``step()`` brought, if it was a step in which every request decodes."""
        steps = [event for event in output.events if isinstance(event, StepEvent)]
        rows = sum(bool(out.tokens) for out in output.outputs)
        if len(steps) != 1 or steps[0].num_prefill_tokens or not rows:
            return
        step = steps[0]
        self.decode_steps += rows
        self.tokens += sum(len(out.tokens) for out in output.outputs)
        self.wall_ms += wall_ms * rows
        self.verify_ms += step.device_ms * rows
        self.draft_ms += step.draft_ms * rows
        self.chains += step.draft_chains
        self.drafted += step.drafted
        self.tried = added(self.tried, step.drafts_tried)
        self.accepted_at = added(self.accepted_at, step.drafts_accepted)


class Refused(msgspec.Struct, frozen=True):
    """The engine cannot be built, or a request failed."""

    problems: tuple[str, ...]
    kind: str
    """``assembly``, ``usage`` or ``failed``."""


class Answer(msgspec.Struct, frozen=True):
    """A line that goes out."""

    run: Run | None = None
    refused: Refused | None = None


def added(a: list[int], b: list[int] | tuple[int, ...]) -> list[int]:
    """Sums by position; what is missing counts as 0."""
    length = max(len(a), len(b))
    return [(a[i] if i < len(a) else 0) + (b[i] if i < len(b) else 0) for i in range(length)]


def answer(llm: LLM, group: Group, max_tokens: int) -> Run:
    """All prompts at once, greedily, to the model's own end or ``max_tokens``. Raises :class:`EvalFailed`."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    names = [f"{group.salt}-{i}" for i in range(len(group.prompts))]
    found: dict[str, list[int]] = {name: [] for name in names}
    for name, prompt in zip(names, group.prompts, strict=True):
        llm.core.submit(EngineRequest(name, prompt, sampling, cache_salt=group.salt))
    run = Run()
    before = time.perf_counter()
    while llm.core.has_work:
        output = llm.core.step()
        now = time.perf_counter()
        run.add_step(output, (now - before) * 1e3)
        before = now
        for out in output.outputs:
            if out.error:
                raise EvalFailed(out.error)
            found[out.request_id] += out.tokens
    run.outputs = [tuple(found[name]) for name in names]
    return run


def serve(lines: BinaryIO, out: BinaryIO) -> None:
    """Build the engine of the first line, and answer the others."""
    setup = msgspec.json.decode(lines.readline(), type=Setup)
    with explained():
        llm = LLM(setup.path, setup.overrides, [Path(folder) for folder in setup.config_dirs])
    _say(out, Answer())
    for line in lines:
        group = msgspec.json.decode(line, type=Group)
        with explained():
            run = answer(llm, group, setup.answer_tokens)
        _say(out, Answer(run))
    llm.close()


def _say(out: BinaryIO, answer: Answer) -> None:
    out.write(msgspec.json.encode(answer) + b"\n")
    out.flush()


def main() -> None:
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else prints must not come between the answers
    faulthandler.register(DUMP_SIGNAL)
    try:
        serve(sys.stdin.buffer, out)
    except AssemblyError as error:
        _say(out, Answer(refused=Refused(tuple(error.problems), "assembly")))
    except EvalError as error:
        _say(out, Answer(refused=Refused((str(error),), "usage")))
    except EvalFailed as error:
        _say(out, Answer(refused=Refused((str(error),), "failed")))


if __name__ == "__main__":
    main()
