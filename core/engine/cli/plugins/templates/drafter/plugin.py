"""Drafter ``mine``: what followed the last time the same few tokens occurred in this request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from engine.contracts.config import DrafterConfig, at_least
from engine.contracts.drafter import Draft, DraftRow
from engine.contracts.provider import BuildContext, Provider
from engine.hookspecs import hookimpl


@dataclass(frozen=True)
class MineDrafterConfig(DrafterConfig):
    """The keys ``drafter.<field>``; those of the base are there for every drafter."""

    match: int = 2
    """Latest tokens that must have occurred before."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("drafter.match", self.match, 1)


@hookimpl
def engine_drafter() -> list[Provider]:
    return [
        Provider(
            "mine",
            "engine.cli.plugins.templates.drafter.plugin:MineDrafter",
            config=MineDrafterConfig,
            provides=("drafts", "host_drafter"),
            doc="Continues as the same tokens continued before.",
        )
    ]


class MineDrafter:
    """A drafter on the host: it reads tokens, so steps with drafts wait for the tokens of the step before."""

    placement: Literal["host", "device"] = "host"

    def __init__(self, config: MineDrafterConfig, context: BuildContext) -> None:
        self.max_width = config.max_width
        """Most tokens that are ever proposed for a row."""
        self._match = config.match

    def propose(self, rows: Sequence[DraftRow]) -> Draft:
        """For each row at most ``row.num_draft_tokens`` tokens of the vocabulary; none where there is nothing to say.

        The core verifies all: wrong drafts cost time, never correctness. Nothing of one ``row.salt`` may show in
        another's drafts.
        """
        return Draft(tuple(self._continue(row) for row in rows))

    def _continue(self, row: DraftRow) -> tuple[int, ...]:
        tokens = row.tokens
        suffix = tokens[-self._match :]
        for end in range(len(tokens) - 1, self._match - 1, -1):
            if tokens[end - self._match : end] == suffix:
                return tuple(tokens[end : end + row.num_draft_tokens])
        return ()

    def release(self, row_id: int) -> None:
        """The request in this row is gone: forget what was kept for it."""
