"""The router, asked: what it decides is checked, and what it raises is its request's failure and nobody else's."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from urllib.parse import urlsplit

import structlog

from engine.contracts.router import (
    Answer,
    AnswerStore,
    AnswerTally,
    ApiRequest,
    Attempts,
    EngineView,
    ModelChoice,
    ModelChooser,
    ModelRequest,
    ModelView,
    Reject,
    Route,
    Router,
    RouterTold,
    ToEngine,
    ToUrl,
)
from engine.plugin_guard.calls import contract_error, describe_error, name_of, quote
from engine.plugin_guard.values import problems
from engine.service.errors import ApiError, Rejected
from engine.service.logs import Repeated
from engine.service.replay import choice_problem

LONGEST_RETRY_S = 24 * 3600
"""A router may ask a client to wait for so long."""
SLOW_ROUTER_MS = 50.0
"""A router that takes longer over a request is reported: nothing else happens on the event loop meanwhile."""

log = structlog.get_logger("engine.dispatch")


class Placing:
    """One router. Use on the event loop's thread only."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self._told = router if isinstance(router, RouterTold) else None
        self._chooser = router if isinstance(router, ModelChooser) else None
        self._store = router if isinstance(router, AnswerStore) else None
        self._failures = Repeated("router failed")

    def place(self, api: ApiRequest, fleet: Sequence[EngineView]) -> Attempts | ToUrl | Answer:
        """What the router decides. Raises :class:`ApiError`: :class:`Rejected` where it refuses, ``failed`` where it
        fails."""
        begun_s = time.monotonic()
        try:
            route = self.router.place(api, tuple(fleet))
        except Exception as error:
            self._report("place", error, api)
            raise _router_failed() from None
        if (ms := (time.monotonic() - begun_s) * 1e3) > SLOW_ROUTER_MS:
            name = name_of(self.router)
            log.warning("router blocked the server", router=name, ms=round(ms), request_id=api.request_id)
        names = [engine.engine_id for engine in fleet]
        if wrong := route_problem(route, len(api.prompts), len(api.prompts) * api.n, names):
            self._failures.warning(error=str(contract_error(self.router, "place", wrong)), request_id=api.request_id)
            raise _router_failed()
        if isinstance(route, Reject):
            raise Rejected(route.status, route.message, route.retry_after_s)
        return Attempts((route.engine_id,)) if isinstance(route, ToEngine) else route

    def choose(self, request: ModelRequest, models: Sequence[ModelView]) -> ModelChoice:
        """The models in the order in which they are tried; as they are where the router does not choose. Raises
        :class:`ApiError` ``failed`` where it fails."""
        names = [model.name for model in models]
        if self._chooser is None:
            return ModelChoice(tuple(names))
        try:
            chosen: object = self._chooser.choose(request, tuple(models))
        except Exception as error:
            self._report("choose", error, request)
            raise _router_failed() from None
        choice = ModelChoice(chosen) if isinstance(chosen, tuple) else chosen
        if wrong := choice_of_models_problem(choice, names):
            self._failures.warning(
                error=str(contract_error(self.router, "choose", wrong)), request_id=request.request_id
            )
            raise _router_failed()
        assert isinstance(choice, ModelChoice)
        return choice

    def begun(self, api: ApiRequest, engine: str) -> None:
        """The request is on its way to an engine: a router that cannot take notes is only reported."""
        if self._told is None:
            return
        try:
            self._told.begun(api, engine)
        except Exception as error:
            self._report("begun", error, api)

    def finished(self, api: ApiRequest, answer: Answer) -> None:
        """The client has its answer: a router that cannot take notes is only reported."""
        try:
            self.router.finished(api, answer)
        except Exception as error:
            self._report("finished", error, api)

    def tally(self) -> AnswerTally | None:
        """Of stored answers; ``None`` where the router has none, or cannot say it, which was reported."""
        if self._store is None:
            return None
        try:
            found = self._store.tally()
        except Exception as error:
            self._failures.warning(error=describe_error(error, self.router, "tally"), exc_info=error)
            return None
        if wrong := next(problems(found, AnswerTally, "a tally"), ""):
            self._failures.warning(error=str(contract_error(self.router, "tally", f"returned what is none: {wrong}")))
            return None
        return found

    def _report(self, method: str, error: Exception, api: ApiRequest | ModelRequest) -> None:
        described = describe_error(error, self.router, method)
        self._failures.warning(error=described, request_id=api.request_id, exc_info=error)


def _router_failed() -> ApiError:
    return ApiError("failed", "The router failed on this request.", code="router_failed")


def route_problem(route: object, num_prompts: int, num_choices: int, engines: Collection[str]) -> str:
    """Why this is no route for a request of so many prompts and choices; empty if it is one. ``engines``: the ids of
    the fleet."""
    wrong = next(problems(route, Route, "a route"), "")
    if wrong:
        return f"returned what is no route: {wrong}"
    match route:
        case ToEngine() | Attempts() if problem := _attempts_problem(route, num_prompts, engines):
            return problem
        case Reject(status) if status not in range(400, 600):
            return f"returned {quote(route)}, expected a status from 400 to 599"
        case Reject(retry_after_s=seconds) if not 0 <= (seconds or 0) <= LONGEST_RETRY_S:
            return f"returned {quote(route)}, expected retry_after_s from 0 to {LONGEST_RETRY_S}"
        case ToUrl(url) if not _is_url(url):
            return f"returned {quote(route)}, expected an http or https URL"
        case Answer(choices) if len(choices) != num_choices:
            return f"returned an answer of {len(choices)} choices, expected {num_choices}"
        case Answer(choices):
            return next(filter(None, map(choice_problem, choices)), "")
    return ""


def choice_of_models_problem(chosen: object, models: Collection[str]) -> str:
    """Why these are not some of the models, each once, at least one; empty if they are."""
    wrong = next(problems(chosen, ModelChoice, "an order"), "")
    if wrong:
        return f"returned what is no order of models: {wrong}"
    assert isinstance(chosen, ModelChoice)
    names = chosen.models
    if not names or len({*names}) < len(names) or not {*names} <= {*models}:
        return f"returned {quote(chosen)}, expected some of {', '.join(map(repr, models))}, each at most once"
    return ""


def _attempts_problem(route: ToEngine | Attempts, num_prompts: int, engines: Collection[str]) -> str:
    attempts = Attempts((route.engine_id,)) if isinstance(route, ToEngine) else route
    if not attempts.engines or not all(name in engines for name in attempts.engines):
        expected = "an engine" if isinstance(route, ToEngine) else "at least one engine, each"
        return f"returned {quote(route)}, expected {expected} of the fleet: {', '.join(map(repr, engines))}"
    cached = attempts.cached_tokens
    if cached and (len(cached) != num_prompts or min(cached) < 0):
        return f"returned {quote(route)}, expected cached_tokens from 0 for each of {num_prompts} prompts, or none"
    return ""


def _is_url(text: str) -> bool:
    try:
        found = urlsplit(text)
        return found.scheme in ("http", "https") and bool(found.hostname) and (found.port or 1) > 0
    except ValueError:
        return False
