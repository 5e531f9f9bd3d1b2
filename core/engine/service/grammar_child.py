"""The child that compiles grammars before an engine does: ``python -m engine.service.grammar_child``, with the plan as
its last argument.

A grammar may keep a library busy in one call, fill its memory or overflow its stack. The stack here is smaller than
that of an engine's threads: what does not overflow here, does not there.
"""

from __future__ import annotations

import resource
import sys

import msgspec

from engine.assembly.bind import bind_constraint
from engine.assembly.plan import EnginePlan
from engine.contracts.constraint import Constraint, Grammar, GrammarError
from engine.plugin_guard.calls import describe_error
from engine.service.sandbox import child

STACK_BYTES = 4 * 2**20


class Verdict(msgspec.Struct, frozen=True):
    """Why a grammar is refused; empty: it is not. ``is_fault``: the plugin failed in another way than it may."""

    words: str = ""
    is_fault: bool = False


class GrammarCompiler:
    """Compiles grammars with a plan's plugin, one to a frame."""

    def __init__(self, plan: bytes) -> None:
        self._plan = plan
        self._constraint: Constraint | None = None
        self._decode = msgspec.msgpack.Decoder(Grammar).decode

    def prepare(self) -> None:
        """Load the plugin, and what it loads with the first grammar: no file can be opened later."""
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        self._constraint = bind_constraint(EnginePlan.from_json(self._plan))
        for grammar in (Grammar("json_object"), Grammar("gbnf", 'root ::= "a"')):
            self._verdict(grammar)

    def __call__(self, frame: bytes) -> bytes:
        return msgspec.msgpack.encode(self._verdict(self._decode(frame)))

    def _verdict(self, grammar: Grammar) -> Verdict:
        assert self._constraint is not None
        try:
            self._constraint.compile(grammar)
        except GrammarError as error:
            return Verdict(str(error).encode(errors="replace").decode() or "it cannot be compiled")
        except MemoryError:
            raise
        except Exception as error:  # a plugin may fail in any way
            return Verdict(describe_error(error, self._constraint, "compile"), is_fault=True)
        return Verdict()


if __name__ == "__main__":
    compiler = GrammarCompiler(sys.argv[3].encode())
    sys.exit(child.main(compiler, compiler.prepare))
