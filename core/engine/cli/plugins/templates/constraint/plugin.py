"""Constraint ``mine``: the output is one of a few texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.contracts.config import ConstraintConfig, at_least
from engine.contracts.constraint import Grammar, GrammarError
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineConstraintConfig(ConstraintConfig):
    """The keys ``constraint.<field>``; those of the base are there for every constraint."""

    max_choices: int = 1000
    """Most texts of a request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("constraint.max_choices", self.max_choices, 1)


@hookimpl
def engine_constraint() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.constraint.plugin:MineConstraint",
            config=MineConstraintConfig,
            doc="The output is one of a few texts.",
        )
    ]


class MineConstraint:
    """Each rank that chooses tokens has one, and the API process another, which refuses grammars."""

    def __init__(self, config: MineConstraintConfig, context: BuildContext) -> None:
        self._max_choices = config.max_choices
        self._ends = context.model.eos_token_ids
        self._tokenizer = Tokenizer.from_file(str(Path(context.model.path) / "tokenizer.json"))

    def compile(self, grammar: Grammar) -> MineConstraintMatcher:
        """A matcher at the beginning of an output. Called from several threads."""
        if grammar.kind != "choice":
            raise GrammarError(f"only a choice of texts is supported, not {grammar.kind}")
        texts: list[str] = json.loads(grammar.text)
        if len(texts) > self._max_choices:
            raise GrammarError(f"{len(texts)} texts, at most {self._max_choices} (constraint.max_choices)")
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return MineConstraintMatcher([list(each.ids) for each in found], self._ends)


class MineConstraintMatcher:
    """The tokens taken so far, and the texts that begin with them. A real one keeps a state that is quicker to ask."""

    def __init__(self, texts: Sequence[Sequence[int]], ends: Sequence[int]) -> None:
        self._texts = texts
        self._ends = ends
        self._taken: list[int] = []

    def advance(self, token: int) -> bool:
        """Take a token of the output; False, and nothing changes, if it is forbidden."""
        if token not in self._allowed():
            return False
        self._taken.append(token)
        return True

    def roll_back(self, count: int) -> None:
        """Take back the last tokens: they were drafts."""
        del self._taken[len(self._taken) - count :]

    def fill(self, mask: Tensor) -> None:
        """A bit for every token that may come next, int32 ``[ceil(vocab_size / 32)]``."""
        mask.zero_()
        for token in self._allowed():
            mask[token // 32] |= torch.tensor(1 << token % 32).to(torch.int32)

    def forced(self) -> Sequence[int]:
        """What comes next whatever is chosen: the core drafts it."""
        allowed = self._allowed()
        return tuple(allowed) if len(allowed) == 1 else ()

    def _allowed(self) -> set[int]:
        taken = self._taken
        if taken and taken[-1] in self._ends:
            return set(self._ends)
        open_texts = [text for text in self._texts if list(text[: len(taken)]) == taken]
        following = {text[len(taken)] for text in open_texts if len(text) > len(taken)}
        return following | (set(self._ends) if taken in map(list, open_texts) else set())
