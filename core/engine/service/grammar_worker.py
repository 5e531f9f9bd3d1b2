"""Grammars are compiled in a sandbox (:mod:`engine.service.grammar_child`) before an engine sees them."""

from __future__ import annotations

import msgspec

from engine.assembly.plan import EnginePlan
from engine.contracts.constraint import Grammar
from engine.service.grammar_child import Verdict
from engine.service.sandbox.process import Crashed, LimitBroken, Sandbox

MEMORY_MB = 1024
SMALL_CHARS = 8192
"""Smaller grammars have a process of their own: they do not wait for large ones."""
MOST_WORDS = 1000


class GrammarWorker:
    """Its processes start with the first grammars. Use on the event loop's thread."""

    def __init__(self, plan: EnginePlan) -> None:
        module, arguments = "engine.service.grammar_child", (plan.to_json().decode(),)
        self._small, self._large = (Sandbox(module, MEMORY_MB, arguments=arguments) for _ in range(2))
        self._decode = msgspec.msgpack.Decoder(Verdict).decode

    async def verdict(self, grammar: Grammar, cpu_s: float) -> Verdict:
        """``cpu_s``: how long compiling may take. Raises ``SandboxEnded`` where that cannot be told."""
        sandbox = self._small if len(grammar.text) < SMALL_CHARS else self._large
        try:
            return self._decode(await sandbox.ask(msgspec.msgpack.encode(grammar), cpu_s, 4 * MOST_WORDS + 4096))
        except LimitBroken as error:
            return Verdict(f"compiling it {error} (constraint.compile_s={cpu_s:g})")
        except Crashed:
            return Verdict("it is too large or too deeply nested to be compiled")

    def close(self) -> None:
        self._small.close()
        self._large.close()
