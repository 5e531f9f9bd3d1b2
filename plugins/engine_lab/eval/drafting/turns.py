"""Engines in processes of their own that answer in turn."""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import TIMEOUT_MAX, Timer

import msgspec

from engine.assembly.errors import AssemblyError
from engine_lab.eval.drafting.options import DraftingOptions
from engine_lab.eval.drafting.plans import Setting
from engine_lab.eval.drafting.prompts import Prompt
from engine_lab.eval.drafting.worker import DUMP_SIGNAL, Answer, Group, Run, Setup
from engine_lab.shared.errors import EvalError, EvalFailed

WARM_UP_GROUPS = 4
"""Groups of each batch size that are answered before any is timed: kernels are ready then, and the drafting
policy has tried its numbers of draft tokens."""
LAST_WORDS = 4000
"""Characters of what an engine that ended has said."""
PATIENCE_S = 10.0
"""How long an engine may take to end."""
DUMP_S = 1.0
"""How long it may take to say where it hangs."""


class Contender:
    """One engine."""

    def __init__(self, setting: Setting, setup: Setup, timeout_s: float) -> None:
        """``timeout_s``: for it to start, and for each answer. Raises :class:`AssemblyError`, :class:`EvalError` or
        :class:`EvalFailed` where it cannot be built."""
        self.setting = setting
        self._timeout_s = timeout_s
        self._was_ended = False
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 (it outlives this call: close() closes it)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine_lab.eval.drafting.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        try:
            self._ask(setup)
        except BaseException:
            self.close()
            raise

    def answer(self, prompts: Sequence[Prompt], salt: str) -> Run:
        """Raises :class:`EvalFailed`."""
        run = self._ask(Group(tuple(prompt.tokens for prompt in prompts), salt))
        assert run is not None
        return run

    def _ask(self, what: Setup | Group) -> Run | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            with self._limited():
                self._process.stdin.write(msgspec.json.encode(what) + b"\n")
                self._process.stdin.flush()
                line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if self._was_ended:
            wanted = "did not start" if isinstance(what, Setup) else "did not answer"
            raise EvalFailed(
                f"{self.setting.label}: the engine {wanted} within {self._timeout_s:g} s and was ended; "
                f"--timeout SECONDS allows more. {self._last_words()}"
            )
        if not line.endswith(b"\n"):  # it ended, perhaps in the middle of a line
            raise EvalFailed(f"{self.setting.label}: the engine ended{self._how()}. {self._last_words()}")
        answer = msgspec.json.decode(line, type=Answer)
        if answer.refused is None:
            return answer.run
        problems = [f"{self.setting.label}: {problem}" for problem in answer.refused.problems]
        if answer.refused.kind == "assembly":
            raise AssemblyError(problems)
        raise (EvalError if answer.refused.kind == "usage" else EvalFailed)("; ".join(problems))

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Ends the engine where what is done here, which may wait for it, takes too long."""
        timer = Timer(min(self._timeout_s, TIMEOUT_MAX), self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()

    def _end(self) -> None:
        if self._process.poll() is not None:
            return  # it ended by itself meanwhile
        self._was_ended = True
        self._process.send_signal(DUMP_SIGNAL)
        try:
            self._process.wait(DUMP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _how(self) -> str:
        try:
            status = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return ""
        return f" by signal {-status}" if status < 0 else f" with status {status}"

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-LAST_WORDS:].decode(errors="replace").strip() or "It said nothing"

    def close(self) -> None:
        """End it: at once if it does not by itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:  # a second Ctrl-C included
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()
            self._said.close()


@contextmanager
def contenders(
    options: DraftingOptions, settings: Sequence[Setting], pool: tuple[str, ...], started: Callable[[], None]
) -> Iterator[list[Contender]]:
    """All engines, built one after the other. ``pool``: overrides that size the KV pool."""
    with ExitStack() as stack:
        found = []
        for setting in settings:
            setup = Setup(
                path=setting.plan.settings.model.path,
                overrides=(*setting.overrides, *pool),
                config_dirs=tuple(map(str, options.config_dirs)),
                answer_tokens=options.answer_tokens,
            )
            found.append(Contender(setting, setup, options.timeout_s))
            stack.callback(found[-1].close)
            started()
        yield found


def groups_of(prompts: Sequence[Prompt], batch: int) -> list[Sequence[Prompt]]:
    """Full batches; what is left over is not asked."""
    return [prompts[at : at + batch] for at in range(0, len(prompts) - batch + 1, batch)]


def take_turns(
    engines: Sequence[Contender], prompts: Sequence[Prompt], batch: int, pairs: int, done: Callable[[], None]
) -> list[list[Run]]:
    """For each engine, a run over all groups for each of ``pairs``. The engines answer a group one after the other, in
    an order that changes from group to group."""
    groups = groups_of(prompts, batch)
    for engine in engines:
        for i, group in enumerate(groups[:WARM_UP_GROUPS]):
            engine.answer(group, f"{batch}-warm-{i}")
    found: list[list[Run]] = [[] for _ in engines]
    for pair in range(pairs):
        for runs in found:
            runs.append(Run())
        for i, group in enumerate(groups):
            order = list(range(len(engines)))
            random.Random(f"{batch}-{pair}-{i}").shuffle(order)
            for which in order:
                # One salt for a pass: a drafter may learn from earlier prompts of it, not from the same one.
                found[which][-1].add(engines[which].answer(group, f"{batch}-{pair}"))
        done()
    return found
