"""Where a gateway's request is tried, one target after another: models in order, each at the targets that have it.

It ends when an answer begins. :mod:`engine.service.sending` hands over what has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from engine.contracts.router import ApiRequest, Attempts
from engine.service.targets import Target, taking


class Places(Protocol):
    """The routers of models."""

    def place(self, api: ApiRequest, targets: list[Target]) -> Attempts:
        """``targets``: the fleet. Raises :class:`ApiError`."""

    def begun(self, api: ApiRequest, target: str) -> None:
        """It is sent to this one."""


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One model at one target."""

    model: str
    target: Target
    cached_tokens: int = 0
    """Of the prompt, that the target is expected to have."""
    reason: str = ""
    """Why it is the first of its model, in a few words; empty where it is not."""

    @property
    def max_len(self) -> int | None:
        return self.target.max_len(self.model)


@dataclass(slots=True)
class Stage:
    """One model."""

    api: ApiRequest
    """For this model."""
    targets: list[Target]
    attempts: list[Attempt] = field(default_factory=list)
    """In order, once the router was asked."""
    again: Attempt | None = None
    """It failed quickly, and is tried once more before another model is."""
    again_s: float = 0.0
    """Not before."""
    again_until_s: float = 0.0
    """Nor after."""
    was_again: bool = False


class Order:
    """The attempts of one request. Use on the event loop's thread only."""

    def __init__(
        self,
        api: ApiRequest,
        models: Mapping[str, list[Target]],
        places: Places,
        *,
        patience_s: float,
        clock: Callable[[], float],
    ) -> None:
        """``models``: in order, each with the targets that have it, own ones before providers. ``patience_s``: as
        ``gateway.patience_s``."""
        self.prompt_tokens = len(api.prompts[0])
        self._stages = [Stage(replace(api, model=model), targets) for model, targets in models.items()]
        self._places = places
        self._patience_s = patience_s
        self._clock = clock
        self._tried = list[Attempt]()
        self._most: int | None = None
        """Tokens that are known to be too few."""

    @property
    def targets(self) -> list[Target]:
        """All of them, each once."""
        return [*dict.fromkeys(target for stage in self._stages for target in stage.targets)]

    def forget(self) -> None:
        """It has begun, so it is tried nowhere any more: drop what is large."""
        self._stages.clear()

    def next(self, *, again: bool = False) -> Attempt | None:
        """The first attempt at a target that takes requests and was not made yet. ``again``: also one that was made,
        but the last one only where there is no other. ``None``: there is none now, but one may be waited for. Raises
        :class:`ApiError` as the router."""
        if self.waits:
            return None
        found = next(self._new(), None)
        if found is None and again:
            ready = [one for stage in self._stages for one in self._ready(stage)]
            found = next(iter(sorted(ready, key=lambda one: one is self._tried[-1])), None)
        if found is not None:
            stage = self._stage_of(found)
            if stage.again is found:
                stage.again, stage.was_again = None, True
            self._tried.append(found)
            if found.target.provider is None:
                self._places.begun(stage.api, found.target.id)
        return found

    @property
    def waits(self) -> bool:
        """Whether a target is waited for that is tried once more before another model is."""
        first = next(self._new(), None)
        return first is not None and first in self._tried and self._clock() < self._again_s(self._stage_of(first))

    def failed(self, attempt: Attempt, again_in_s: float) -> None:
        """Its target was quick to say that it cannot answer now, and may be asked again in so many seconds."""
        stage = self._stage_of(attempt)
        is_last = stage is self._stages[-1]
        if not is_last and not stage.was_again and again_in_s <= self._patience_s:
            stage.again, stage.again_s = attempt, self._clock() + again_in_s
            stage.again_until_s = self._clock() + self._patience_s

    def too_long(self, attempt: Attempt) -> None:
        """For this one, and so for all of which it is known that they take no more."""
        self._most = attempt.max_len

    def _stage_of(self, attempt: Attempt) -> Stage:
        return next(stage for stage in self._stages if stage.api.model == attempt.model)

    def _new(self) -> Iterator[Attempt]:
        """Attempts that may be made, in order."""
        for stage in self._stages:
            yield from [one for one in self._ready(stage) if one not in self._tried]
            if stage.again is not None and self._may_be_again(stage, stage.again.target):
                yield stage.again

    def _may_be_again(self, stage: Stage, target: Target) -> bool:
        """It takes requests, or will in time, once it has rested as it asked."""
        return bool(taking([target])) or (target.rests_s > 0.0 and self._again_s(stage) <= stage.again_until_s)

    def _again_s(self, stage: Stage) -> float:
        """When the second try may be made: another request may have been told that its target rests for longer."""
        assert stage.again is not None
        rests_s = stage.again.target.rests_s
        return max(stage.again_s, self._clock() + rests_s) if rests_s else stage.again_s

    def _ready(self, stage: Stage) -> list[Attempt]:
        """Those whose targets take requests, in order."""
        able = taking(stage.targets)
        if able and not stage.attempts:
            stage.attempts = self._placed(stage)
        return [one for one in stage.attempts if one.target in able and not self._is_too_short(one)]

    def _is_too_short(self, one: Attempt) -> bool:
        return self._most is not None and one.max_len is not None and one.max_len <= self._most

    def _placed(self, stage: Stage) -> list[Attempt]:
        """Own targets in the router's order, and providers: first those to which a prompt goes that would wait."""
        model = stage.api.model
        own = [target for target in stage.targets if target.provider is None]
        providers = [target for target in stage.targets if target.provider is not None]
        attempts, wait_ms = list[Attempt](), None
        if taking(own):
            placed = self._places.place(stage.api, own)
            first, *others = placed.engines
            by_id = {target.id: target for target in own}
            cached = sum(placed.cached_tokens)
            attempts.append(Attempt(model, by_id.pop(first), cached, placed.reason))
            attempts += [Attempt(model, by_id.pop(name)) for name in others if name in by_id]
            if not attempts[0].target.is_due:
                wait_ms = attempts[0].target.expected_ms(self.prompt_tokens - cached)
        attempts += [Attempt(model, target) for target in own if target.id not in {a.target.id for a in attempts}]
        full = [target for target in providers if _overflows(target, wait_ms)]
        reason = "" if wait_ms is None else f"{wait_ms:,.0f} ms expected at {attempts[0].target.id}"
        ahead = [Attempt(model, target, reason=reason) for target in full if target.takes_requests]
        return [*ahead, *attempts, *[Attempt(model, target) for target in providers if target not in full]]


def _overflows(target: Target, wait_ms: float | None) -> bool:
    assert target.provider is not None
    limit = target.provider.overflow_ms
    return limit is not None and wait_ms is not None and wait_ms > limit
