"""The ids of output tokens, for requests with ``return_token_ids``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.http.answering import Job
from engine.service.generation import SequenceRun


class TokenIds:
    """Of every choice; each id is handed out once. They are as many as ``usage`` counts."""

    def __init__(self, job: Job, runs: Sequence[SequenceRun]) -> None:
        self.wanted = bool(job.request.return_token_ids)
        self._runs = runs
        self._given = [0] * len(runs)

    def new(self, index: int) -> dict[str, Any]:
        """``token_ids`` of a choice since the last call; nothing unless they are wanted."""
        if not self.wanted:
            return {}
        ids = self._runs[index].tokens[self._given[index] :]
        self._given[index] += len(ids)
        return {"token_ids": ids}
