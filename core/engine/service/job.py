"""One API request on its way to an engine, whatever transport it came by."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.request import Retained
from engine.contracts.router import ApiRequest, Question
from engine.service.promises import Promise
from engine.service.protocol import GenerationRequest
from engine.service.reasoning import ReasoningUse
from engine.service.timings import Arrival
from engine.service.tools import ToolUse


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a request, tokenized."""

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] = ()
    """For each prompt, what ``echo`` puts before its output; empty without ``echo``."""
    question: Question | None = None
    """How a conversation ends: see :attr:`ApiRequest.question`."""
    retain: tuple[Retained, ...] = ()
    """Beginnings of each prompt that are to stay cached."""


@dataclass(frozen=True, slots=True)
class Job:
    """One API request, validated and tokenized."""

    api: ApiRequest
    options: GenerationRequest
    prompt_texts: tuple[str, ...]
    """See :attr:`Prompts.texts`."""
    arrival: Arrival
    client: str
    """Who sent the request: the queue is fair among clients."""
    created: int
    """Seconds since 1970."""
    fingerprint: str
    """The fingerprint of the engine that the request was prepared for."""
    tools: ToolUse | None = None
    """What the output may call."""
    reasoning: ReasoningUse | None = None
    """Where the output thinks."""
    promise: Promise | None = None
    """The class of the request; ``None``: there are no classes."""
    retain: tuple[Retained, ...] = ()
    """See :attr:`Prompts.retain`."""

    @property
    def num_sequences(self) -> int:
        return len(self.api.prompts) * self.api.n

    def name(self, index: int) -> str:
        """The id under which a sequence runs: made here, since ids that a client sends are only echoed."""
        return f"{self.api.request_id}-{index}"

    def prompt(self, index: int) -> tuple[int, ...]:
        """The token ids of a sequence's prompt."""
        return self.api.prompts[index // self.api.n]

    def retain_of(self, index: int) -> tuple[Retained, ...]:
        """Beginnings of a sequence's prompt that are to stay cached."""
        length = len(self.prompt(index))
        return tuple([(min(num_tokens, length), seconds) for num_tokens, seconds in self.retain])
