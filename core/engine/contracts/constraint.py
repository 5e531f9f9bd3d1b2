"""Slot ``constraint``: which tokens may come next?

A request may ask that its output follows a grammar. The core compiles the grammar before the request is queued, keeps a
matcher for each request beside the rank that chooses tokens, and gives every token that the grammar forbids a logit of
minus infinity. Drafts need no care: one that the grammar forbids is not the target's token, so it is rejected. Where a
drafter on the host drafts, what the grammar forces is drafted first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

CANNOT_FOLLOW = "the output cannot follow its grammar"
"""How the error of a request begins whose matcher cannot go on."""
GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "lark", "gbnf", "calls"]


class Grammar(msgspec.Struct, frozen=True):
    """What an output must look like, from its first token to its end."""

    kind: GrammarKind
    text: str = ""
    """A JSON Schema as JSON text, a regular expression, a JSON array of strings of which the output is one, a grammar
    in the notation of Lark, or in GBNF, or a :class:`CallsGrammar` as JSON. Empty with ``json_object``."""


class CallsGrammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """Calls of tools, as a model writes them: JSON objects between fixed texts. The text of a ``calls`` grammar is this
    as JSON."""

    schemas: tuple[dict[str, Any], ...]
    """Of the objects; each call is of one of them."""
    begins: tuple[tuple[str | int, ...], ...] = ()
    """For each schema, what stands before its object: texts, and special tokens by id. Empty: nothing."""
    is_free: bool = False
    """What follows ``begins`` is not described: the model writes no JSON there."""
    free_tokens: tuple[int, ...] = ()
    """Special tokens that may be in what is not described."""
    opens: str = ""
    """Before each call; with ``listed`` once, before the array of them."""
    opens_token: int | None = None
    """``opens`` is this special token."""
    closes: str = ""
    """After each call."""
    closes_token: int | None = None
    """``closes`` is this special token."""
    listed: bool = False
    """The calls are a JSON array."""
    several: bool = False
    """There may be more than one."""
    in_text: bool = False
    """An output need not call: text stands around calls, or instead. ``opens`` begins a call wherever it stands; where
    it is empty, an output that begins with a bracket is calls alone."""
    text_tokens: tuple[int, ...] = ()
    """Special tokens that may stand in that text, if ``opens`` is one; where it is empty, before and after all."""
    otherwise: dict[str, Any] | None = None
    """JSON of this schema may stand instead of calls, or must where there are no :attr:`schemas`."""
    answer: tuple[str | int, ...] = ()
    """Before that: texts, and special tokens by id, as in ``begins``."""
    thought: tuple[str | int, ...] = ()
    """Before all of it any text may stand between this and ``ends_thought``, any number of times; empty: nothing."""
    ends_thought: tuple[str | int, ...] = ()
    """Begins with a special token."""


class GrammarError(ValueError):
    """A grammar that is wrong or not supported, or an output that the matcher cannot follow any further."""


@runtime_checkable
class Matcher(Protocol):
    """Where one output stands in its grammar. Used by one thread at a time."""

    def advance(self, token: int) -> bool:
        """Take a token of the output, the end token included. False, and nothing changes, if the grammar forbids it.
        What :meth:`fill` allows is taken; so may be other spellings of a text than those that it allows. Raises
        :class:`GrammarError` as :meth:`fill`."""
        ...

    def roll_back(self, count: int) -> None:
        """Take back the last ``count`` tokens."""
        ...

    def fill(self, mask: Tensor) -> None:
        """Which tokens may come next. ``mask``: int32 ``[ceil(vocab_size / 32)]``, contiguous, on the CPU; bit
        ``i % 32`` of word ``i // 32`` is 1 for token ``i``. An end token is allowed where the output may end, and after
        it.

        Raises :class:`GrammarError` where matching takes more than the plugin's limits."""
        ...

    def forced(self) -> Sequence[int]:
        """Tokens that come next whatever is chosen, spelt as the vocabulary spells their text: the name of a property,
        say. They are drafts, so another spelling may be allowed, too. Empty where nothing is certain; nothing changes.
        Raises :class:`GrammarError` as :meth:`fill`."""
        ...


@runtime_checkable
class Constraint(Protocol):
    """The plugin. A rank has one that it matches with; another one, in a sandbox beside the API process, refuses what
    cannot be compiled. The sandbox compiles a grammar of JSON and one in GBNF before it is closed: later no file or
    socket can be opened, and no process started."""

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the beginning of an output. Raises :class:`GrammarError` saying what is wrong with the grammar,
        for the client who sent it. Called from several threads at once, while other matchers are in use."""
        ...
